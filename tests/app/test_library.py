"""The Library view, driven through Streamlit's AppTest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import asked, markup, opened, plain, pressed, settled, sound, switched, using

from app import shared, uploads
from app.views.library import INGEST, VERIFY
from cag.engine import CAG
from cag.ingest import IngestReport, Progress


@pytest.fixture(autouse=True)
def made(engine: CAG, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CAG]]:
    with using(engine, monkeypatch) as made:
        yield made


def figures(app: Any) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def uploaded(app: Any, *files: tuple[str, bytes, str]) -> Any:
    app.file_uploader[0].set_value(list(files))
    return settled(pressed(app, "Read them"), INGEST)


def test_an_empty_library_says_what_to_do() -> None:
    app = opened("library")
    assert sound(app) and "No documents yet" in app.info[0].value
    assert figures(app)["Documents"] == "0" and not app.dataframe


def test_uploads_are_read_and_the_broken_one_is_named(engine: CAG, home: Path) -> None:
    app = uploaded(
        opened("library"),
        ("../../boats.md", b"# Boats\n\nBoats are blue.", "text/markdown"),
        ("broken.bin", b"\0\1", "application/octet-stream"),
    )
    path = home / "uploads" / "boats.md"
    assert sound(app) and path.exists()
    assert list(engine.library.documents()) == [str(path)]
    assert "1 added" in app.success[0].value
    assert "broken.bin" in app.warning[0].value and "binary" in app.warning[0].value
    row = app.dataframe[0].value.iloc[0]
    assert (row["document"], row["read by"]) == (str(path), "ref")
    assert figures(app)["Documents"] == "1"
    assert "1 added" not in markup(pressed(app, "Dismiss"))


def test_the_first_upload_can_be_asked_about_at_once(engine: CAG) -> None:
    boats = ("boats.md", b"# Boats\n\nBoats are blue.", "text/markdown")
    app = uploaded(opened("library"), boats)
    app = asked(switched(app, "compare"), "What colour are boats?")
    assert sound(app) and app.session_state["result"].answers


def test_a_folder_is_read_and_what_is_gone_is_forgotten(engine: CAG, docs: Path) -> None:
    app = opened("library")
    app.text_input[0].set_value(f" {docs} ")
    settled(pressed(app, "Read it"), INGEST)
    assert sound(app) and "2 added" in app.success[0].value
    (docs / "tower.txt").unlink()
    app.text_input[0].set_value(str(docs))
    app.checkbox[0].check()
    settled(pressed(app, "Read it"), INGEST)
    assert sound(app) and "1 unchanged, 1 removed" in app.success[0].value
    assert len(engine.library.documents()) == 1


@pytest.mark.parametrize(("path", "said"), [("/no/such/place", "does not exist"), ("", "Name a")])
def test_a_folder_that_is_not_there_is_one_line(path: str, said: str) -> None:
    app = opened("library")
    app.text_input[0].set_value(path)
    pressed(app, "Read it")
    assert said in plain(markup(app)) and not app.exception
    assert shared.jobs().get(INGEST) is None


def test_a_folder_without_documents_is_one_line(tmp_path: Path) -> None:
    app = opened("library")
    (tmp_path / "empty").mkdir()
    app.text_input[0].set_value(str(tmp_path / "empty"))
    settled(pressed(app, "Read it"), INGEST)
    assert "no documents found" in plain(app.error[0].value) and not app.exception


def test_every_session_sees_an_ingest_and_none_waits_for_it(
    engine: CAG, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.ingest([docs])
    reading, go_on = threading.Event(), threading.Event()

    def slow(paths: Any, *, prune: bool, on_progress: Any) -> IngestReport:
        on_progress(Progress("a.md", 30_000, 120_000, 5_000, 10.0))
        reading.set()
        assert go_on.wait(60)
        on_progress(Progress("b.md", 60_000, 120_000, 10_000, 20.0))
        return IngestReport()

    monkeypatch.setattr(engine, "ingest", slow)
    first = opened("library")
    first.text_input[0].set_value(str(docs))
    pressed(first, "Read it")
    assert reading.wait(60)
    other = opened("library")  # and a reload finds it again
    assert sound(other)
    (bar,) = other.get("progress")
    assert bar.value == 25
    assert "30 kB of 120 kB · 5,000 tokens read, 500 per second · 30 s left" in plain(bar.text)
    assert all(b.disabled for b in other.button if b.label in ("Read them", "Read it"))
    answered = asked(opened())  # asking goes on meanwhile
    assert sound(answered) and answered.session_state["result"].answers
    pressed(other, "Stop")
    go_on.set()
    settled(other, INGEST)
    assert "Stopped" in other.info[0].value and sound(other)


def test_removing_asks_first(engine: CAG, docs: Path, home: Path) -> None:
    app = uploaded(opened("library"), ("boats.md", b"Boats are blue.", "text/markdown"))
    engine.ingest([docs])
    upload, kept = home / "uploads" / "boats.md", docs / "harbour.md"
    app.run()
    app.multiselect(key="removing").set_value([str(upload), str(kept)])
    app.run()
    pressed(app, "Remove…")
    assert "Forget 2 documents" in markup(app) and len(engine.library.documents()) == 3
    pressed(app, "Remove")
    assert sound(app) and list(engine.library.documents()) == [str(docs / "tower.txt")]
    assert not upload.exists() and kept.exists(), "only uploaded copies are deleted"
    assert "Removed 2 documents" in app.toast[0].value


def test_removing_while_the_store_is_held_is_one_line(engine: CAG, docs: Path) -> None:
    from store import WriteLock

    engine.ingest([docs])
    app = opened("library")
    app.multiselect(key="removing").set_value([str(docs / "tower.txt")])
    app.run()
    pressed(app, "Remove…")
    with WriteLock(engine.folder):
        pressed(app, "Remove")
    assert not app.exception and "is writing to" in plain(app.toast[0].value)
    assert len(engine.library.documents()) == 2


def test_verifying_finds_damage(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    app = settled(pressed(opened("library"), "Verify every file"), VERIFY)
    assert "sound" in app.success[0].value
    next((engine.folder / "kv").rglob("*.safetensors")).write_bytes(b"damaged")
    settled(pressed(app, "Verify every file"), VERIFY)
    assert sound(app) and "1 problem;" in app.warning[0].value


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("a.md", "a.md"),
        ("../../etc/passwd", "passwd"),
        ("C:\\docs\\b.txt", "b.txt"),
        ("..", "document"),
        ("", "document"),
        (".hidden.md", "hidden.md"),
        ("a\0b\n.md", "ab.md"),
        ("é" * 300 + ".md", "é" * 100 + ".md"),
    ],
)
def test_names_of_uploads_are_safe(name: str, kept: str) -> None:
    assert uploads.safe_name(name) == kept
