"""The server over tiny models: the openai client and raw HTTP against a live uvicorn."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from conftest import tiny_lm
from openai import OpenAI
from starlette.testclient import TestClient
from test_engine import add_translator

from cag import cli
from cag.engine import CAG
from cag.errors import CagError
from cag.lm.decode import Generation
from cag.server import Limits, background, create_app, serve
from eval.bench.server import measure_server
from store import StoreFull

QUESTION = "How many bells has the tower?"
USER: list[Any] = [{"role": "user", "content": QUESTION}]
QUESTIONS = [QUESTION, "What colour are boats?", "When was the harbour built?"]


@pytest.fixture
def filled(engine: CAG, docs: Path) -> CAG:
    """The engine over two documents, with a translator."""
    engine.ingest([docs])
    add_translator(engine)
    return engine


class Live:
    """A running server and its clients."""

    def __init__(self, url: str, server: uvicorn.Server) -> None:
        self.url, self.server = url, server
        self.openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)
        self.http = httpx.Client(base_url=url, timeout=20)

    def body(self, **more: Any) -> dict[str, Any]:
        return {"model": "tgt", "messages": USER, **more}

    def chat(self, **more: Any) -> Any:
        return self.openai.chat.completions.create(**self.body(**more))

    def post(self, **more: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=self.body(**more))

    def counts(self) -> dict[str, int]:
        queues = self.http.get("/health").json()["queues"]
        counts: dict[str, int] = queues.get("tgt", {"running": 0, "waiting": 0})
        return counts

    def wait_for(self, running: int, waiting: int) -> None:
        until = time.monotonic() + 10
        while self.counts() != {"running": running, "waiting": waiting}:
            assert time.monotonic() < until, self.counts()
            time.sleep(0.005)


@pytest.fixture
def start(filled: CAG) -> Iterator[Callable[..., Live]]:
    """Starts servers over the filled engine."""
    running, lives = [], []

    def go(engine: CAG = filled, key: str | None = None, **limits: Any) -> Live:
        context = background(create_app(engine, key=key, limits=Limits(**limits)))
        running.append(context)
        lives.append(Live(*context.__enter__()))
        return lives[-1]

    yield go
    for live, context in zip(lives, running, strict=True):
        live.openai.close()
        live.http.close()
        context.__exit__(None, None, None)


@pytest.fixture
def live(start: Callable[..., Live]) -> Live:
    return start()


@pytest.fixture
def local(filled: CAG) -> Iterator[TestClient]:
    """The app without sockets."""
    app = create_app(filled)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


class Gate:
    """Lets answers through piece by piece, and counts the pieces that were made."""

    def __init__(self) -> None:
        self.made = 0
        self.steps = threading.Semaphore(0)

    def open(self) -> None:
        self.steps.release(1000)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Holds every answer back after its first piece."""
    gate, stream = Gate(), CAG.stream

    def held(*args: Any, **kwargs: Any) -> Any:
        result = stream(*args, **kwargs)
        result._pieces = slowly(result._pieces)
        return result

    def slowly(pieces: Iterator[str]) -> Iterator[str]:
        for piece in pieces:
            gate.made += 1
            yield piece
            gate.steps.acquire(timeout=10)

    monkeypatch.setattr(CAG, "stream", held)
    yield gate
    gate.open()


