"""One lane per model: a bounded waiting room, and a thread that writes one answer at a time."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from cag.answer import Answer
from cag.engine import Stream
from cag.server.errors import ApiError, as_api_error

Work = Callable[[], Stream]


class Job:
    """An answer on its way: a lane's thread writes it, the event loop reads it."""

    def __init__(self, work: Work, leave: Callable[[Job, float], None]) -> None:
        self._work, self._leave = work, leave
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[str | Answer | ApiError] = asyncio.Queue()
        self._cancelled = threading.Event()
        self._answer: Answer | None = None
        self.future: Future[None] | None = None
        self.running = False

    # -- in the event loop -----------------------------------------------------------------

    async def next(self) -> str | None:
        """The next piece of text; None at the end, when `answer` is complete.

        Raises
        ------
        ApiError
            Whatever went wrong in the thread.
        """
        event = await self._events.get()
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, Answer):
            self._answer = event
            return None
        return event

    async def finish(self) -> Answer:
        """The complete answer."""
        while await self.next() is not None:
            pass
        return self.answer

    @property
    def answer(self) -> Answer:
        """The answer, once `next` has given None."""
        if self._answer is None:
            raise RuntimeError("the answer is not complete")
        return self._answer

    def cancel(self) -> None:
        """Stop at the next piece of text, or at once while waiting; later it changes nothing."""
        self._cancelled.set()
        if self.future is not None and self.future.cancel():
            self._end(_cancelled(), 0.0)

    # -- in the lane's thread --------------------------------------------------------------

    def run(self) -> None:
        """Write the answer; never raises."""
        self.running, started = True, time.monotonic()
        end: Answer | ApiError
        try:
            end = self._write()
        except BaseException as error:  # whatever it is, the client must not wait for ever
            end = as_api_error(error)
        self._end(end, time.monotonic() - started)

    def _write(self) -> Answer | ApiError:
        if self._cancelled.is_set():
            return _cancelled()
        stream = self._work()
        for piece in stream:
            if self._cancelled.is_set():
                return _cancelled()
            self._tell(piece)
        return stream.answer

    def _end(self, end: Answer | ApiError, seconds: float) -> None:
        self._leave(self, seconds)  # before anyone hears of it, so that the place is free by then
        self._tell(end)

    def _tell(self, event: str | Answer | ApiError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class Lane:
    """The questions to one model.

    Parameters
    ----------
    room
        How many may wait beside the one that is answered.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._jobs: set[Job] = set()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cag-lane")
        self._usual_seconds = 1.0

    def submit(self, work: Work) -> Job:
        """Queue up; called in the event loop.

        Raises
        ------
        ApiError
            429 if the waiting room is full.
        """
        if len(self._jobs) > self._room:
            seconds = math.ceil(len(self._jobs) * self._usual_seconds)
            raise ApiError(
                429,
                f"{len(self._jobs)} questions wait for this model already; ask again later",
                code="overloaded",
                headers={"Retry-After": str(min(max(seconds, 1), 120))},
            )
        job = Job(work, self._left)
        self._jobs.add(job)
        job.future = self._worker.submit(job.run)
        return job

    def _left(self, job: Job, seconds: float) -> None:
        self._jobs.discard(job)
        if seconds:
            self._usual_seconds += 0.2 * (seconds - self._usual_seconds)

    def counts(self) -> dict[str, int]:
        """How many questions are being answered, and how many wait."""
        jobs = tuple(self._jobs)
        running = sum(job.running for job in jobs)
        return {"running": running, "waiting": len(jobs) - running}

    def cancel(self) -> None:
        """Stop every answer."""
        for job in tuple(self._jobs):
            job.cancel()

    def close(self) -> None:
        """Stop every answer and wait for the thread."""
        self.cancel()
        self._worker.shutdown(wait=True, cancel_futures=True)


class Lanes(dict[str, Lane]):
    """Lanes by model name, made on first use."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def __missing__(self, name: str) -> Lane:
        lane = self[name] = Lane(self._room)
        return lane

    def counts(self) -> dict[str, Any]:
        """Queue lengths of every lane."""
        return {name: lane.counts() for name, lane in self.items()}

    def close(self) -> None:
        """Stop everything; answers that run end at their next piece of text."""
        for lane in self.values():
            lane.cancel()
        for lane in self.values():
            lane.close()


def _cancelled() -> ApiError:
    return ApiError(503, "the server stopped before the answer was complete", code="stopped")
