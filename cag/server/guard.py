"""What is checked before the app sees a request: the host, the key, the size of the body."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cag.server.errors import ApiError

OPEN_PATHS = ("/health",)
_BODY_SECONDS = 30.0


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware; what it lets through has its whole body with it.

    Parameters
    ----------
    key
        Every path but `OPEN_PATHS` asks for it. Without one, requests must name this machine
        as their host: a page in the user's browser can rebind a name of its own to loopback.
    max_body
        Bytes.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, max_body: int) -> None:
        self._app, self._key, self._max_body = app, key, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            if self._key is None:
                _check_host(headers.get(b"host", b"localhost"))
            elif scope["path"] not in OPEN_PATHS:
                _check_key(headers.get(b"authorization", b""), self._key)
            body = await self._read(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replaying(body, receive), send)

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The body, or None if the client has left."""
        declared = headers.get(b"content-length", b"")
        large = declared.isdigit() and int(declared) > self._max_body
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for piece in _pieces(receive):
                    large = large or len(body) + len(piece) > self._max_body
                    if not large:  # else read on: most clients listen when they have sent it all
                        body += piece
        except TimeoutError:
            if not large:
                raise _closing(408, "the body did not arrive in time") from None
        except _Left:
            return None
        if large:
            raise _closing(413, f"the body is larger than {self._max_body} bytes")
        return bytes(body)


def _closing(status: int, message: str) -> ApiError:
    """An error after which the connection, where more may be on its way, is of no use."""
    return ApiError(status, message, headers={"Connection": "close"})


class _Left(Exception):
    """The client has left."""


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    """The pieces of a body."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Left
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, then whatever the connection has to say."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _check_host(host: bytes) -> None:
    try:
        name = urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    except ValueError:
        name = ""
    if not is_loopback(name):
        raise ApiError(
            403, "without CAG_API_KEY the server answers only requests to localhost", param="Host"
        )


def _check_key(authorization: bytes, key: str) -> None:
    scheme, _, given = authorization.partition(b" ")
    right = hmac.compare_digest(given.strip(), key.encode())
    if scheme.lower() != b"bearer" or not right:
        raise ApiError(
            401,
            "the key is missing or wrong; send `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