# -- answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["translated", "direct", "own"])
def test_an_answer_is_the_engines_streamed_or_not(filled: CAG, live: Live, mode: str) -> None:
    extra = {"cag": {"mode": mode, "k": 1}}
    filled.ask(QUESTION, mode=mode, k=1)  # the own path stores what it reads
    wanted = filled.ask(QUESTION, mode=mode, k=1)
    whole = live.chat(extra_body=extra)
    options = {"include_usage": True}
    chunks = list(live.chat(extra_body=extra, stream=True, stream_options=options))
    *pieces, last, counted = chunks
    texts = [chunk.choices[0].delta.content or "" for chunk in pieces]
    assert whole.choices[0].message.content == "".join(texts) == wanted.answer != ""
    assert sum(map(bool, texts)) > 1
    assert pieces[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    assert {chunk.id for chunk in chunks} == {chunks[0].id} != {whole.id}
    assert whole.choices[0].finish_reason == last.choices[0].finish_reason == wanted.finish
    assert (whole.model, whole.object, last.object) == (
        "tgt", "chat.completion", "chat.completion.chunk"
    )  # fmt: skip
    tokens = wanted.tokens
    for usage in (whole.usage, counted.usage):
        assert usage.prompt_tokens == tokens.prefix + tokens.passage + tokens.suffix
        assert usage.completion_tokens == tokens.generated
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        unread = tokens.prefix if mode == "direct" else tokens.prefix + tokens.passage
        assert usage.prompt_tokens_details.cached_tokens == unread
    assert counted.choices == []
    assert all(chunk.usage is None for chunk in [*pieces, last])
    for told in (whole.cag, last.cag):
        assert (told["path"], told["reason"]) == (mode, "")
        assert told["sources"] == [source.to_json() for source in wanted.sources]
        assert told["tokens"]["generated"] == tokens.generated
        assert told["timings_ms"]["total"] > 0


def test_the_raw_stream_is_server_sent_events(live: Live) -> None:
    with live.http.stream("POST", "/v1/chat/completions", json=live.body(stream=True)) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert all("usage" not in chunk for chunk in chunks)


def test_asking_gives_the_json_of_the_command(filled: CAG, local: TestClient) -> None:
    asked = {"question": QUESTION, "target": "tgt", "mode": "direct", "k": 1, "max_tokens": 3}
    found = local.post("/v1/ask", json=asked).json()
    generation = Generation(max_tokens=3, stop=filled.template.stop)
    wanted = filled.ask(QUESTION, mode="direct", k=1, generation=generation).to_json()
    for content in (found, wanted):
        del content["timings_ms"], content["tokens_per_second"]
    assert found == wanted
    assert local.post("/v1/ask", json={"question": QUESTION}).json()["path"] == "translated"


def test_the_last_user_message_is_the_question(live: Live) -> None:
    parts = [{"type": "text", "text": part} for part in (QUESTION[:8], QUESTION[8:])]
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What are boats?"},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": parts},
    ]
    assert live.chat(messages=turns).choices == live.chat().choices


def test_stop_strings_never_show(filled: CAG, live: Live) -> None:
    generation = Generation(max_tokens=24, stop=("\n",))
    full = filled.ask(QUESTION, mode="direct", generation=generation).answer
    stop = full[4:7]  # spans tokens
    more = {"max_tokens": 24, "extra_body": {"cag": {"mode": "direct"}}}
    for given in (stop, ["never there", stop]):
        choice = live.chat(stop=given, **more).choices[0]
        assert choice.message.content == full[: full.index(stop)].strip()
        assert choice.finish_reason == "stop"
        pieces = live.chat(stop=given, stream=True, **more)
        assert "".join(p.choices[0].delta.content or "" for p in pieces) == choice.message.content


def test_a_seed_makes_sampling_repeatable(live: Live) -> None:
    def text(**more: Any) -> str:
        given: str = live.chat(temperature=2.0, top_p=0.95, **more).choices[0].message.content
        return given

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert live.chat(temperature=0).choices == live.chat().choices


def test_the_longest_answer_has_two_names(live: Live) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = live.chat(**{name: 2})
        assert answer.usage.completion_tokens == 2
        assert answer.choices[0].finish_reason == "length"


def test_nothing_ingested_is_free_chat(engine: CAG, start: Callable[..., Live]) -> None:
    empty = CAG(engine.settings, models=engine.models, store_folder=engine.folder / "new")
    live = start(empty)
    answer = live.chat()
    assert answer.usage.prompt_tokens > 0
    assert answer.cag["path"] == "direct"
    assert answer.cag["sources"] == []
    assert "nothing was ingested" in answer.cag["reason"]
    reply = live.http.post("/v1/ask", json={"question": QUESTION})
    assert reply.status_code == 400
    assert "cag ingest" in reply.json()["error"]["message"]
    empty.store.close()


def test_models_that_can_answer_are_listed(filled: CAG, live: Live) -> None:
    listed = {model.id: model for model in live.openai.models.list()}
    assert set(listed) == {"tgt", "ref"}
    assert listed["tgt"].cag == {"loaded": True, "translator": "ref--tgt"}
    assert listed["ref"].cag == {"loaded": True, "translator": None}
    assert live.openai.models.retrieve("tgt") == listed["tgt"]
    with pytest.raises(openai.NotFoundError):
        live.openai.models.retrieve("org/other")


