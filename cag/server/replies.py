"""What the server sends: OpenAI's shapes, with `cag` beside them."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from cag.answer import Answer
from cag.server.errors import dump

DONE = "data: [DONE]\n\n"


def event(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {dump(content)}\n\n"


@dataclass(frozen=True)
class Completion:
    """Writes the objects of one chat completion.

    Attributes
    ----------
    model
        Name of the target.
    usage
        Whether a stream ends with a chunk that holds the usage.
    """

    model: str
    usage: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The reply that is not streamed."""
        message = {"role": "assistant", "content": answer.answer, "refusal": None}
        choice = {"message": message, "finish_reason": answer.finish}
        return {**self._object("chat.completion", choice), "usage": usage(answer), **more(answer)}

    def opening(self) -> str:
        """The first event of a stream."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> str:
        """An event with a piece of the answer."""
        return self._chunk({"content": text})

    def closing(self, answer: Answer) -> str:
        """The events after the last piece."""
        last = self._chunk({}, answer.finish, **more(answer))
        if self.usage:
            chunk = {**self._object("chat.completion.chunk"), "usage": usage(answer)}
            last += event(chunk)
        return last + DONE

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, **extra: Any) -> str:
        choice = {"delta": delta, "finish_reason": finish}
        unknown = {"usage": None} if self.usage else {}
        return event({**self._object("chat.completion.chunk", choice), **unknown, **extra})

    def _object(self, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": [{"index": at, **c, "logprobs": None} for at, c in enumerate(choices)],
        }


def usage(answer: Answer) -> dict[str, Any]:
    """Token counts; `cached_tokens` are those that the target's layers did not read."""
    tokens = answer.tokens
    return {
        "prompt_tokens": tokens.read,
        "completion_tokens": tokens.generated,
        "total_tokens": tokens.read + tokens.generated,
        "prompt_tokens_details": {"cached_tokens": tokens.unread},
    }


def more(answer: Answer) -> dict[str, Any]:
    """The field `cag`: how the answer came about, as ``cag ask --json`` has it."""
    content = answer.to_json()
    for name in ("question", "answer", "finish"):
        del content[name]
    return {"cag": content}


def described_model(
    name: str, created: int, *, loaded: bool, translator: str | None
) -> dict[str, Any]:
    """An entry of ``GET /v1/models``."""
    extra = {"loaded": loaded, "translator": translator}
    return {"id": name, "object": "model", "created": created, "owned_by": "cag", "cag": extra}
