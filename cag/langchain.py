"""LangChain surfaces: `CAGRetriever` finds passages, `ChatCAG` and `CAGLLM` answer from them."""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypeVar

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForLLMRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.language_models import LLM, BaseChatModel, LangSmithParams
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, UsageMetadata
from langchain_core.messages.ai import InputTokenDetails
from langchain_core.outputs import ChatGenerationChunk, ChatResult, GenerationChunk
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.runnables.config import run_in_executor
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from cag.answer import Answer
from cag.engine import CAG, MODES
from cag.errors import CagError
from cag.library import passage_id
from cag.lm.decode import Generation
from cag.lm.prompt import DEFAULT_TEMPLATE
from cag.retrieval import Source
from cag.settings import Settings
from cag.translate.finding import pair_name, translator_folders
from store import StoreError

__all__ = ["CAGLLM", "CAGRetriever", "ChatCAG", "passages_prompt"]

PASSAGE_IDS = "passage_ids"  # where a message carries the ids of its passages

_opening = threading.Lock()


@functools.cache
def _open(settings: Settings) -> CAG:
    return CAG(settings)


class _Options(BaseModel):
    """Options of a surface and of a single call; a bad one is a `CagError` of one line."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_line(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            first = error.errors()[0]
            name, value = ".".join(map(str, first["loc"])), repr(first["input"])[:60]
            if first["type"] == "extra_forbidden":
                known = ", ".join(cls.model_fields)
                raise CagError(f"unknown option '{name}'; known are: {known}") from error
            raise CagError(f"option {name}={value} does not work: {first['msg']}") from error


class _Found(_Options):
    k: int | None = Field(default=None, ge=1)
    score_threshold: float | None = None


class _Asked(_Options):
    target: str | None = Field(default=None, validation_alias=AliasChoices("target", "model"))
    mode: str = Field(default="translated", pattern=f"^({'|'.join(MODES)})$")
    k: int | None = Field(default=None, ge=1)
    refresh: float | None = Field(default=None, ge=0.0, le=1.0)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=0.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    seed: int | None = None


class _AskedOver(_Asked):
    documents: list[Document] | None = None


_O = TypeVar("_O", bound=_Options)


class _Surface(BaseModel):
    """What both surfaces share: the engine, given or made from the environment when needed."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="ignore")

    engine: CAG | None = Field(default=None, exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _tell_what_is_ignored(cls, values: Any) -> Any:
        """Constructors take what other classes of LangChain take, but not in silence."""
        known = {*cls.model_fields, "model"}
        if isinstance(values, dict) and (unknown := sorted(values.keys() - known)):
            warnings.warn(f"{cls.__name__} ignores {', '.join(unknown)}", stacklevel=2)
        return values

    @property
    def settings(self) -> Settings:
        """The engine's settings."""
        return self.engine.settings if self.engine else Settings.from_environment()

    @property
    def cag(self) -> CAG:
        """The engine; all surfaces over one environment share one."""
        if self.engine:
            return self.engine
        with _opening:
            return _open(self.settings)

    def _options(self, kind: type[_O], fields: type[_Options], given: dict[str, Any]) -> _O:
        """Own fields, changed by those given with a call."""
        own = {name: getattr(self, name) for name in fields.model_fields}
        return kind(**{**own, **given})


class CAGRetriever(_Surface, _Found, BaseRetriever):
    """Finds stored passages for a question, best first.

    Each document's metadata holds ``source``, ``title``, ``start``, ``end``, ``passage_id``
    and ``score``. `k` and `score_threshold` can also be given with a call.

    Parameters
    ----------
    engine
        Defaults to one made from the environment on first use.
    k
        How many passages; defaults to the settings'.
    score_threshold
        Leave out passages whose similarity is below this.

    Examples
    --------
    >>> CAGRetriever(k=3).invoke("What is a passage?")
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="ignore")

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **given: Any
    ) -> list[Document]:
        options = self._options(_Found, _Found, given)
        least = -math.inf if options.score_threshold is None else options.score_threshold
        with _cag_errors():
            found = self.cag.retrieve(query, options.k)
        return [_document(source) for source in found if source.score >= least]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **given: Any
    ) -> list[Document]:
        return await run_in_executor(
            None,
            functools.partial(
                self._get_relevant_documents, query, run_manager=run_manager.get_sync(), **given
            ),
        )


class _Answering(_Surface, _Asked):
    """What both models share: how they answer, and what their answers depend on."""

    stop: list[str] | None = None

    @property
    def _llm_type(self) -> str:
        return "cag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything an answer depends on, the state of store and translators included."""
        settings = self.settings
        store = self.engine.folder if self.engine else settings.store_folder
        template = self.engine.template if self.engine else DEFAULT_TEMPLATE
        target = self.target or settings.target
        translators = [folder / "translator.json" for folder in translator_folders(settings.home)]
        return {
            **asdict(settings),
            **{name: getattr(self, name) for name in _Asked.model_fields},
            "target": target,
            "k": self.k or settings.k,
            "refresh": settings.refresh if self.refresh is None else self.refresh,
            "max_tokens": self.max_tokens or settings.max_tokens,
            "own_stop": self.stop,  # LangChain puts the call's under "stop"
            "home": str(settings.home),
            "template": template.fingerprint,
            "translator": pair_name(settings.reference, target),
            "translators": {str(file.parent): _stamp(file) for file in translators},
            "store": str(store),
            "store_changed": _stamp(store / "vectors" / "vectors.json"),
        }

    def get_token_ids(self, text: str) -> list[int]:
        """The target's token ids of a text."""
        with _cag_errors():
            return self.cag.models.lm(self.target or self.settings.target).encode(text)


class ChatCAG(_Answering, BaseChatModel):
    """Answers the last human message over stored passages.

    Earlier messages are not part of the prompt. The passages are those of the documents given as
    ``documents``, else those whose ids the message carries (see `passages_prompt`), else
    retrieved. Every field but `engine` can also be given with a call or through ``bind``.

    Parameters
    ----------
    engine
        Defaults to one made from the environment on first use.
    target
        The model that answers; ``model`` is another name for it.
    mode
        ``translated``, ``direct`` or ``own``.
    k
        How many passages to retrieve.
    refresh
        Share of the passages that the target reads itself, as in `CAG.ask`.
    max_tokens, temperature, top_p, seed
        As in `cag.lm.decode.Generation`.
    stop
        Strings that end the answer, beside those of the template.

    Examples
    --------
    >>> ChatCAG(mode="direct").invoke("What is a passage?").text
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="ignore")

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        kwargs.setdefault("model", kwargs.get("target") or self.target or self.settings.target)
        return super()._get_ls_params(stop=self.stop if stop is None else stop, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    # `_agenerate` and `_astream` are inherited: they run these two in threads, token by token

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        kwargs.pop("stream", None)  # LangChain's own switch
        if "model" in kwargs:
            kwargs["target"] = kwargs.pop("model")
        options = self._options(_AskedOver, _Asked, kwargs)
        question, ids = _read(messages)
        given = None if ids is None else [(identifier, math.nan) for identifier in ids]
        if options.documents is not None:
            given = [(_stored_id(d), d.metadata.get("score", math.nan)) for d in options.documents]

        def emit(text: str, **more: Any) -> ChatGenerationChunk:
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=text, **more))
            if run_manager:
                run_manager.on_llm_new_token(text, chunk=chunk)
            return chunk

        with _cag_errors():
            stream = self.cag.stream(
                question,
                target=options.target,
                mode=options.mode,
                k=options.k,
                refresh=options.refresh,
                sources=None if given is None else self._sources(given),
                generation=self._generation(options, self.stop if stop is None else stop),
            )
            for text in stream:
                yield emit(text)
        yield emit(
            "",
            chunk_position="last",
            usage_metadata=_usage(stream.answer),
            response_metadata=_metadata(stream.answer),
        )

    def _generation(self, options: _Asked, stop: Sequence[str] | None) -> Generation:
        return Generation(
            max_tokens=options.max_tokens or self.settings.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            stop=(*self.cag.template.stop, *(stop or ())),
            seed=options.seed,
        )

    def _sources(self, given: Sequence[tuple[str, float]]) -> list[Source]:
        sources = []
        for identifier, score in given:
            passage = self.cag.library.passage(identifier)
            if passage is None:
                raise CagError(f"passage '{identifier}' is not in the store; retrieve again")
            sources.append(Source(passage, score))
        return sources


class CAGLLM(_Answering, LLM):
    """`ChatCAG` as a plain text model: the prompt is the question, the answer a string.

    Examples
    --------
    >>> CAGLLM(k=2).invoke("What is a passage?")
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="ignore")

    @property
    def _chat(self) -> ChatCAG:
        own = {name: getattr(self, name) for name in _Asked.model_fields}
        return ChatCAG(engine=self.engine, stop=self.stop, **own)

    def _call(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        return "".join(chunk.text for chunk in self._stream(prompt, stop, run_manager, **kwargs))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        for piece in self._chat._stream([HumanMessage(prompt)], stop, **kwargs):
            info = piece.message.response_metadata or None
            chunk = GenerationChunk(text=piece.text, generation_info=info)
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


def _prompt(inputs: dict[str, Any]) -> list[BaseMessage]:
    ids = [_stored_id(document) for document in inputs["documents"]]
    return [HumanMessage(inputs["question"], additional_kwargs={PASSAGE_IDS: ids})]


#: ``{"question": ..., "documents": ...}`` -> a message that carries the passages to `ChatCAG`.
passages_prompt: RunnableLambda[dict[str, Any], list[BaseMessage]] = RunnableLambda(
    _prompt, name="passages_prompt"
)


@contextmanager
def _cag_errors() -> Iterator[None]:
    """The store's errors as `CagError`."""
    try:
        yield
    except StoreError as error:
        raise CagError(str(error)) from error


def _document(source: Source) -> Document:
    passage = source.passage
    metadata = {
        "source": passage.document,
        "title": passage.title,
        "start": passage.start,
        "end": passage.end,
        "passage_id": passage.id,
        "score": source.score,
    }
    return Document(id=passage.id, page_content=passage.text, metadata=metadata)


def _stored_id(document: Document) -> str:
    """Id of the passage that a document is, if it is just as it was retrieved."""
    known = document.metadata
    found = passage_id(known.get("source", ""), known.get("start", 0), document.page_content)
    if found != known.get("passage_id"):
        raise CagError(
            "a document is no passage of the store, or its text was changed; give ChatCAG "
            "documents as CAGRetriever returns them"
        )
    return found


def _read(messages: Sequence[BaseMessage]) -> tuple[str, list[str] | None]:
    """The question, and the ids of the passages that its message carries."""
    for message in reversed(messages):
        if not isinstance(message, HumanMessage):
            continue
        blocks = [message.content] if isinstance(message.content, str) else message.content
        if any(isinstance(block, dict) and block.get("type") != "text" for block in blocks):
            raise CagError("the question holds something else than text; ChatCAG reads only text")
        ids = message.additional_kwargs.get(PASSAGE_IDS)
        if not (ids is None or (isinstance(ids, list) and all(isinstance(i, str) for i in ids))):
            raise CagError(f"'{PASSAGE_IDS}' of a message must be a list of passage ids")
        return str(message.text), ids
    raise CagError("there is no human message; the last one is the question")


def _usage(answer: Answer) -> UsageMetadata:
    tokens = answer.tokens
    return UsageMetadata(
        input_tokens=tokens.read,
        output_tokens=tokens.generated,
        total_tokens=tokens.read + tokens.generated,
        input_token_details=InputTokenDetails(cache_read=tokens.unread),
    )


def _metadata(answer: Answer) -> dict[str, Any]:
    """`Answer.to_json` without question and text; a score that is not known is left out."""
    content = answer.to_json()
    del content["question"], content["answer"]
    content["finish_reason"] = content.pop("finish")
    for source in content["sources"]:
        if math.isnan(source["score"]):
            del source["score"]
    return {**content, "model_name": answer.target, "model_provider": "cag"}


def _stamp(file: Path) -> int | None:
    """When a file was written last."""
    try:
        return int(file.stat().st_mtime_ns)
    except OSError:
        return None