# -- errors --------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str | None]] = {
    "n": ({"n": 2}, "n"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "logprobs": ({"logprobs": True}, "logprobs"),
    "format": ({"response_format": {"type": "json_object"}}, "response_format"),
    "penalty": ({"frequency_penalty": 0.5}, "frequency_penalty"),
    "unknown": ({"flavour": "sweet"}, "flavour"),
    "model": ({"model": None}, "model"),
    "messages": ({"messages": []}, "messages"),
    "no user": ({"messages": [{"role": "system", "content": "Be brief."}]}, "messages"),
    "role": ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "empty": ({"messages": [{"role": "user", "content": " "}]}, "messages[0].content"),
    "half a character": (
        {"messages": [{"role": "user", "content": "\ud800"}]},
        "messages[0].content",
    ),
    "temperature": ({"temperature": -1}, "temperature"),
    "top_p": ({"top_p": 0}, "top_p"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens text": ({"max_tokens": "5"}, "max_tokens"),
    "seed": ({"seed": 2**64}, "seed"),
    "stop": ({"stop": [1]}, "stop[0]"),
    "stream options": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "mode": ({"cag": {"mode": "other"}}, "cag.mode"),
    "k": ({"cag": {"k": 0}}, "cag.k"),
    "refresh": ({"cag": {"refresh": 1.5}}, "cag.refresh"),
    "extension": ({"cag": {"more": 1}}, "cag.more"),
    "too long": ({"max_tokens": 10**6}, None),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_with_a_reason(local: TestClient, name: str) -> None:
    changes, param = WRONG[name]
    body = json.dumps({"model": "tgt", "messages": USER, **changes})
    kind = {"Content-Type": "application/json"}
    reply = local.post("/v1/chat/completions", content=body, headers=kind)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"] and "\n" not in error["message"]


def test_values_that_change_nothing_are_taken(live: Live) -> None:
    more = {
        "n": 1, "tools": [], "logprobs": False, "response_format": {"type": "text"}, "user": "me",
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "stop": None,
    }  # fmt: skip
    assert live.chat(**more).choices == live.chat().choices


def test_what_is_no_json_object_is_refused(local: TestClient) -> None:
    kind = {"Content-Type": "application/json"}
    deep = b"[" * 100_000
    for content in (b"{", b"[]", b"\xff", b"", b'"text"', deep):
        reply = local.post("/v1/chat/completions", content=content, headers=kind)
        assert (reply.status_code, set(reply.json())) == (400, {"error"}), content[:9]
    body = json.dumps({"model": "tgt", "messages": USER})  # as a page of another site could send it
    reply = local.post("/v1/chat/completions", content=body, headers={"Content-Type": "text/plain"})
    assert reply.status_code == 400
    assert "application/json" in reply.json()["error"]["message"]


def test_only_served_models_answer(filled: CAG, local: TestClient, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("other", str(tmp_path), "org/name", "all-minilm-l6-v2", "\ud800", ""):
        content = json.dumps({"model": name, "messages": USER})
        kind = {"Content-Type": "application/json"}
        reply = local.post("/v1/chat/completions", content=content, headers=kind)
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "model_not_found"
    assert local.post("/v1/ask", json={"question": "x", "target": "no"}).status_code == 404
    assert local.get("/v1/nothing").json()["error"]["message"] == "Not Found"
    assert local.get("/v1/ask").status_code == 405


def test_a_key_is_asked_for_everywhere_but_at_health(start: Callable[..., Live]) -> None:
    live = start(key="s3cret")
    for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"},
                  {"Authorization": b"Bearer \xff"}):  # fmt: skip
        for path in ("/v1/models", "/v1/ask", "/v1/chat/completions", "/openapi.json"):
            reply = live.http.get(path, headers=given)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
    assert live.http.get("/health").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        live.chat()
    right = OpenAI(base_url=f"{live.url}/v1", api_key="s3cret", max_retries=0)
    with right:
        assert right.chat.completions.create(model="tgt", messages=USER).choices
    elsewhere = live.http.get("/v1/models", headers={"Authorization": "bearer s3cret", "Host": "x"})
    assert elsewhere.status_code == 200


def test_without_a_key_only_this_machine_is_a_host(local: TestClient) -> None:
    for host in ("evil.example:8642", "127.0.0.1.evil.example", "10.0.0.1", "[", ""):
        reply = local.get("/v1/models", headers={"Host": host})
        assert reply.status_code == 403, host
    for host in ("localhost", "127.0.0.1:80", "[::1]:8642", "LOCALHOST"):
        assert local.get("/health", headers={"Host": host}).status_code == 200


def test_large_bodies_are_refused_and_the_server_goes_on(start: Callable[..., Live]) -> None:
    live = start(body=10_000)
    large = json.dumps(live.body(user="x" * 200_000)).encode()

    def in_pieces() -> Iterator[bytes]:
        for at in range(0, len(large), 5000):
            yield large[at : at + 5000]

    kind = {"Content-Type": "application/json"}
    for content in (large, in_pieces()):
        reply = live.http.post("/v1/chat/completions", content=content, headers=kind)
        assert reply.status_code == 413
        assert "10000 bytes" in reply.json()["error"]["message"]
    assert live.chat().choices


def test_what_fails_inside_shows_no_traceback(
    filled: CAG, local: TestClient, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def fail(error: Exception) -> httpx.Response:
        def raising(*args: Any, **kwargs: Any) -> Any:
            raise error

        monkeypatch.setattr(filled, "retrieve", raising)
        body = {"model": "tgt", "messages": USER}
        reply: httpx.Response = local.post("/v1/chat/completions", json=body)
        return reply

    with caplog.at_level(logging.ERROR, "cag.server"):
        unexpected = fail(KeyError("secret"))
        full = fail(StoreFull("the disk is full; make room"))
    known = fail(CagError("say it differently"))
    assert (unexpected.status_code, full.status_code, known.status_code) == (500, 500, 400)
    assert "secret" not in unexpected.text
    assert "secret" in caplog.text
    assert full.json()["error"]["message"] == "the disk is full; make room"
    assert known.json()["error"]["message"] == "say it differently"
    assert local.get("/health").json()["queues"]["tgt"] == {"running": 0, "waiting": 0}


# -- queues --------------------------------------------------------------------------------


def test_overload_is_told_and_passes(start: Callable[..., Live], gate: Gate) -> None:
    live = start(queue=1)
    wanted = None
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(live.post)
        live.wait_for(1, 0)
        second = pool.submit(live.post)
        live.wait_for(1, 1)
        refused = live.post()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        with pytest.raises(openai.RateLimitError):
            live.chat()
        assert live.http.get("/health").json()["status"] == "ok"  # the loop is free
        assert live.http.get("/v1/models").status_code == 200
        gate.open()
        wanted = first.result().json()["choices"]
        assert second.result().json()["choices"] == wanted
    live.wait_for(0, 0)
    assert live.post().json()["choices"] == wanted


def test_each_model_has_a_queue_of_its_own(filled: CAG, live: Live, gate: Gate) -> None:
    other = tiny_lm("qwen2", 40, seed=2)
    other.name = "other"
    filled.models.add(other)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(live.post, model=name) for name in ("tgt", "other")]
        live.wait_for(1, 0)
        until = time.monotonic() + 10
        while len(live.http.get("/health").json()["queues"]) < 2 or gate.made < 2:
            assert time.monotonic() < until
        gate.open()
        assert [job.result().status_code for job in both] == [200, 200]


def test_a_client_that_leaves_frees_the_queue(live: Live, gate: Gate) -> None:
    left: list[Any] = [None] * 2
    with httpx.Client(base_url=live.url) as client:
        body = live.body(stream=True, max_tokens=24)
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            next(line for line in reply.iter_lines() if '"content"' in line)
            for number in range(2):  # these leave while they wait
                left[number] = raw_post(live, live.body(stream=bool(number)))
            live.wait_for(1, 2)
            for connection in left:
                connection.close()
            live.wait_for(1, 0)
    left_early(live, gate)
    gate.open()
    assert live.chat().choices


def test_a_client_that_leaves_without_streaming_frees_the_queue(live: Live, gate: Gate) -> None:
    connection = raw_post(live, live.body(max_tokens=24))
    live.wait_for(1, 0)
    connection.close()
    left_early(live, gate)


def left_early(live: Live, gate: Gate) -> None:
    """Let pieces through until the queue is free: it ends between two, long before the last."""
    while live.counts() != {"running": 0, "waiting": 0}:
        assert gate.made < 20, "the answer goes on although nobody listens"
        gate.steps.release()
        time.sleep(0.1)  # the server needs a moment to see that the client has left


def raw_post(live: Live, body: dict[str, Any]) -> socket.socket:
    """Send a request and do not wait for the reply."""
    content = json.dumps(body).encode()
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def test_too_slow_is_504_and_a_stream_ends_with_an_error(
    start: Callable[..., Live], gate: Gate
) -> None:
    live = start(seconds=1.0)
    late = live.post()
    assert late.status_code == 504
    assert late.json()["error"]["code"] == "timeout"
    gate.steps.release()
    live.wait_for(0, 0)
    chunks, message = [], ""
    try:
        for chunk in live.chat(stream=True):
            chunks.append(chunk.choices[0].delta.content)
    except openai.APIError as error:
        message = str(error)
    assert "took too long" in message
    assert chunks[0] == ""
    assert chunks[1]  # the piece that came in time
    gate.open()
    live.wait_for(0, 0)


def test_a_failure_in_the_middle_ends_the_stream(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = CAG.stream

    def failing(*args: Any, **kwargs: Any) -> Any:
        result = stream(*args, **kwargs)
        pieces = result._pieces

        def some() -> Iterator[str]:
            yield next(pieces)
            raise CagError("it broke")

        result._pieces = some()
        return result

    monkeypatch.setattr(CAG, "stream", failing)
    with pytest.raises(openai.APIError, match="it broke"):
        list(live.chat(stream=True))
    assert live.post().status_code == 400
    live.wait_for(0, 0)


def test_concurrent_clients_get_the_sequential_answers(filled: CAG) -> None:
    for mode in ("translated", "direct"):
        found = measure_server(filled, QUESTIONS, clients=8, requests=16, mode=mode)
        assert (found["failures"], found["equal"]) == (0, 16), found
        assert found["path"] == mode
        ttft = found["concurrent"]["ttft_ms"]
        assert 0 < ttft["p50"] <= ttft["p95"]


def test_stopping_finishes_the_answers(start: Callable[..., Live], gate: Gate) -> None:
    live = start(queue=4)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(live.post)
        live.wait_for(1, 0)
        streamed = pool.submit(lambda: list(live.chat(stream=True)))
        live.wait_for(1, 1)
        live.server.should_exit = True  # what uvicorn does on SIGTERM
        time.sleep(0.3)
        with pytest.raises(httpx.ConnectError), httpx.Client(base_url=live.url) as late:
            late.get("/health")
        gate.open()
        answer = whole.result().json()["choices"][0]
        assert answer["finish_reason"] in ("stop", "length")
        chunks = streamed.result()
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer["message"]["content"]
    assert chunks[-1].choices[0].finish_reason == answer["finish_reason"]


# -- starting ------------------------------------------------------------------------------


def test_others_may_not_listen_in_without_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CAG_API_KEY", raising=False)
    for host in ("0.0.0.0", "::", "", "example.org"):
        with pytest.raises(CagError, match="CAG_API_KEY"):
            serve(lambda: pytest.fail("made an engine"), host=host)
    monkeypatch.setenv("CAG_API_KEY", " \n")
    monkeypatch.setattr(sys, "argv", ["cag", "serve", "--host", "0.0.0.0"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("cag: others can reach '0.0.0.0'")


def test_an_address_in_use_is_told(filled: CAG) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CagError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(lambda: filled, port=port)


def test_serve_runs_until_it_is_told_to_stop(
    filled: CAG, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the main thread, where signals arrive."""
    monkeypatch.setenv("CAG_API_KEY", "s3cret")
    replies: list[httpx.Response] = []

    def visit() -> None:
        printed, until = "", time.monotonic() + 10
        try:
            while "http://" not in printed and time.monotonic() < until:
                time.sleep(0.01)
                printed += capsys.readouterr().out
            url = printed.split("listens on ")[1].split(";")[0]
            key = {"Authorization": "Bearer s3cret"}
            body = {"model": "tgt", "messages": USER}
            replies.append(httpx.post(f"{url}/v1/chat/completions", json=body, headers=key))
        finally:
            signal.raise_signal(signal.SIGTERM)

    visitor = threading.Thread(target=visit)
    visitor.start()
    before = signal.getsignal(signal.SIGTERM)
    serve(lambda: filled, port=0)
    visitor.join()
    assert replies[0].status_code == 200
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("cag.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(CagError, match=r"pip install 'cag\[server\]'"):
        import cag.server  # noqa: F401


def test_settings_of_the_engine_are_the_defaults(filled: CAG) -> None:
    engine = CAG(replace(filled.settings, k=1, max_tokens=2), models=filled.models)
    with TestClient(create_app(engine), base_url="http://localhost") as client:
        found = client.post("/v1/chat/completions", json={"model": "tgt", "messages": USER}).json()
    assert found["usage"]["completion_tokens"] <= 2
    assert len(found["cag"]["sources"]) == 1
    engine.store.close()
