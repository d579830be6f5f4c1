"""An ingest does each thing once, however often it is interrupted and begun again."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_lm
from test_engine import QUESTION, add_translator, cache_files, cache_path, make_engine, same_answer

from cag.engine import CAG
from cag.errors import IngestError
from cag.ingest import Progress
from cag.library import Library
from cag.retrieval import Retriever
from store import CacheStore, StoreFull, StoreLocked

ROOT = Path(__file__).parents[1]


def names(paths: list[str]) -> list[str]:
    return [Path(path).name for path in paths]


def state(engine: CAG) -> dict[str, Any]:
    """Everything an ingest leaves behind."""
    return {
        "documents": engine.library.documents(),
        "passages": {passage.id: passage.row() for passage in engine.library.passages()},
        "caches": cache_files(engine),
        "vectors": sorted(engine.retriever._index.ids),
        "problems": engine.store.verify(),
        "temporary": engine.store.stats().temporary_bytes,
    }


def lose_catalog(engine: CAG) -> CAG:
    engine.store.close()
    shutil.rmtree(engine.folder / "catalog")
    return make_engine(engine.settings.home)


def write_many(folder: Path, count: int = 7) -> Path:
    """Documents of three passages each, all different."""
    folder.mkdir()
    for n in range(count):
        sections = (
            f"# Ship {n} part {part}\n\nShip number {n} has {part + 2} masts and {n * 7} sails."
            for part in range(3)
        )
        (folder / f"ship{n}.md").write_text("\n\n".join(sections) + "\n")
    return folder


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than one group of passages; not to be changed."""
    return write_many(tmp_path_factory.mktemp("shared") / "many")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, many: Path) -> dict[str, Any]:
    """What an ingest of `many` leaves when nothing happens."""
    engine = make_engine(tmp_path_factory.mktemp("undisturbed"))
    assert engine.ingest([many]).passages == 21
    found = state(engine)
    engine.store.close()
    return found


# -- again ---------------------------------------------------------------------------------


def test_the_first_time(engine: CAG, docs: Path) -> None:
    report = engine.ingest([docs])
    assert names(report.added) == ["harbour.md", "tower.txt"]
    assert not (report.changed or report.unchanged or report.removed or report.skipped)
    assert report.passages == len(cache_files(engine)) == engine.store.stats().caches
    assert report.tokens == engine.store.stats().tokens
    assert sorted(engine.retriever._index.ids) == sorted(p.id for p in engine.library.passages())
    for passage in engine.library.passages():
        assert Path(passage.document).read_text()[passage.start : passage.end] == passage.text


def test_unchanged_documents_are_not_read_again(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    before = state(engine)
    report = engine.ingest([docs, docs / "tower.txt"])
    assert names(report.unchanged) == ["harbour.md", "tower.txt"]
    assert (report.added, report.changed, report.passages, report.tokens) == ([], [], 0, 0)
    assert state(engine) == before


def test_a_changed_document_is_replaced(engine: CAG, docs: Path, tmp_path: Path) -> None:
    engine.ingest([docs])
    before = cache_files(engine)
    text = (docs / "harbour.md").read_text()
    (docs / "harbour.md").write_text(text.replace("Boats are blue", "Boats are green"))
    report = engine.ingest([docs])
    assert (names(report.changed), names(report.unchanged)) == (["harbour.md"], ["tower.txt"])
    assert report.passages == 1
    after = cache_files(engine)
    assert len(after) == len(before) and len(set(after) - set(before)) == 1
    fresh = make_engine(tmp_path / "fresh")
    fresh.ingest([docs])
    wanted, found = state(fresh), state(engine)
    assert found["caches"].keys() == wanted["caches"].keys()
    assert {**found, "caches": {}} == {**wanted, "caches": {}}
    fresh.store.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"passage_tokens": 24},
        pytest.param(
            {"codec": "int8"},
        ),
        pytest.param(
            {"reference": "other"},
        ),
    ],
    ids=str,
)
def test_other_settings_read_everything_again(
    engine: CAG, docs: Path, changes: dict[str, Any]
) -> None:
    engine.ingest([docs])
    other = tiny_lm("qwen2", 40)
    other.name = "other"
    engine.models.add(other)
    changed = CAG(replace(engine.settings, **changes), models=engine.models)
    report = changed.ingest([docs])
    assert names(report.changed) == ["harbour.md", "tower.txt"]
    assert report.passages
    assert changed.library.live_keys() == {Path(name).stem for name in cache_files(changed)}
    changed.store.close()


