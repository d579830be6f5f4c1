"""The routes. Each takes a question to its model's lane and writes down what comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cag.engine import CAG, Stream
from cag.lm.decode import Generation
from cag.lm.pull import is_here, pulled_llms
from cag.server.errors import ApiError, Reply, as_api_error, out_of_time
from cag.server.guard import Guard
from cag.server.lanes import Job, Lanes, Work
from cag.server.replies import Completion, described_model, event
from cag.server.schema import AskRequest, ChatRequest, Extension, checked_text
from cag.translate.finding import pair_name, translator_folders

_T = TypeVar("_T")


@dataclass(frozen=True)
class Limits:
    """What the server bears.

    Attributes
    ----------
    queue
        Questions that may wait per model, beside the one that is answered.
    seconds
        From a request's arrival to its last byte, waiting included.
    body
        Bytes of a request's body.
    """

    queue: int = 16
    seconds: float = 120.0
    body: int = 2**20


class Desk:
    """Knows the models and takes questions to their lanes."""

    def __init__(self, engine: CAG, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self.lanes = Lanes(limits.queue)
        self.opened = int(time.time())

    async def take(self, model: str, work: Work) -> Job:
        """Queue up for a model.

        Raises
        ------
        ApiError
            404 if it is not served, 429 if too many wait.
        """
        if model not in self.lanes and model not in await asyncio.to_thread(self.served):
            raise ApiError(
                404,
                f"no model '{model}' is served; GET /v1/models lists those that are",
                param="model",
                code="model_not_found",
            )
        return self.lanes[model].submit(work)

    def served(self) -> list[str]:
        """Models that can answer: those of the settings, loaded ones, and what was pulled.

        No other folder or hub id: a client must not choose what is loaded from this machine.
        """
        settings, loaded = self.engine.settings, self.engine.models.loaded
        names = [
            name
            for name in (settings.target, settings.reference)
            if name in loaded or is_here(name, settings.home)
        ]
        return list(dict.fromkeys([*names, *loaded, *pulled_llms(settings.home)]))

    def described(self) -> list[dict[str, Any]]:
        """The served models, with the translator that each has from the reference."""
        settings, loaded = self.engine.settings, self.engine.models.loaded
        translators = {folder.name for folder in translator_folders(settings.home)}
        found = []
        for name in self.served():
            pair = pair_name(settings.reference, name)
            translator = pair if pair in translators else None
            found.append(
                described_model(name, self.opened, loaded=name in loaded, translator=translator)
            )
        return found

    def chat(self, request: ChatRequest, question: str) -> Stream:
        """Start a chat's answer; runs in a lane. Without documents it is free chat."""
        engine = self.engine
        generation = request.generation(engine.settings.max_tokens, engine.template.stop)
        options = request.cag or Extension()
        if len(engine.library):
            return engine.stream(
                question,
                target=request.model,
                mode=options.mode,
                k=options.k,
                refresh=options.refresh,
                generation=generation,
            )
        stream = engine.stream(
            question, target=request.model, mode="direct", sources=[], generation=generation
        )
        stream.answer.reason = "nothing was ingested yet; answered without passages"
        return stream

    def ask(self, request: AskRequest, target: str) -> Stream:
        """Start the answer to a question; runs in a lane."""
        engine = self.engine
        generation = Generation(
            max_tokens=request.max_tokens or engine.settings.max_tokens,
            stop=engine.template.stop,
        )
        return engine.stream(
            request.question,
            target=target,
            mode=request.mode,
            k=request.k,
            refresh=request.refresh,
            generation=generation,
        )


def create_app(engine: CAG, *, key: str | None = None, limits: Limits | None = None) -> FastAPI:
    """The server as an ASGI app.

    Parameters
    ----------
    engine
        What answers.
    key
        Asked for as a bearer token, if given.
    limits
        Defaults to those of `Limits`.
    """
    desk = Desk(engine, limits or Limits())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(desk.lanes.close)

    app = FastAPI(title="cag", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(Guard, key=key, max_body=desk.limits.body)
    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    _add_routes(app, desk)
    return app


def _add_routes(app: FastAPI, desk: Desk) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        until = asyncio.get_running_loop().time() + desk.limits.seconds
        body.check()
        question = body.question
        job = await desk.take(body.model, lambda: desk.chat(body, question))
        reply = Completion(
            body.model, bool(body.stream_options and body.stream_options.include_usage)
        )
        if body.stream:
            first = await _unless_left(request, job, job.next(), until)
            return EventStream(job, _events(reply, job, first, until))
        answer = await _unless_left(request, job, job.finish(), until)
        return Reply(reply.whole(answer))

    @app.post("/v1/ask", response_model=None)
    async def ask(body: AskRequest, request: Request) -> Response:
        until = asyncio.get_running_loop().time() + desk.limits.seconds
        checked_text(body.question, "question")
        target = body.target or desk.engine.settings.target
        job = await desk.take(target, lambda: desk.ask(body, target))
        answer = await _unless_left(request, job, job.finish(), until)
        return Reply(answer.to_json())

    @app.get("/v1/models", response_model=None)
    def models() -> Response:
        return Reply({"object": "list", "data": desk.described()})

    @app.get("/v1/models/{name:path}", response_model=None)
    def model(name: str) -> Response:
        for described in desk.described():
            if described["id"] == name:
                return Reply(described)
        raise ApiError(404, f"no model '{name}' is served", param="model", code="model_not_found")

    @app.get("/health", response_model=None)
    async def health() -> Response:
        loaded = list(desk.engine.models.loaded)
        return Reply({"status": "ok", "models": loaded, "queues": desk.lanes.counts()})


async def _on_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def _unless_left(
    request: Request, job: Job, work: Coroutine[Any, Any, _T], until: float
) -> _T:
    """What `work` gives; the job ends if the client leaves, time runs out, or it fails."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    seconds = until - asyncio.get_running_loop().time()
    try:
        done, _ = await asyncio.wait(
            {doing, leaving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if doing in done:
            return doing.result()
        if leaving in done:
            raise ApiError(408, "the client has left")  # which nobody hears
        raise out_of_time()
    except BaseException:
        job.cancel()
        raise
    finally:
        doing.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    reply: Completion, job: Job, first: str | None, until: float
) -> AsyncIterator[str]:
    """The events of a stream; what goes wrong on the way is its last one."""
    yield reply.opening()
    piece = first
    try:
        while piece is not None:
            yield reply.piece(piece)
            async with asyncio.timeout_at(until):
                piece = await job.next()
    except (ApiError, TimeoutError) as error:
        yield event(as_api_error(error).body())
        return
    yield reply.closing(job.answer)


class EventStream(StreamingResponse):
    """Server-sent events; however they end, the job ends with them."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, events: AsyncIterator[str]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()
