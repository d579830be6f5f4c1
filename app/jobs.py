"""Long work in background threads, so that no page waits for it. Knows nothing of Streamlit."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cag.errors import Busy, CagError
from store import StoreError

#: Errors that a user can cause; their message is one line that says what to do.
KNOWN_ERRORS = (CagError, StoreError, OSError)

_log = logging.getLogger(__name__)


class Stopped(Exception):
    """Raised inside a job when somebody asked it to stop."""


@dataclass
class Job:
    """One piece of work: what it is doing, and what became of it.

    Attributes
    ----------
    title
        What is being done, for people.
    stage
        What it is doing at the moment.
    share
        How much is done, from 0 to 1; None if that is not known.
    result
        What the work returned.
    error
        One line if it failed.
    stopped
        Whether it ended because somebody asked for it.
    seconds
        How long it took, or has taken so far.
    """

    title: str
    stage: str = ""
    share: float | None = None
    result: Any = None
    error: str = ""
    stopped: bool = False
    _began: float = field(default_factory=time.monotonic, repr=False)
    _took: float | None = field(default=None, repr=False)
    _stopping: threading.Event = field(default_factory=threading.Event, repr=False)
    _ended: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began if self._took is None else self._took

    def update(self, stage: str, share: float | None = None) -> None:
        """Say where the work is; called by the work itself.

        Raises
        ------
        Stopped
            If somebody asked for it.
        """
        self.stage, self.share = stage, None if share is None else min(1.0, max(0.0, share))
        if self.stopping:
            raise Stopped

    def stop(self) -> None:
        """Ask the work to end at its next update."""
        self._stopping.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end; False if it did not come in time."""
        return self._ended.wait(seconds)

    def run(self, work: Callable[[Job], Any]) -> None:
        """Do the work in this thread and note what became of it."""
        try:
            self.result = work(self)
        except Stopped:
            self.stopped = True
        except Exception as error:  # nobody above could show it
            if not isinstance(error, KNOWN_ERRORS):
                _log.exception("%s failed", self.title)
            self.error = one_line(error)
        finally:
            self._took = self.seconds
            self._ended.set()


class Jobs:
    """All jobs of the process, at most one of each name; the last of a name is remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}

    def start(self, name: str, title: str, work: Callable[[Job], Any]) -> Job:
        """Start work in a thread of its own.

        Raises
        ------
        Busy
            If a job of that name is running.
        """
        with self._lock:
            running = self._jobs.get(name)
            if running is not None and running.running:
                raise Busy(f"“{running.title}” is still running; wait until it is done or stop it")
            job = self._jobs[name] = Job(title)
        # a daemon, so that Ctrl-C ends the server; all that runs here can be cut off and goes on
        threading.Thread(target=job.run, args=(work,), name=f"cag-{name}", daemon=True).start()
        return job

    def get(self, name: str) -> Job | None:
        """The job of that name, running or done."""
        return self._jobs.get(name)

    def forget(self, name: str) -> None:
        """Drop a job that is done."""
        with self._lock:
            job = self._jobs.get(name)
            if job is not None and not job.running:
                del self._jobs[name]


def one_line(error: BaseException) -> str:
    """What an error says, on one line; with its kind where it was not meant for users."""
    text = " ".join(str(error).split())
    if isinstance(error, KNOWN_ERRORS) and text:
        return text
    return f"unexpected {type(error).__name__}: {text or 'see the log of the server'}"
