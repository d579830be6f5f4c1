"""Every command prints what it did, as text and as JSON, and an error is one line."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from test_engine import QUESTION, add_translator, cache_files, make_engine

from cag import cli
from cag.engine import CAG
from cag.errors import EmptyStore
from store import WriteLock


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def one_line_error(self) -> bool:
        lines = self.err.splitlines()
        return self.code == 2 and len(lines) == 1 and lines[0].startswith("cag: ")


Run = Callable[..., Result]


@pytest.fixture
def small(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CAG]:
    """The engine that every command gets."""
    engine = make_engine(home)
    opened = []

    def give(**changes: Any) -> CAG:
        changes = {name: value for name, value in changes.items() if value is not None}
        opened.append(CAG(replace(engine.settings, **changes), models=engine.models))
        return opened[-1]

    monkeypatch.setattr(cli, "_engine", give)
    monkeypatch.setenv("CAG_HOME", str(home))
    yield engine
    for one in (engine, *opened):
        one.store.close()


@pytest.fixture
def cag(small: CAG, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `cag` as the installed script does."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["cag", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        return Result(int(stopped.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def filled(cag: Run, small: CAG, docs: Path) -> Run:
    """`cag` over two documents, with a translator."""
    assert cag("ingest", docs).code == 0
    add_translator(small)
    return cag


# -- JSON ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("ask", QUESTION), dict),
        (("ask", QUESTION, "--mode", "own", "--k", "1", "--stream"), dict),
        (("compare", QUESTION), dict),
        (("models",), list),
        (("translators", "list"), list),
        (("translators", "show", "ref--tgt"), dict),
        (("store", "stats"), dict),
        (("store", "list"), list),
        (("store", "verify"), list),
        (("store", "gc"), dict),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_output_is_json(filled: Run, arguments: tuple[str, ...], kind: type) -> None:
    plain, found = filled(*arguments), filled(*arguments, "--json")
    assert (plain.code, found.code, found.err) == (0, 0, "")
    assert isinstance(found.json, kind)
    assert plain.out.strip()


def test_json_of_an_ingest(cag: Run, docs: Path) -> None:
    assert len(cag("ingest", docs, "--json").json["added"]) == 2
    (docs / "tower.txt").unlink()
    (docs / "empty.txt").write_text("")
    found = cag("ingest", docs, "--prune", "--json")
    assert found.code == 1
    assert found.json["removed"] == [str(docs / "tower.txt")]
    assert found.json["skipped"] == [[str(docs / "empty.txt"), "holds no text"]]


def test_json_of_a_removal(filled: Run, docs: Path) -> None:
    found = filled("store", "rm", docs / "tower.txt", "--json")
    assert found.json == {"document": str(docs / "tower.txt"), "passages": 4}
    assert [row["title"] for row in filled("store", "list", "--json").json] == ["Harbour"]


# -- commands ------------------------------------------------------------------------------


def test_ask_says_how_the_answer_came_about(filled: Run, docs: Path) -> None:
    asked = filled("ask", QUESTION, "--k", 1, "--max-tokens", 3)
    answer = filled("ask", QUESTION, "--k", 1, "--max-tokens", 3, "--json").json
    assert asked.out.startswith(answer["answer"] + "\n")
    assert answer["tokens"]["generated"] <= 3 and len(answer["sources"]) == 1
    for part in ("path: translated", "through the target's layers", str(docs / "tower.txt")):
        assert part in asked.out
    streamed = filled("ask", QUESTION, "--k", 1, "--max-tokens", 3, "--stream")
    assert streamed.out.splitlines()[:2] == asked.out.splitlines()[:2]


def test_a_fallback_is_said(cag: Run, docs: Path) -> None:
    cag("ingest", docs)
    out = cag("ask", QUESTION).out
    assert "path: fallback" in out and "cag train ref tgt" in out


def test_show_says_whether_ask_uses_a_translator_and_why_not(
    cag: Run, small: CAG, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cag("ingest", docs)
    add_translator(small, recovered=0.95, retention=0.6)
    shown, found = (cag("translators", "show", "ref--tgt", *json) for json in ([], ["--json"]))
    assert "does not use it: its retention on held-out passages is 0.60, 0.80" in shown.out
    assert "0.60, 0.80 is required" in found.json["refusal"]
    assert cag("ask", QUESTION, "--json").json["path"] == "fallback"
    monkeypatch.setenv("CAG_MIN_RETENTION", "0.6")
    assert "`cag ask` uses it" in cag("translators", "show", "ref--tgt").out


def test_a_refresh_is_shown(filled: Run) -> None:
    found = filled("ask", QUESTION, "--refresh", "0.5")
    assert re.search(r"passages \d+ \(\d+ refreshed\)", found.out)
    assert filled("ask", QUESTION, "--refresh", "2").code == 2


def test_compare_shows_both(filled: Run) -> None:
    out = filled("compare", QUESTION).out
    for part in ("translated", "direct", "token F1", "KL", "source: tower.txt"):
        assert part in out
    found = filled("compare", QUESTION, "--k", 1, "--json").json
    assert (found["translated"]["path"], found["direct"]["path"]) == ("translated", "direct")
    assert found["translated"]["sources"] == found["direct"]["sources"]
    assert len(filled("compare", QUESTION, "Are boats blue?", "--json").json) == 2


def test_ingest_exits_1_if_a_file_was_skipped(cag: Run, docs: Path) -> None:
    assert cag("ingest", docs).code == 0
    (docs / "empty.txt").write_text("")
    done = cag("ingest", docs)
    assert done.code == 1
    assert "holds no text" in done.err and "2 unchanged, 1 skipped" in done.out


def test_verify_exits_1_if_something_is_wrong(filled: Run, small: CAG) -> None:
    assert filled("store", "verify").out == "all caches are sound\n"
    path = next((small.folder / "kv").rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-9])
    done = filled("store", "verify", "--json")
    assert done.code == 1
    assert [problem["path"] for problem in done.json] == [str(path.relative_to(small.folder))]
    assert filled("store", "verify").code == 1


def test_gc_keeps_what_documents_need(filled: Run, small: CAG) -> None:
    before = cache_files(small)
    stray = next((small.folder / "kv").rglob("*.safetensors"))
    shutil.copy(stray, stray.with_name(f"{stray.name[:2]}{'0' * 62}.safetensors"))
    assert filled("store", "gc", "--json").json["caches"] == 1
    assert cache_files(small) == before


def test_stats_count_documents_and_passages(filled: Run, small: CAG) -> None:
    stats = filled("store", "stats", "--json").json
    assert (stats["documents"], stats["passages"]) == (2, len(small.library))
    assert stats["caches"] == len(cache_files(small))
    assert stats["folder"] == str(small.folder)


def test_models_say_that_nothing_is_pulled(cag: Run) -> None:
    found = cag("models", "--json").json
    assert {"smollm2-135m-instruct", "gemma-3-270m"} <= {model["name"] for model in found}
    assert not any(model["pulled"] for model in found)


# -- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ask", QUESTION, "--target", "gemma-3-270"), "did you mean 'gemma-3-270m'"),
        (("ask", QUESTION, "--target", "gemma-3-270m"), "cag pull gemma-3-270m"),
        (("ask", QUESTION, "--target", "nope", "--json"), "unknown model 'nope'"),
        (("ask", QUESTION, "--mode", "guess"), "unknown mode 'guess'"),
        (("ask", "  "), "question is empty"),
        (("ask", "bells " * 400), "retrieve fewer passages"),
        (("ask", QUESTION, "--k", "9"), "retrieve fewer passages"),
        (("compare", QUESTION, "--target", "nope"), "unknown model 'nope'"),
        (("compare", ""), "question is empty"),
        (("ingest", "/nowhere/at/all"), "does not exist"),
        (("ingest", __file__, "--reference", "nope"), "unknown model 'nope'"),
        (("store", "rm", "nothing.txt"), "cag store list"),
        (("translators", "show", "a--b"), "cag translators list"),
        (("pull", "nope"), "unknown model 'nope'"),
        (("train", "ref", "tgt", "--data", "/nowhere.jsonl"), "nowhere"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_an_error_is_one_line(filled: Run, arguments: tuple[str, ...], message: str) -> None:
    done = filled(*arguments)
    assert done.one_line_error, done
    assert message in done.err
    assert done.out == ""


def test_errors_of_an_empty_store_and_folder(cag: Run, tmp_path: Path) -> None:
    for done in (cag("ask", QUESTION), cag("compare", QUESTION)):
        assert done.one_line_error and "cag ingest" in done.err
    (tmp_path / "empty").mkdir()
    assert cag("ingest", tmp_path / "empty").one_line_error


def test_errors_of_the_store_are_one_line_too(filled: Run, small: CAG, docs: Path) -> None:
    with WriteLock(small.folder):
        for command in (("ingest", docs), ("store", "gc"), ("store", "rm", docs / "tower.txt")):
            done = filled(*command)
            assert done.one_line_error and "another process" in done.err


@pytest.mark.parametrize(
    ("name", "value"), [("CAG_CODEC", "zip"), ("CAG_K", "two"), ("CAG_MAX_STORE_GB", "20GB")]
)
def test_a_bad_setting_is_one_line(
    cag: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "_engine", lambda **changes: CAG(cli._settings(**changes)))
    assert cag("store", "stats").one_line_error


def test_debug_shows_the_traceback(cag: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["cag", "--debug", "ask", QUESTION])
    with pytest.raises(EmptyStore):
        cli.main()
    assert cag("ask", QUESTION).one_line_error  # and only when it is asked for


@pytest.mark.parametrize(
    "arguments", [("ask",), ("ask", QUESTION, "--k", "0"), ("guess",), ("ingest",)]
)
def test_wrong_usage_exits_2(cag: Run, arguments: tuple[str, ...]) -> None:
    done = cag(*arguments)
    assert done.code == 2 and done.err and "Traceback" not in done.err


def failing(error: BaseException) -> Callable[..., CAG]:
    def fail(**changes: Any) -> CAG:
        raise error

    return fail


def test_an_interruption_says_that_what_was_done_is_kept(
    cag: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_engine", failing(KeyboardInterrupt()))
    done = cag("ingest", ".")
    assert done.code == 130
    assert "what was done is kept" in done.err


def test_a_malformed_translator_is_one_line(cag: Run, small: CAG) -> None:
    (add_translator(small) / "translator.json").write_text('{"format": 1}')
    assert cag("translators", "list").one_line_error


def test_another_embedder_is_one_line(filled: Run, small: CAG) -> None:
    small.models.embedder().name = "another"
    assert filled("ask", QUESTION).one_line_error


# -- text as it is -------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["list", "ask"])
def test_brackets_of_names_are_shown(cag: Run, tmp_path: Path, command: str) -> None:
    file = tmp_path / "[id].txt"
    file.write_text("The mill has two wheels.")
    cag("ingest", file)
    done = cag("ask", "mill") if command == "ask" else cag("store", "list")
    assert "[id].txt" in done.out.replace("\n", "")


def test_a_title_that_looks_like_markup(cag: Run, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("# Bold [/b] mill\n\nThe mill has two wheels.\n")
    cag("ingest", file)
    for arguments in (("store", "list"), ("ask", "mill")):
        assert "Bold [/b] mill" in cag(*arguments).out


def test_long_names_are_shown_whole(cag: Run, tmp_path: Path) -> None:
    file = tmp_path / ("long-" * 30 + "name.txt")
    file.write_text("The mill has two wheels.")
    cag("ingest", file)
    assert str(file) in cag("store", "list").out


def test_a_folder_that_cannot_be_written_is_one_line(
    cag: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.undo()
    monkeypatch.setenv("CAG_HOME", str(tmp_path / "file"))
    done = cag("store", "stats")
    assert done.code == 2 and len(done.err.splitlines()) == 1
    assert str(tmp_path / "file") in done.err
