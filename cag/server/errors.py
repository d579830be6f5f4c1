"""Whatever goes wrong, as an error in OpenAI's shape; no traceback ever leaves the server."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from cag.errors import CagError, ContextTooLong
from store import StoreError

log = logging.getLogger("cag.server")


def dump(content: Any) -> str:
    """JSON that can always be sent; half of a surrogate pair becomes a question mark."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace").decode("utf-8")


class Reply(JSONResponse):
    """A JSON response, written by `dump`."""

    def render(self, content: Any) -> bytes:
        return dump(content).encode("utf-8")


class ApiError(Exception):
    """A request that is answered by an error.

    Parameters
    ----------
    status
        HTTP status.
    message
        One line that says what to do next.
    param
        The parameter at fault.
    code
        For programs.
    headers
        Extra HTTP headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        """The JSON that the client gets."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        described = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": described}

    def response(self) -> Reply:
        """As an HTTP response."""
        return Reply(self.body(), self.status, self.headers)


def as_api_error(error: BaseException) -> ApiError:
    """Any exception as an error for the client; one that nobody expected is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _not_valid(error.errors())
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, ContextTooLong):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, CagError):
        return ApiError(400, str(error))
    if isinstance(error, TimeoutError):
        return out_of_time()
    if isinstance(error, StoreError):  # its line says what is wrong here
        log.error("the store failed: %s", error)
        return ApiError(500, str(error), code="store_error")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why")


def out_of_time() -> ApiError:
    """The answer was not complete in time; asking again at once would not help."""
    return ApiError(
        504,
        "the answer took too long; ask for fewer tokens, or start `cag serve` with a longer "
        "--timeout",
        code="timeout",
        headers={"x-should-retry": "false"},  # the openai client heeds it
    )


def _not_valid(errors: Sequence[Any]) -> ApiError:
    """The first thing that is wrong with a request."""
    first = errors[0]
    where = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    if not where:
        return ApiError(400, "the body must be a JSON object, with Content-Type: application/json")
    name = str(where[0])
    for part in where[1:]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    if first["type"] == "missing":
        return ApiError(400, f"'{name}' is missing", param=name)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter '{name}'", param=name)
    return ApiError(400, f"'{name}' does not work: {first['msg']}", param=name)
