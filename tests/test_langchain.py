"""LangChain's standard suites over tiny models, and what they do not ask for."""

from __future__ import annotations

import asyncio
import json
import re
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_lm
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnablePassthrough
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    RetrieversIntegrationTests,
)
from langchain_tests.unit_tests import ChatModelUnitTests
from test_engine import add_translator

import cag.langchain
from cag.engine import CAG
from cag.errors import CagError, EmptyQuestion, EmptyStore
from cag.langchain import CAGLLM, CAGRetriever, ChatCAG, passages_prompt
from cag.lm.decode import Generation

QUESTION = "How many bells has the tower?"
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DOCS = Path(__file__).parent.parent / "docs" / "langchain.md"


@pytest.fixture
def filled(engine: CAG, docs: Path) -> CAG:
    engine.ingest([docs])
    return engine


@pytest.fixture
def chat(filled: CAG) -> ChatCAG:
    return ChatCAG(engine=filled, mode="direct")


class Tokens(BaseCallbackHandler):
    """Keeps what callbacks are told."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.errors: list[BaseException] = []

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.errors.append(error)


class Suite:
    """Gives a standard suite an engine; `ChatCAG` has no tools and reads only text."""

    @pytest.fixture(autouse=True)
    def _fill(self, filled: CAG) -> None:
        other = tiny_lm("qwen2", 40, seed=2)
        other.name = "other"
        filled.models.add(other)
        self.filled = filled

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatCAG

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.filled, "model": "tgt", "mode": "direct"}

    has_tool_calling = has_tool_choice = has_structured_output = False
    supports_json_mode = supports_image_inputs = supports_image_urls = False
    supports_pdf_inputs = supports_audio_inputs = supports_video_inputs = False
    supports_anthropic_inputs = supports_image_tool_message = supports_pdf_tool_message = False
    enable_vcr_tests = False  # there is no server whose replies could be recorded
    returns_usage_metadata = supports_model_override = True
    model_override_value = "other"


class TestChatUnit(Suite, ChatModelUnitTests):
    """Its fields take nothing from the environment (the engine does), and are not serialised."""


class TestChatIntegration(Suite, ChatModelIntegrationTests):
    supported_usage_metadata_details = {  # noqa: RUF012
        "invoke": ["cache_read_input"], "stream": ["cache_read_input"]
    }  # fmt: skip

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatCAG(engine=self.filled, mode="own")
        model.invoke(QUESTION)
        if not stream:
            return model.invoke(QUESTION)
        first, *rest = model.stream(QUESTION)
        for chunk in rest:
            first += chunk
        return first


class TestRetriever(RetrieversIntegrationTests):
    retriever_constructor: type[BaseRetriever] = CAGRetriever
    retriever_query_example = QUESTION

    @pytest.fixture(autouse=True)
    def _fill(self, filled: CAG) -> None:
        self.filled = filled

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"engine": self.filled}


# -- retriever -----------------------------------------------------------------------------


def test_documents_are_the_passages_in_order_with_all_metadata(filled: CAG) -> None:
    found = filled.retrieve(QUESTION, 3)
    documents = CAGRetriever(engine=filled, k=3).invoke(QUESTION)
    for document, source in zip(documents, found, strict=True):
        passage = source.passage
        assert document.page_content == passage.text
        assert document.id == passage.id
        assert document.metadata == {
            "source": passage.document, "title": passage.title, "start": passage.start,
            "end": passage.end, "passage_id": passage.id, "score": source.score,
        }  # fmt: skip
        json.dumps(document.metadata)


def test_threshold_and_k_hold_for_field_call_async_and_batch(filled: CAG) -> None:
    scores = [source.score for source in filled.retrieve(QUESTION, 5)]
    least = scores[1]
    wanted = [score for score in scores if score >= least]
    retriever = CAGRetriever(engine=filled, k=5, score_threshold=least)
    plain = CAGRetriever(engine=filled)
    runs = [
        retriever.invoke(QUESTION),
        asyncio.run(retriever.ainvoke(QUESTION)),
        asyncio.run(plain.ainvoke(QUESTION, k=5, score_threshold=least)),
        *retriever.batch([QUESTION, QUESTION]),
    ]
    for documents in runs:
        assert [document.metadata["score"] for document in documents] == wanted
    assert plain.invoke(QUESTION, score_threshold=2.0) == []
    assert len(plain.invoke(QUESTION)) == filled.settings.k


def test_subclasses_of_the_retriever_are_pydantic_models(filled: CAG) -> None:
    class Labelled(CAGRetriever):
        label: str = "mine"

    retriever = Labelled(engine=filled, k=1, tags=["a"])
    assert len(retriever.model_copy(update={"label": "yours"}).invoke(QUESTION)) == 1
    assert retriever.model_dump() == {
        "name": None, "tags": ["a"], "metadata": None, "k": 1, "score_threshold": None,
        "label": "mine",
    }  # fmt: skip


# -- chat model ----------------------------------------------------------------------------


def test_an_answer_is_the_engines_with_usage_and_metadata(filled: CAG, chat: ChatCAG) -> None:
    answer = filled.ask(QUESTION, mode="direct")
    message = chat.invoke(QUESTION)
    assert message.text == answer.answer != ""
    tokens, usage = answer.tokens, message.usage_metadata
    assert usage is not None
    assert usage["input_tokens"] == tokens.prefix + tokens.passage + tokens.suffix
    assert usage["output_tokens"] == tokens.generated
    assert usage["input_token_details"] == {"cache_read": tokens.prefix}
    told = message.response_metadata
    assert (told["path"], told["model_name"], told["reason"]) == ("direct", "tgt", "")
    assert told["sources"] == [source.to_json() for source in answer.sources]
    assert told["timings_ms"]["total"] > 0
    assert told["finish_reason"] == answer.finish
    json.dumps(told)


def test_a_missing_translator_is_told(filled: CAG) -> None:
    told = ChatCAG(engine=filled).invoke(QUESTION).response_metadata
    assert told["path"] == "fallback"
    assert "no translator" in told["reason"]


@pytest.mark.parametrize("mode", ["translated", "own"])
def test_what_stored_caches_save_is_counted(filled: CAG, mode: str) -> None:
    add_translator(filled)
    chat = ChatCAG(engine=filled, mode=mode)
    chat.invoke(QUESTION)
    message = chat.invoke(QUESTION)
    assert message.response_metadata["path"] == mode
    usage = message.usage_metadata
    assert usage is not None
    tokens = message.response_metadata["tokens"]
    assert usage["input_token_details"] == {"cache_read": tokens["prefix"] + tokens["passage"]}


def test_given_passages_are_used_as_they_are_ranked(
    filled: CAG, chat: ChatCAG, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = CAGRetriever(engine=filled, k=3).invoke(QUESTION)[::-1]
    ids = [document.metadata["passage_id"] for document in documents]
    sources = {source.passage.id: source for source in filled.retrieve(QUESTION, 3)}
    wanted = filled.ask(QUESTION, mode="direct", sources=[sources[i] for i in ids]).answer
    monkeypatch.setattr(filled, "retrieve", lambda *_: pytest.fail("retrieved again"))
    carrying = HumanMessage(QUESTION, additional_kwargs={"passage_ids": ids})
    messages = [
        chat.invoke(QUESTION, documents=documents),
        chat.bind(documents=documents).invoke(QUESTION),
        chat.invoke([SystemMessage("Be brief."), carrying]),
        (passages_prompt | chat).invoke({"question": QUESTION, "documents": documents}),
    ]
    for message in messages:
        told = message.response_metadata["sources"]
        assert [source["passage_id"] for source in told] == ids
        assert message.text == wanted
    assert "score" in messages[0].response_metadata["sources"][0]
    assert "score" not in messages[2].response_metadata["sources"][0]
    nothing = chat.invoke(QUESTION, documents=[])
    assert nothing.response_metadata["sources"] == []


def test_only_the_last_human_message_is_the_prompt(filled: CAG, chat: ChatCAG) -> None:
    ids = [filled.retrieve("Boats are blue", 1)[0].passage.id]
    turns = [
        HumanMessage("What are boats?", additional_kwargs={"passage_ids": ids}),
        AIMessage("Blue."),
        HumanMessage([{"type": "text", "text": QUESTION}]),
    ]
    message, alone = chat.invoke(turns), chat.invoke(QUESTION)
    assert message.text == alone.text
    assert message.response_metadata["sources"] == alone.response_metadata["sources"]


def test_text_streams_piece_by_piece_and_callbacks_hear_it_once(chat: ChatCAG) -> None:
    wanted = chat.invoke(QUESTION).text
    streamed, invoked = Tokens(), Tokens()
    chunks = list(chat.stream(QUESTION, config={"callbacks": [streamed]}))
    assert "".join(chunk.text for chunk in chunks) == wanted
    assert sum(bool(chunk.text) for chunk in chunks) > 1
    chat.invoke(QUESTION, config={"callbacks": [invoked]})
    assert streamed.tokens == invoked.tokens == [chunk.text for chunk in chunks]


def test_the_first_piece_comes_before_the_last_token_is_made(
    filled: CAG, chat: ChatCAG, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    stream = CAG.stream

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = stream(*args, **kwargs)
        pieces = result._pieces
        result._pieces = (made.append(piece) or piece for piece in pieces)
        return result

    monkeypatch.setattr(CAG, "stream", noting)
    for number, chunk in enumerate(chat.stream(QUESTION), 1):
        if chunk.text:
            assert len(made) == number


def test_the_event_loop_stays_free(chat: ChatCAG, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = chat.invoke(QUESTION).text
    stream = CAG.stream

    def slow(*args: Any, **kwargs: Any) -> Any:
        result = stream(*args, **kwargs)
        pieces = result._pieces
        result._pieces = (time.sleep(0.05) or piece for piece in pieces)
        return result

    monkeypatch.setattr(CAG, "stream", slow)

    async def run() -> tuple[list[str], int]:
        ticks, done = 0, asyncio.Event()

        async def tick() -> None:
            nonlocal ticks
            while not done.is_set():
                ticks += 1
                await asyncio.sleep(0.005)

        async def streamed() -> str:
            return "".join([chunk.text async for chunk in chat.astream(QUESTION)])

        ticker = asyncio.create_task(tick())
        message, text = await asyncio.gather(chat.ainvoke(QUESTION), streamed())
        done.set()
        await ticker
        return [message.text, text], ticks

    texts, ticks = asyncio.run(run())
    assert texts == [wanted, wanted]
    assert ticks >= 10


def test_concurrent_calls_do_not_mix(filled: CAG) -> None:
    questions = [QUESTION, "What colour are boats?", "When was the harbour built?"] * 2
    for mode in ("direct", "own"):
        chat = ChatCAG(engine=filled, mode=mode)
        wanted = [chat.invoke(question).text for question in questions]
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lambda q, c=chat: c.invoke(q).text, questions)) == wanted
        assert [message.text for message in chat.batch(questions)] == wanted


def test_stop_strings_never_show(filled: CAG, chat: ChatCAG) -> None:
    full = filled.ask(
        QUESTION, mode="direct", generation=Generation(max_tokens=24, stop=("\n",))
    ).answer
    stop = full[4:7]  # spans tokens
    before = full[: full.index(stop)].strip()
    for message in (
        chat.invoke(QUESTION, stop=[stop], max_tokens=24),
        chat.bind(stop=[stop], max_tokens=24).invoke(QUESTION),
        ChatCAG(engine=filled, mode="direct", stop=[stop], max_tokens=24).invoke(QUESTION),
    ):
        assert message.text == before
        assert message.response_metadata["finish_reason"] == "stop"


def test_options_of_a_call_reach_the_engine(filled: CAG, chat: ChatCAG) -> None:
    message = chat.invoke(QUESTION, max_tokens=2, k=1, mode="own")
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] <= 2
    assert len(message.response_metadata["sources"]) == 1
    assert message.response_metadata["path"] == "own"
    hot = {"temperature": 3.0, "top_p": 0.95}
    same = [chat.invoke(QUESTION, seed=1, **hot).text for _ in range(2)]
    assert same[0] == same[1] != chat.invoke(QUESTION, seed=2, **hot).text
    configurable = chat.configurable_fields(max_tokens=ConfigurableField("longest"))
    short = configurable.invoke(QUESTION, config={"configurable": {"longest": 1}})
    assert short.usage_metadata["output_tokens"] <= 1


def test_the_answer_cache_never_serves_another_setting(filled: CAG, docs: Path) -> None:
    cache = InMemoryCache()
    made: list[str] = []

    def llm(engine: CAG = filled, **changes: Any) -> ChatCAG:
        return ChatCAG(engine=engine, cache=cache, **{"mode": "direct", **changes})

    def asked(chat: ChatCAG, **kwargs: Any) -> bool:
        handler = Tokens()
        made.append(chat.invoke(QUESTION, config={"callbacks": [handler]}, **kwargs).text)
        return bool(handler.tokens)

    assert asked(llm())
    assert not asked(llm())
    assert made[0] == made[1]
    for changes in ({"mode": "own"}, {"k": 1}, {"max_tokens": 2}, {"temperature": 1.0},
                    {"top_p": 0.5}, {"seed": 3}, {"stop": ["x"]}, {"model": "ref"}):  # fmt: skip
        assert asked(llm(**changes)), changes
    documents = CAGRetriever(engine=filled, k=1).invoke("Boats are blue")
    assert asked(llm(), documents=documents)
    (docs / "new.txt").write_text("The tower has ten bells now.")
    filled.ingest([docs])
    assert asked(llm())
    translator = filled.settings.home / "translators" / "ref--tgt" / "translator.json"
    translator.parent.mkdir(parents=True)
    translator.write_text("{}")
    assert asked(llm())


def test_identifying_parameters_name_everything(filled: CAG) -> None:
    named = ChatCAG(engine=filled)._identifying_params
    assert named["reference"] == "ref"
    assert (named["target"], named["translator"], named["mode"]) == (
        "tgt", "ref--tgt", "translated"
    )  # fmt: skip
    assert named["store"] == str(filled.folder)
    assert (named["k"], named["max_tokens"], named["temperature"]) == (2, 6, 0.0)
    assert set(type(filled.settings).__dataclass_fields__) <= set(named)
    json.dumps(named)


def test_a_plain_text_model_answers_as_the_chat_model(filled: CAG, chat: ChatCAG) -> None:
    add_translator(filled)
    plain = CAGLLM(engine=filled, mode="direct", max_tokens=5)
    wanted = chat.invoke(QUESTION, max_tokens=5).text
    heard = Tokens()
    assert plain.invoke(QUESTION, config={"callbacks": [heard]}) == wanted != ""
    assert "".join(plain.stream(QUESTION)) == "".join(heard.tokens) == wanted
    assert plain.batch([QUESTION, QUESTION]) == [wanted] * 2
    end = wanted[-1]
    assert plain.invoke(QUESTION, stop=[end]) == wanted[: wanted.index(end)]
    assert CAGLLM(engine=filled).invoke(QUESTION, refresh=1.0, max_tokens=5) == wanted
    assert (
        plain._identifying_params
        == ChatCAG(engine=filled, mode="direct", max_tokens=5)._identifying_params
    )
    assert plain.get_num_tokens(QUESTION) == chat.get_num_tokens(QUESTION)
    last = plain.generate([QUESTION]).generations[0][0]
    assert last.text == wanted
    with pytest.raises(CagError, match="unknown option 'depth'"):
        plain.invoke(QUESTION, depth=3)


def test_a_refresh_reaches_the_engine(filled: CAG) -> None:
    add_translator(filled)
    message = ChatCAG(engine=filled, refresh=0.5).invoke(QUESTION)
    tokens = message.response_metadata["tokens"]
    assert tokens["refreshed"] == round(0.5 * tokens["passage"]) > 0
    with pytest.raises(CagError, match="refresh"):
        ChatCAG(engine=filled).invoke(QUESTION, refresh=2)


def test_tokens_are_the_targets(filled: CAG, chat: ChatCAG) -> None:
    assert chat.get_num_tokens(QUESTION) == len(filled.models.lm("tgt").encode(QUESTION))


# -- errors --------------------------------------------------------------------------------


def changed(filled: CAG) -> Document:
    document = CAGRetriever(engine=filled, k=1).invoke(QUESTION)[0]
    document.page_content = document.page_content[:20]
    return document


IMAGE = HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}])
ERRORS: dict[str, Any] = {
    "no human message": lambda chat, _: chat.invoke([SystemMessage("Be brief.")]),
    "else than text": lambda chat, _: chat.invoke([IMAGE]),
    "question is empty": lambda chat, _: chat.invoke(" "),
    "not in the store": lambda chat, _: chat.invoke(
        [HumanMessage(QUESTION, additional_kwargs={"passage_ids": ["nope"]})]
    ),
    "list of passage ids": lambda chat, _: chat.invoke(
        [HumanMessage(QUESTION, additional_kwargs={"passage_ids": "nope"})]
    ),
    "no passage of the store": lambda chat, _: chat.invoke(
        QUESTION, documents=[Document("from elsewhere\nwith two lines")]
    ),
    "text was changed": lambda chat, engine: chat.invoke(QUESTION, documents=[changed(engine)]),
    "option documents": lambda chat, _: chat.invoke(QUESTION, documents="a\nb"),
    "unknown option 'tools'": lambda chat, _: chat.invoke(QUESTION, tools=[]),
    "option mode='quick'": lambda chat, _: chat.invoke(QUESTION, mode="quick"),
    "option max_tokens=0": lambda _, engine: ChatCAG(engine=engine, max_tokens=0),
    "option k=0": lambda _, engine: CAGRetriever(engine=engine).invoke(QUESTION, k=0),
    "option score_threshold": lambda _, e: CAGRetriever(engine=e, score_threshold="high"),
    "'gone'": lambda chat, _: chat.invoke(QUESTION, model="gone"),
}


@pytest.mark.parametrize("says", ERRORS)
def test_errors_are_one_line(filled: CAG, chat: ChatCAG, says: str) -> None:
    with pytest.raises(CagError) as caught:
        ERRORS[says](chat, filled)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_store_and_a_strange_index_are_told(engine: CAG, docs: Path) -> None:
    for runnable in (CAGRetriever(engine=engine), ChatCAG(engine=engine)):
        with pytest.raises(EmptyStore):
            runnable.invoke(QUESTION)
    engine.ingest([docs])
    with pytest.raises(EmptyQuestion):
        CAGRetriever(engine=engine).invoke("")
    engine._retriever, engine.models.embedder().name = None, "another"  # type: ignore[union-attr]
    for runnable in (CAGRetriever(engine=engine), ChatCAG(engine=engine)):
        with pytest.raises(CagError, match="the index holds vectors of 'words'"):
            runnable.invoke(QUESTION)


def test_callbacks_hear_of_errors(chat: ChatCAG) -> None:
    handler = Tokens()
    with pytest.raises(EmptyQuestion):
        list(chat.stream(" ", config={"callbacks": [handler]}))
    assert [type(error) for error in handler.errors] == [EmptyQuestion]


# -- default engine and documentation ------------------------------------------------------


@pytest.fixture
def environment(filled: CAG, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The default engine is the tiny one."""
    opened: list[Any] = []
    monkeypatch.setenv("CAG_HOME", str(filled.settings.home))
    monkeypatch.setattr(cag.langchain, "_open", lambda s: opened.append(s) or filled)
    yield opened


