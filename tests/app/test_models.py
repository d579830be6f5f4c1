"""The Models view, driven through Streamlit's AppTest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import add_translator, markup, opened, plain, pressed, settled, sound, using

from app.views import models
from cag.engine import CAG
from cag.errors import DownloadFailed
from cag.lm.known import KNOWN


@pytest.fixture(autouse=True)
def made(engine: CAG, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CAG]]:
    with using(engine, monkeypatch) as made:
        yield made


@pytest.fixture(autouse=True)
def no_zoo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only translators of the test's own."""
    monkeypatch.setattr("cag.translate.finding.ZOO", tmp_path / "zoo")


def test_known_models_have_size_and_licence(engine: CAG) -> None:
    app = opened("models")
    shown = plain(markup(app))
    assert sound(app)
    for known in KNOWN.values():
        assert f"**{known.name}**" in shown and f"[{known.licence}]" in shown
    assert len([b for b in app.button if b.label == "Pull"]) == len(KNOWN)
    row = app.dataframe[0].value.iloc[0]
    assert row["fingerprint"] == engine.models.lm(row["model"]).fingerprint


def test_a_pull_shows_progress_and_its_end(
    engine: CAG, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "gemma-3-270m"

    def pull(name: str, home: Path, *, progress: Any) -> Path:
        progress("downloading", 1, 4)
        folder = home / "models" / name
        folder.mkdir(parents=True)
        (folder / "cag.json").write_text(json.dumps({"source": "wheel"}))
        return folder

    monkeypatch.setattr(models, "pull", pull)
    app = opened("models")
    app.button(key=f"pull {name}").click()
    settled(app.run(), f"pull {name}")
    assert sound(app) and "here and ready" in app.success[0].value
    assert "from the wheel" in markup(app)
    assert f"pull {name}" not in [button.key for button in app.button]


def test_a_pull_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(name: str, home: Path, *, progress: Any) -> Path:
        raise DownloadFailed("cannot fetch it; check the network")

    monkeypatch.setattr(models, "pull", pull)
    app = opened("models")
    app.button(key="pull all-minilm-l6-v2").click()
    settled(app.run(), "pull all-minilm-l6-v2")
    assert "check the network" in plain(app.error[0].value)
    assert len(app.error) == 1 and not app.exception
    pressed(app, "Dismiss")
    assert sound(app)


def test_without_translators_the_command_is_named() -> None:
    app = opened("models")
    assert sound(app) and "`cag train ref tgt --data FILES`" in app.info[0].value


@pytest.mark.parametrize(
    ("recovered", "badge", "said"),
    [(0.9, "used by ask", ""), (None, "used by ask", ""), (0.2, "not used", "0.80 is required")],
)
def test_the_quality_gate_is_explained(
    engine: CAG, docs: Path, recovered: float | None, badge: str, said: str
) -> None:
    add_translator(engine, recovered)
    app = opened("models")
    assert sound(app) and f"badge[{badge}]" in markup(app)
    assert (said in plain(app.warning[0].value)) if said else not app.warning
    engine.ingest([docs])
    path = "fallback" if said else "translated"
    assert engine.ask("When was it built?").path == path, "the engine decides alike"


def test_a_translator_for_other_weights_is_not_used(engine: CAG) -> None:
    description = add_translator(engine) / "translator.json"
    content = json.loads(description.read_text())
    content["config"]["target_fingerprint"] = "f" * 32
    description.write_text(json.dumps(content))
    app = opened("models")
    assert sound(app) and "trained for a target ffffffff" in plain(app.warning[0].value)


def test_a_broken_translator_is_one_line(engine: CAG) -> None:
    (add_translator(engine) / "translator.json").write_text("{")
    app = opened("models")
    assert "cannot read the translator" in plain(app.error[0].value)
    assert len(app.error) == 1 and not app.exception
