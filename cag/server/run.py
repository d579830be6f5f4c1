"""Bind, serve, and stop without breaking off answers."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from cag.engine import CAG
from cag.errors import CagError
from cag.server.app import Limits, create_app
from cag.server.guard import is_loopback

KEY = "CAG_API_KEY"


def serve(
    make_engine: Callable[[], CAG],
    *,
    host: str = "127.0.0.1",
    port: int = 8642,
    limits: Limits | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the answers that are under way.

    Parameters
    ----------
    make_engine
        Called when the address is known to be free.
    port
        0 takes a free one.

    Raises
    ------
    CagError
        If others could reach it and there is no key, or the address cannot be bound.
    """
    limits = limits or Limits()
    key = (os.environ.get(KEY) or "").strip() or None
    if key is None and not is_loopback(host):
        raise CagError(
            f"others can reach '{host or 'every address'}'; set {KEY} to a key that clients must "
            "send, or listen on 127.0.0.1"
        )
    with _bound(host, port) as listening:
        server = make_server(create_app(make_engine(), key=key, limits=limits), limits.seconds)
        print(f"cag listens on {url(listening)}; Ctrl-C stops it", flush=True)
        with _quiet_signals():
            server.run([listening])


def make_server(app: ASGIApp, seconds: float) -> uvicorn.Server:
    """A uvicorn server that waits that long for running answers when it stops."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="on",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=math.ceil(seconds),
    )
    return uvicorn.Server(config)


@contextlib.contextmanager
def background(app: ASGIApp, seconds: float = 5.0) -> Iterator[tuple[str, uvicorn.Server]]:
    """Serve on a free loopback port from a thread, within the block; gives URL and server."""
    server = make_server(app, seconds)
    with _bound("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), name="cag-server")
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise CagError("the server did not start; its log says why")
                time.sleep(0.005)
            yield url(listening), server
        finally:
            server.should_exit = True
            thread.join()


def url(listening: socket.socket) -> str:
    """Where clients find a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CagError(f"cannot listen on {host}:{port} ({reason}); choose another") from error


@contextlib.contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn raises the signals it has obeyed once more; by then all is done: exit code 0."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before: dict[signal.Signals, Any] = {s: signal.signal(s, lambda *_: None) for s in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