def test_the_default_engine_is_opened_when_needed(
    filled: CAG, environment: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAG_TARGET", "tgt")
    chain = {"documents": CAGRetriever(), "question": RunnablePassthrough()} | passages_prompt
    chain = chain | ChatCAG()
    assert ChatCAG()._identifying_params["store"] == str(filled.folder)
    assert not environment
    assert chain.invoke(QUESTION).response_metadata["model_name"] == "tgt"
    assert {settings.home for settings in environment} == {filled.settings.home}


def test_surfaces_share_one_default_engine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAG_HOME", str(home))
    shared = CAGRetriever().cag
    assert shared is ChatCAG().cag
    assert shared.folder == home / "store"
    shared.store.close()
    cag.langchain._open.cache_clear()


def test_the_documented_examples_run(
    environment: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    examples = CODE.findall(DOCS.read_text())
    assert len(examples) == 3
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, str(DOCS), "exec"), names)
        assert capsys.readouterr().out.strip()
    assert names["message"].response_metadata["path"] == "fallback"


def test_constructors_say_what_they_ignore(filled: CAG) -> None:
    with pytest.warns(UserWarning, match="ChatCAG ignores api_key, model_name"):
        ChatCAG(engine=filled, model_name="other", api_key="secret", model="tgt", verbose=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChatCAG(engine=filled, model="tgt", stop=["."], tags=["a"], k=1, refresh=0.5)
        CAGRetriever(engine=filled, k=1, score_threshold=0.1, tags=["a"])
