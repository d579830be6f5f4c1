"""Settings come from defaults and the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from cag.errors import CagError
from cag.settings import BadSetting, Settings, default_home


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home of its own, and none of this machine's settings."""
    for name in Settings.__dataclass_fields__:
        monkeypatch.delenv(f"CAG_{name.upper()}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_defaults(tmp_path: Path) -> None:
    settings = Settings.from_environment()
    assert settings == Settings() == Settings.from_environment({})
    assert settings.home == default_home() == tmp_path / ".cag"
    assert settings.store_folder == tmp_path / ".cag" / "store"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("home", "/data/cag", Path("/data/cag")),
        ("reference", "org/name", "org/name"),
        ("target", "/models/mine", "/models/mine"),
        ("embedder", "words", "words"),
        ("dtype", "float32", "float32"),
        ("device", "cpu", "cpu"),
        ("codec", "int8", "int8"),
        ("max_store_gb", "1.5", 1.5),
        ("passage_tokens", "128", 128),
        ("batch", "2", 2),
        ("k", "3", 3),
        ("max_tokens", "7", 7),
        ("min_retention", "0.25", 0.25),
    ],
)
def test_every_setting_has_a_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object
) -> None:
    monkeypatch.setenv(f"CAG_{name.upper()}", text)
    changed = Settings.from_environment()
    assert getattr(changed, name) == value
    assert type(getattr(changed, name)) is type(getattr(Settings(), name))


def test_a_given_environment_replaces_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAG_K", "9")
    assert Settings.from_environment({"CAG_BATCH": "2"}).k == Settings().k


def test_an_empty_variable_counts_as_unset() -> None:
    assert Settings.from_environment({"CAG_K": "", "CAG_HOME": ""}) == Settings()


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("CAG_K", "two", "int"),
        ("CAG_BATCH", "1.5", "int"),
        ("CAG_MAX_STORE_GB", "20GB", "float"),
        ("CAG_MIN_RETENTION", "half\nof it", "float"),
        ("CAG_REFRESH", "1.5", "float"),
    ],
)
def test_a_bad_value_is_named_in_one_line(name: str, text: str, kind: str) -> None:
    with pytest.raises(BadSetting) as caught:
        Settings.from_environment({name: text})
    message = str(caught.value)
    assert message.startswith(f"{name}={text!r} is not a valid {kind}")
    assert len(message.splitlines()) == 1
    assert isinstance(caught.value, CagError)


@pytest.mark.parametrize("text", ["~", "~/caches"])
def test_home_may_start_with_a_tilde(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    expected = tmp_path / text[2:]
    assert Settings.from_environment({"CAG_HOME": text}).home == expected
    monkeypatch.setenv("CAG_HOME", text)
    assert default_home() == Settings().home == Settings.from_environment().home == expected


def test_a_relative_home_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings.from_environment({"CAG_HOME": "here"}).home == tmp_path / "here"


def test_the_cap_in_bytes() -> None:
    assert Settings(max_store_gb=1.5).max_store_bytes == 3 * 2**29


def test_the_home_of_an_unknown_user_is_a_bad_setting() -> None:
    with pytest.raises(BadSetting):
        Settings.from_environment({"CAG_HOME": "~no-such-user-here/x"})


@pytest.mark.parametrize(
    ("name", "text"),
    [("CAG_MAX_STORE_GB", "nan"), ("CAG_MAX_STORE_GB", "inf"), ("CAG_BATCH", "0"), ("CAG_K", "-1")],
)
def test_a_number_that_makes_no_sense_is_a_bad_setting(name: str, text: str) -> None:
    with pytest.raises(BadSetting):
        Settings.from_environment({name: text})
