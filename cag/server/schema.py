"""What clients may send: OpenAI's chat completions with an extension, and plain questions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cag.engine import MODES
from cag.lm.decode import Generation
from cag.server.errors import ApiError

#: Parameters that would change the answer in a way the server cannot; these values change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
#: Parameters that say nothing about the answer.
IGNORED = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
_MOST_STOPS = 16


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Count = Annotated[int, Field(strict=True, ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Mode = Annotated[str, Field(pattern=f"^({'|'.join(MODES)})$")]
Stops = Annotated[list[str], BeforeValidator(_as_list), Field(max_length=_MOST_STOPS)]


class Extension(BaseModel):
    """What only `cag` has: the path of the answer, how many passages, and the refresh dial."""

    model_config = ConfigDict(extra="forbid")

    mode: Mode = "translated"
    k: Count | None = None
    refresh: Share | None = None


class StreamOptions(BaseModel):
    """Whether the stream ends with a chunk that holds the usage; what else there is is ignored."""

    include_usage: bool = False


class Message(BaseModel):
    """One turn; only the last one of the user is read."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Any = None


class ChatRequest(BaseModel):
    """The body of ``POST /v1/chat/completions``."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Stops | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cag: Extension | None = None

    def check(self) -> None:
        """Refuse what would need another answer than the server can give.

        Raises
        ------
        ApiError
            Names the parameter.
        """
        for name, value in (self.model_extra or {}).items():
            if name in IGNORED or value is None:
                continue
            if name not in NEUTRAL:
                raise ApiError(400, f"unknown parameter '{name}'", param=name)
            if value not in NEUTRAL[name]:
                raise ApiError(
                    400,
                    f"'{name}' is not supported with this value; leave it out",
                    param=name,
                    code="unsupported_parameter",
                )
        if self.stream_options and not self.stream:
            raise ApiError(400, "'stream_options' needs 'stream': true", param="stream_options")

    @property
    def question(self) -> str:
        """Text of the last user message."""
        for at in reversed(range(len(self.messages))):
            if self.messages[at].role == "user":
                return _text(self.messages[at].content, f"messages[{at}].content")
        raise ApiError(
            400, "there is no user message; the last one is the question", param="messages"
        )

    def generation(self, default_tokens: int, stop: tuple[str, ...]) -> Generation:
        """How to decode; `stop` are the strings that end any answer."""
        return Generation(
            max_tokens=self.max_completion_tokens or self.max_tokens or default_tokens,
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=(*stop, *(self.stop or ())),
            seed=self.seed,
        )


class AskRequest(BaseModel):
    """The body of ``POST /v1/ask``."""

    model_config = ConfigDict(extra="forbid")

    question: str
    target: str | None = None
    mode: Mode = "translated"
    k: Count | None = None
    refresh: Share | None = None
    max_tokens: Count | None = None


def checked_text(text: str, param: str) -> str:
    """A question as a tokenizer can read it.

    Raises
    ------
    ApiError
        If it is empty, or holds half of a surrogate pair, which JSON allows and UTF-8 does not.
    """
    if not text.strip():
        raise ApiError(400, "the question is empty; write what you want to know", param=param)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the question is not valid Unicode", param=param) from None
    return text


def _text(content: Any, param: str) -> str:
    """Text of a message's content: a string, or parts that are all text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ApiError(400, f"'{param}' must be text or a list of text parts", param=param)
    found = ""
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ApiError(400, f"'{param}' holds something else than text", param=param)
        found += text
    return checked_text(found, param)