def test_only_prune_forgets_what_is_gone(engine: CAG, docs: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "docs2"
    elsewhere.mkdir()
    (elsewhere / "mill.txt").write_text("The mill has two wheels.")
    engine.ingest([docs, elsewhere])
    shutil.rmtree(elsewhere)
    (docs / "tower.txt").unlink()
    report = engine.ingest([docs])
    assert report.removed == [] and len(engine.library.documents()) == 3
    report = engine.ingest([docs], prune=True)
    assert names(report.removed) == ["tower.txt"]
    assert set(map(Path, engine.library.documents())) == {
        docs / "harbour.md",
        elsewhere / "mill.txt",  # not under what was given
    }
    assert engine.library.live_keys() == {Path(name).stem for name in cache_files(engine)}
    assert {i for i, _ in engine.library._passages.items()} == set(engine.retriever._index.ids)


def test_prune_of_a_folder_that_became_empty(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    for file in docs.iterdir():
        file.unlink()
    assert len(engine.ingest([docs], prune=True).removed) == 2
    assert cache_files(engine) == {} and len(engine.library) == 0


def test_another_spelling_of_a_path_is_the_same_document(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    report = engine.ingest([docs / ".." / docs.name])
    assert len(report.unchanged) == 2
    assert len(engine.library.documents()) == 2


# -- what cannot be ingested ---------------------------------------------------------------


def test_files_that_cannot_be_read_are_skipped_and_named(
    engine: CAG, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docs / "a-empty.txt").write_text("")
    (docs / "a-binary.txt").write_bytes(b"\x00\x01\x02")
    (docs / "a-blank.md").write_text(" \n\n ")
    (docs / "a-broken.pdf").write_bytes(b"%PDF-1.7 nothing more")
    (docs / "a-broken.docx").write_bytes(b"PK nothing more")
    (docs / "a-secret.txt").write_text("not for you")
    (docs / "z-copy.txt").write_text((docs / "tower.txt").read_text())
    read = Path.read_bytes

    def guarded(path: Path) -> bytes:
        if path.name == "a-secret.txt":
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", guarded)
    report = engine.ingest([docs])
    reasons = {Path(path).name: reason for path, reason in report.skipped}
    assert names(report.added) == ["harbour.md", "tower.txt"]
    assert reasons.keys() == {
        "a-empty.txt", "a-binary.txt", "a-blank.md", "a-broken.pdf", "a-broken.docx",
        "a-secret.txt", "z-copy.txt",
    }  # fmt: skip
    assert reasons["a-empty.txt"] == reasons["a-blank.md"] == "holds no text"
    assert "binary" in reasons["a-binary.txt"]
    assert "pdf" in reasons["a-broken.pdf"] and "docx" in reasons["a-broken.docx"]
    assert reasons["a-secret.txt"] == "Permission denied"
    assert reasons["z-copy.txt"] == f"same content as {docs / 'tower.txt'}"
    assert all(reason and "\n" not in reason for reason in reasons.values())


def test_a_document_that_becomes_unreadable_keeps_what_was_read(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    before = state(engine)
    (docs / "tower.txt").write_bytes(b"\x00")
    assert names([path for path, _ in engine.ingest([docs], prune=True).skipped]) == ["tower.txt"]
    assert state(engine) == before


@pytest.mark.parametrize("content", ["", " \n", None], ids=["empty", "blank", "a copy"])
def test_a_document_with_nothing_left_to_read_is_forgotten(
    engine: CAG, docs: Path, content: str | None
) -> None:
    engine.ingest([docs])
    copied = (docs / "harbour.md").read_text() if content is None else content
    (docs / "tower.txt").write_text(copied)
    report = engine.ingest([docs])
    assert names(report.removed) == names([path for path, _ in report.skipped]) == ["tower.txt"]
    assert names(engine.library.documents()) == ["harbour.md"]
    assert {source.passage.title for source in engine.retrieve("bells", k=9)} == {
        passage.title for passage in engine.library.passages()
    }


def test_a_full_store_says_that_caches_had_to_leave(engine: CAG, docs: Path) -> None:
    assert engine.ingest([docs]).evicted == 0
    engine.store.max_bytes = engine.store.stats().bytes
    (docs / "more.txt").write_text("The ferry leaves at nine. " * 12)
    report = engine.ingest([docs])
    assert report.evicted == engine.store.evictions > 0


def test_one_file_under_two_names_is_one_document(engine: CAG, docs: Path) -> None:
    (docs / "latest.md").symlink_to(docs / "harbour.md")
    engine.ingest([docs])
    for _ in range(2):
        report = engine.ingest([docs, docs / "harbour.md"])
        assert (len(report.unchanged), report.removed, report.skipped) == (2, [], [])


def test_a_broken_copy_does_not_take_the_good_one_away(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    (docs / "a-broken.docx").write_bytes((docs / "tower.txt").read_bytes())
    report = engine.ingest([docs])
    assert names([path for path, _ in report.skipped]) == ["a-broken.docx"]
    assert len(report.unchanged) == 2 and not report.removed


def test_prune_keeps_files_that_are_there(engine: CAG, docs: Path) -> None:
    (docs / "README").write_text("A file of no known kind, named for itself.")
    engine.ingest([docs / "README", docs])
    assert not engine.ingest([docs], prune=True).removed
    assert len(engine.library.documents()) == 3


def test_a_paragraph_that_moves_keeps_its_cache(engine: CAG, docs: Path) -> None:
    moved = "The ferry to the northern islands leaves at nine."
    (docs / "a.txt").write_text(f"{moved}\n")
    engine.ingest([docs])
    (docs / "a.txt").write_text("Nothing is here.\n")
    (docs / "b.txt").write_text(f"{moved}\n\n")
    engine.ingest([docs])
    passages = list(engine.library.passages())
    assert any(moved in p.text and p.document.endswith("b.txt") for p in passages)
    assert all(engine.store.has(passage.identity) for passage in passages)


def test_half_a_character_in_a_text_is_replaced(engine: CAG) -> None:
    report = engine.ingest_texts({"a": "The ferry \ud83d leaves.", "b\ud83d": "No name."})
    assert report.added == ["a"]
    assert [reason for _, reason in report.skipped] == ["its name is not UTF-8; rename it"]


# -- texts ---------------------------------------------------------------------------------


def test_texts_are_ingested_by_name(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    name = "https://example.org/ferry"
    texts = {
        name: "# The ferry\n\nIt leaves at nine.",
        "notes": "The cook is called Ada.",
        "no": "",
    }
    report = engine.ingest_texts(texts)
    assert report.added == [name, "notes"]
    assert report.skipped == [("no", "holds no text")]
    (source,) = engine.retrieve("When does the ferry leave?", k=1)
    assert (source.passage.document, source.passage.title) == (name, "The ferry")
    assert engine.ask("When does the ferry leave?", mode="direct", k=1).sources == [source]

    again = engine.ingest_texts({**texts, "notes": "The cook is called Eve."})
    assert (again.changed, again.unchanged, again.passages) == (["notes"], [name], 1)
    engine.ingest([docs], prune=True)
    assert len(engine.library.documents()) == 4
    assert engine.remove(name) == 1
    assert not [p for p in engine.library.passages() if p.document == name]


def test_a_file_name_that_is_not_utf8_does_not_stop_the_others(engine: CAG, docs: Path) -> None:
    Path(os.fsdecode(bytes(docs) + b"/caf\xe9.txt")).write_text("Coffee is served at eight.")
    report = engine.ingest([docs])
    assert len(report.added) + len(report.skipped) == 3
    assert {"harbour.md", "tower.txt"} <= set(names(report.added))


def test_nothing_to_ingest(engine: CAG, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "photo.jpg").write_bytes(b"\xff\xd8")
    for path in ("empty", "nowhere", "nowhere.txt"):
        with pytest.raises(IngestError, match=path) as error:
            engine.ingest([tmp_path / path])
        assert len(str(error.value).splitlines()) == 1
    assert len(engine.library) == 0


# -- shared caches -------------------------------------------------------------------------


@pytest.fixture
def twins(tmp_path: Path) -> list[Path]:
    """Two different files of the same text."""
    files = [tmp_path / "one.txt", tmp_path / "two.txt"]
    files[0].write_text("The mill has two wheels.")
    files[1].write_text("The mill has two wheels.\n")
    return files


def test_passages_of_the_same_text_share_a_cache(engine: CAG, twins: list[Path]) -> None:
    report = engine.ingest(twins)
    assert (len(report.added), report.passages, len(engine.library)) == (2, 1, 2)
    assert len(cache_files(engine)) == 1
    engine.remove(str(twins[0]))
    assert len(cache_files(engine)) == 1  # the other still needs it
    engine.remove(str(twins[1]))
    assert cache_files(engine) == {}


def test_a_text_that_is_there_already_is_not_read_again(engine: CAG, twins: list[Path]) -> None:
    assert engine.ingest(twins[:1]).passages == 1
    report = engine.ingest(twins)
    assert (len(report.unchanged), len(report.added), report.passages) == (1, 1, 0)
    assert len(engine.retrieve("mill", k=9)) == 2


# -- interrupted ---------------------------------------------------------------------------


class Killed(BaseException):
    """Nothing handles this one."""


class At:
    """A function that fails from its nth call on."""

    def __init__(self, original: Callable[..., Any], n: int, error: BaseException) -> None:
        self.original, self.left, self.error = original, n, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left <= 0:
            raise self.error
        return self.original(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Callable[..., Any]:
        return lambda *args, **kwargs: self(instance, *args, **kwargs)


def finishes(engine: CAG, folder: Path, undisturbed: dict[str, Any]) -> None:
    """The run after an interrupted one reads what is missing and nothing else."""
    stored = set(cache_files(engine))
    report = engine.ingest([folder])
    assert not report.skipped
    assert report.passages == len(undisturbed["caches"].keys() - stored)
    found = state(engine)
    assert found["caches"].keys() == undisturbed["caches"].keys()
    assert {**found, "caches": {}} == {**undisturbed, "caches": {}}
    assert engine.ingest([folder]).unchanged == sorted(undisturbed["documents"])


@pytest.mark.parametrize("n", [1, 7, 20])
def test_killed_while_storing(
    home: Path, many: Path, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    engine = make_engine(home)
    with monkeypatch.context() as patch:
        patch.setattr(CacheStore, "put", At(CacheStore.put, n, Killed()))
        with pytest.raises(Killed):
            engine.ingest([many])
    engine.store.close()
    later = make_engine(home)
    assert len(cache_files(later)) == n - 1
    finishes(later, many, undisturbed)
    later.store.close()


@pytest.mark.parametrize(
    ("owner", "name", "n"),
    [
        (Library, "_enter", 4),
        (Library, "put", 1),
        (Retriever, "add", 1),
        (Retriever, "save", 1),
        (Retriever, "save", 2),
    ],
)
def test_killed_while_recording(
    home: Path,
    many: Path,
    undisturbed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    n: int,
) -> None:
    engine = make_engine(home)
    _ = engine.retriever
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, At(getattr(owner, name), n, Killed()))
        with pytest.raises(Killed):
            engine.ingest([many])
    engine.store.close()
    later = make_engine(home)
    finishes(later, many, undisturbed)
    later.store.close()


def test_killed_between_groups_what_was_recorded_can_be_asked(
    home: Path, many: Path, undisturbed: dict[str, Any]
) -> None:
    engine, seen = make_engine(home), []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        raise Killed

    with pytest.raises(Killed):
        engine.ingest([many], on_progress=stop)
    engine.store.close()
    assert 0 < seen[0].done < seen[0].total and seen[0].eta
    later = make_engine(home)
    add_translator(later)
    assert later.ask("How many masts has ship number 1?", k=1).path == "translated"
    finishes(later, many, undisturbed)
    later.store.close()


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from test_engine import make_engine
sync, calls = os.fsync, 0
def dies(file):
    global calls
    calls += 1
    if calls == 15:  # after store.json the seventh cache, written but not in place yet
        os.kill(os.getpid(), signal.SIGKILL)
    sync(file)
os.fsync = dies
make_engine(Path(sys.argv[2])).ingest([Path(sys.argv[3])])
"""


def test_kill_9(home: Path, many: Path, undisturbed: dict[str, Any]) -> None:
    arguments = [sys.executable, "-c", KILLED, str(ROOT), str(home), str(many)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list((home / "store" / "kv").rglob(".tmp-*"))) == 1
    later = make_engine(home)
    assert len(cache_files(later)) == 6
    finishes(later, many, undisturbed)
    later.store.close()


def test_removal_that_was_killed_is_finished_by_the_next(
    engine: CAG, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.ingest([docs])
    with monkeypatch.context() as patch:
        patch.setattr(Retriever, "save", At(Retriever.save, 1, Killed()))
        with pytest.raises(Killed):
            engine.remove(str(docs / "tower.txt"))
    engine.store.close()
    later = make_engine(engine.settings.home)
    assert {s.passage.title for s in later.retrieve("bells", k=99)} == {
        "Harbour", "Harbour > Boats",
    }  # fmt: skip
    later.store.close()


# -- locked, lost, full --------------------------------------------------------------------

HOLD = """
import sys, filelock
with filelock.FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(engine: CAG) -> Iterator[subprocess.Popen[str]]:
    """Another process that is ingesting."""
    arguments = [sys.executable, "-c", HOLD, str(engine.folder / "write.lock")]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        (engine.folder / "write.pid").write_text(str(process.pid))
        yield process
        process.kill()


def test_one_ingest_at_a_time(engine: CAG, docs: Path) -> None:
    with held(engine) as process, pytest.raises(StoreLocked, match=str(process.pid)):
        engine.ingest([docs])
    assert len(engine.library) == 0 and cache_files(engine) == {}
    assert len(engine.ingest([docs]).added) == 2  # the other was killed


def test_questions_are_answered_while_another_process_ingests(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    with held(engine):
        assert engine.ask(QUESTION).answer
        with pytest.raises(StoreLocked):
            engine.remove(str(docs / "tower.txt"))
    assert engine.remove(str(docs / "tower.txt"))


def test_a_lost_catalog_is_made_again(home: Path, many: Path, undisturbed: dict[str, Any]) -> None:
    engine = make_engine(home)
    engine.ingest([many])
    add_translator(engine)
    first = engine.ask(QUESTION)
    before = state(engine)
    engine = lose_catalog(engine)
    assert state(engine) == before
    again = engine.ask(QUESTION)
    assert again.path == "translated"
    same_answer(again, first)
    report = engine.ingest([many])
    assert (len(report.unchanged), report.passages) == (7, 0)
    engine.store.close()


def test_a_lost_catalog_of_shared_caches_needs_an_ingest_but_no_reading(
    engine: CAG, docs: Path
) -> None:
    engine.ingest([docs])  # the tower's four passages are one text
    before = state(engine)
    engine = lose_catalog(engine)
    report = engine.ingest([docs])
    assert report.passages == 0
    assert state(engine) == before
    engine.store.close()


def test_a_removed_document_stays_removed_when_the_catalog_is_lost(
    engine: CAG, twins: list[Path]
) -> None:
    engine.ingest(twins)
    engine.remove(str(twins[1]))
    engine = lose_catalog(engine)
    try:
        assert str(twins[1]) not in engine.library.documents()
    finally:
        engine.store.close()


def test_a_removed_document_stays_removed_when_the_codec_changed(
    engine: CAG, twins: list[Path]
) -> None:
    engine.ingest(twins[:1])
    changed = CAG(replace(engine.settings, codec="int8"), models=engine.models)
    changed.ingest(twins[:1])
    changed.remove(str(twins[0]))
    changed.store.close()
    later = CAG(changed.settings, models=engine.models)
    try:
        assert later.library.documents() == {}
    finally:
        later.store.close()


def test_places_are_right_when_an_edit_is_followed_by_the_loss_of_the_catalog(
    engine: CAG, tmp_path: Path
) -> None:
    many = write_many(tmp_path / "many")
    engine.ingest([many])
    for file in many.iterdir():
        file.write_text(file.read_text().replace("number", "with the number", 1))
    engine.ingest([many])
    engine = lose_catalog(engine)
    engine.ingest([many])
    try:
        for passage in engine.library.passages():
            assert Path(passage.document).read_text()[passage.start : passage.end] == passage.text
    finally:
        engine.store.close()


@pytest.mark.parametrize("damage", ["lost", "foreign bytes", "lost description"])
def test_lost_vectors_are_made_again(engine: CAG, docs: Path, damage: str) -> None:
    engine.ingest([docs])
    wanted = engine.retrieve(QUESTION, k=3)
    before = state(engine)
    engine.store.close()
    if damage == "lost":
        shutil.rmtree(engine.folder / "vectors")
    elif damage == "foreign bytes":
        (engine.folder / "vectors" / "vectors.faiss").write_bytes(b"nothing of the kind")
    else:
        (engine.folder / "vectors" / "vectors.json").write_text("{")
    later = make_engine(engine.settings.home)
    assert {(s.score, s.passage.text) for s in later.retrieve(QUESTION, k=3)} == {
        (s.score, s.passage.text) for s in wanted
    }
    assert state(later) == before
    later.store.close()


def test_an_ingest_puts_back_a_missing_cache(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    before = state(engine)
    cache_path(engine, engine.retrieve("Lindholm", k=1)[0]).unlink()
    report = engine.ingest([docs])
    assert (names(report.changed), report.passages) == (["harbour.md"], 1)
    found = state(engine)
    assert found["caches"].keys() == before["caches"].keys()
    assert {**found, "caches": {}} == {**before, "caches": {}}


@pytest.mark.parametrize("n", [1, 17, 37, 39])
def test_a_full_disk(
    home: Path, docs: Path, many: Path, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Whatever is being written: the first cache, a later one, vectors, their description."""
    engine = make_engine(home)
    engine.ingest([docs])
    add_translator(engine)
    first, before = engine.ask(QUESTION), cache_files(engine)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(os, "fsync", At(os.fsync, n, full))
        with pytest.raises(StoreFull, match="cag store gc"):
            engine.ingest([many])
    assert before.items() <= cache_files(engine).items()
    assert engine.store.stats().temporary_bytes == 0
    same_answer(engine.ask(QUESTION), first)
    stored = len(cache_files(engine)) - len(before)
    report = engine.ingest([docs, many])
    assert report.passages == 21 - stored
    assert not report.skipped and len(engine.library.documents()) == 9
    assert engine.store.verify() == []
    assert sorted(engine.retriever._index.ids) == sorted(p.id for p in engine.library.passages())
    engine.store.close()


def test_a_capped_store_keeps_what_it_can_and_reads_the_rest_again(home: Path, docs: Path) -> None:
    """Every cache evicted is read again when a question needs it."""
    engine = make_engine(home, max_store_gb=60_000 / 2**30)
    engine.ingest([docs])
    stats = engine.store.stats()
    assert stats.evictions and stats.bytes <= 60_000
    add_translator(engine)
    for passage in engine.retrieve(QUESTION, k=99):
        answer = engine.ask(QUESTION, sources=[passage])
        assert answer.path == "translated"
    assert "was read again (not stored)" in answer.reason
    assert engine.store.stats().bytes <= 60_000
    engine.store.close()


def test_digest_of_a_row_is_that_of_the_file(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    for path, row in engine.library.documents().items():
        assert row["sha256"] == hashlib.sha256(Path(path).read_bytes()).hexdigest()
