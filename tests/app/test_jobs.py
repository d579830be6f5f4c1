"""Background jobs."""

from __future__ import annotations

import threading

import pytest

from app.jobs import Jobs, one_line
from cag.errors import Busy, CagError


def test_a_job_gives_progress_and_a_result() -> None:
    jobs, seen, go_on = Jobs(), threading.Event(), threading.Event()

    def work(job: object) -> int:
        job.update("half", 0.5)  # type: ignore[attr-defined]
        seen.set()
        assert go_on.wait(10)
        return 7

    job = jobs.start("ingest", "Reading", work)
    assert seen.wait(10) and job.running and (job.stage, job.share) == ("half", 0.5)
    with pytest.raises(Busy, match="Reading"):
        jobs.start("ingest", "Again", work)
    jobs.forget("ingest")
    assert jobs.get("ingest") is job, "a job that runs is not forgotten"
    go_on.set()
    assert job.wait(10) and job.result == 7 and not job.error
    jobs.forget("ingest")
    assert jobs.get("ingest") is None


def test_a_job_stops_at_its_next_update() -> None:
    started, go_on = threading.Event(), threading.Event()

    def work(job: object) -> None:
        started.set()
        assert go_on.wait(10)
        job.update("more")  # type: ignore[attr-defined]

    job = Jobs().start("ingest", "Reading", work)
    assert started.wait(10)
    job.stop()
    go_on.set()
    assert job.wait(10) and job.stopped and not job.error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CagError("do\nthis"), "do this"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (ValueError("odd"), "unexpected ValueError: odd"),
        (KeyError(), "unexpected KeyError: see the log of the server"),
    ],
)
def test_a_failure_is_one_line(error: Exception, said: str) -> None:
    def work(job: object) -> None:
        raise error

    job = Jobs().start("pull", "Pulling", work)
    assert job.wait(10) and job.error == said == one_line(error)
