"""`cag serve` under load: concurrent clients against one client, in one run."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from cag.engine import CAG
from cag.server import Limits, background, create_app
from cag.settings import Settings
from eval.bench.speed import synthetic_sentences, synthetic_text

_SENTENCES, _QUESTIONS, _SECONDS = 200, 20, 600.0


@dataclass
class Heard:
    """What a client got for one question.

    Attributes
    ----------
    text
        The answer.
    problem
        Why there is no complete answer; empty if there is one.
    first
        Milliseconds from the request to the first piece of text; None if there was none.
    tokens
        Generated tokens.
    path
        How the answer came about.
    """

    question: str
    text: str = ""
    problem: str = "the stream broke off"
    first: float | None = None
    tokens: int = 0
    path: str = ""

    def take(self, line: str, ms: float) -> None:
        """Read a line of the stream, which came after that many milliseconds."""
        content = line.removeprefix("data: ")
        if content == "[DONE]":
            self.problem = ""
        elif content:
            chunk = json.loads(content)
            if "error" in chunk:
                self.problem = chunk["error"]["message"]
                return
            piece = chunk["choices"][0]["delta"].get("content", "")
            if piece and self.first is None:
                self.first = ms
            self.text += piece
            if "cag" in chunk:
                self.path, self.tokens = chunk["cag"]["path"], chunk["cag"]["tokens"]["generated"]


def run_server(
    settings: Settings, clients: int = 8, requests: int = 200, mode: str = "translated"
) -> dict[str, Any]:
    """Load on a server over a store of synthetic sentences; see `measure_server`."""
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "sentences.md"
        document.write_text(synthetic_text(_SENTENCES), encoding="utf-8")
        # the clients repeat the single client's questions: both are to do the same work
        settings = replace(settings, keep_mb=0.0)
        engine = CAG(settings, store_folder=Path(folder) / "store")
        engine.ingest([document])
        questions = [
            f"{sentence.rpartition(' in ')[0]} in which year?"
            for sentence in islice(synthetic_sentences(), _QUESTIONS)
        ]
        result = measure_server(engine, questions, clients, requests, mode)
        dtype = str(engine.models.lm(settings.target).dtype)
        engine.store.close()
    return {"target": settings.target, "dtype": dtype, **result}


def measure_server(
    engine: CAG, questions: Sequence[str], clients: int, requests: int, mode: str
) -> dict[str, Any]:
    """Ask each question once by one client, then many by several clients at the same time.

    All clients ask one model, greedily, over connections of their own, and read the stream.
    Times to the first token are those that clients see: waiting for others counts.

    Parameters
    ----------
    questions
        Asked in turn; the answers of the single client are what the others are compared with.

    Returns
    -------
    dict
        ``failures``, ``equal`` (how many answers were the single client's), requests and
        tokens per second, and ``ttft_ms``, by arm: ``sequential`` and ``concurrent``.
    """
    asked = list(islice(cycle(questions), requests))
    app = create_app(engine, limits=Limits(queue=clients, seconds=_SECONDS))
    with background(app) as (url, _), ThreadPoolExecutor(clients) as pool:

        def client(questions: Sequence[str]) -> list[Heard]:
            with httpx.Client(base_url=url, timeout=_SECONDS) as connection:
                target = engine.settings.target
                return [_ask(connection, target, mode, question) for question in questions]

        client(questions[:1])  # loads what is not loaded yet
        started = time.perf_counter()
        alone = client(questions)
        middle = time.perf_counter()
        shares = pool.map(client, [asked[at::clients] for at in range(clients)])
        together = [heard for share in shares for heard in share]
        ended = time.perf_counter()
    wanted = {heard.question: heard.text for heard in alone}
    problems = [heard.problem for heard in [*alone, *together] if heard.problem]
    return {
        "clients": clients,
        "requests": requests,
        "failures": len(problems),
        "first_problem": problems[0] if problems else "",
        "equal": sum(not h.problem and h.text == wanted[h.question] for h in together),
        "path": alone[0].path,
        "sequential": _summary(alone, middle - started),
        "concurrent": _summary(together, ended - middle),
    }


def _ask(client: httpx.Client, target: str, mode: str, question: str) -> Heard:
    """Ask and read the stream; whatever fails is told, not raised."""
    body = {
        "model": target,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "cag": {"mode": mode},
    }
    heard, started = Heard(question), time.perf_counter()
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return Heard(question, problem=response.read().decode())
            for line in response.iter_lines():
                heard.take(line, 1e3 * (time.perf_counter() - started))
    except httpx.HTTPError as error:
        heard.problem = f"{type(error).__name__}: {error}"
    return heard


def _summary(heard: Sequence[Heard], seconds: float) -> dict[str, Any]:
    good = [one for one in heard if not one.problem]
    first = [one.first for one in good if one.first is not None] or [float("nan")]
    return {
        "requests_per_second": len(good) / seconds,
        "tokens_per_second": sum(one.tokens for one in good) / seconds,
        "ttft_ms": {f"p{share}": float(np.percentile(first, share)) for share in (50, 95)},
    }
