"""What shaped a run: written before its first answer, and compared before it is continued."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cag.errors import CagError
from cag.lm.loading import LM
from eval.data import Question, Task

#: Keys below which a later run may add entries; what is there already must stay as it is.
GROWING = ("pairs", "tasks", "translators")
#: What a description tells besides what identifies it; a calibration may change it.
TOLD = ("recovered", "retention")


class OtherRun(CagError):
    """A folder that holds the results of a run with other settings."""


def describe_lm(lm: LM) -> dict[str, Any]:
    """A model's identity."""
    return {
        "name": lm.name,
        "fingerprint": lm.fingerprint,
        "tokenizer": lm.tokenizer_fingerprint,
        "parameters": sum(parameter.numel() for parameter in lm.model.parameters()),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": lm.device.type,
    }


def describe_task(task: Task, questions: Sequence[Question]) -> dict[str, Any]:
    """A task's role and file, and a checksum of exactly what was asked."""
    content = json.dumps([asdict(question) for question in questions], sort_keys=True)
    return {
        "role": task.role,
        "file": Path(task.file).name if Path(task.file).is_absolute() else task.file,
        "questions": len(questions),
        "sha256": hashlib.sha256(content.encode()).hexdigest(),
    }


def versions() -> dict[str, str]:
    """Versions of everything that could change a figure."""
    packages = {name: importlib.metadata.version(name) for name in ("cag", "torch", "transformers")}
    return {"python": platform.python_version(), **packages}


def session() -> dict[str, Any]:
    """What may differ from one session of a run to the next."""
    return {"threads": torch.get_num_threads(), **_commit(Path(__file__))}


def _commit(file: Path) -> dict[str, Any]:
    """The commit that the code is at and whether it was changed since; nothing outside git."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(file.parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", file.name) is None:  # installed, or not under git
        return {"commit": None, "modified": None}
    changes = git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": git("rev-parse", "HEAD"),
        "modified": None if changes is None else changes != "",
    }


def begin(path: Path, config: dict[str, Any], session: dict[str, Any]) -> dict[str, Any]:
    """Write a run's config, or add to the one that is there.

    Returns
    -------
    dict
        The config with every pair, task and translator so far, and all ``sessions``.

    Raises
    ------
    OtherRun
        If the file there is of a run that would give other figures.
    """
    old = read_config(path) if path.exists() else {"sessions": []}
    sessions = old.pop("sessions", [])
    if old and (found := differences(old, config)):
        raise OtherRun(
            f"'{path.parent}' holds another run: {'; '.join(found[:3])}; "
            "use the same settings or another --out"
        )
    if session not in sessions:
        sessions.append(session)
    merged = {**_merged(old, config), "sessions": sessions}
    write_json(path, merged)
    return merged


def read_config(path: Path) -> dict[str, Any]:
    """A run's config.

    Raises
    ------
    OtherRun
        If it cannot be read.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise OtherRun(f"no run can be read from '{path}': {error}") from error
    return config


def differences(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> list[str]:
    """What differs, a phrase each; entries that only one side has are fine where things grow."""
    found = []
    inside = at.rpartition("/")[2]
    for name in dict.fromkeys([*old, *new]):
        if inside in GROWING and not (name in old and name in new):
            continue
        if name in TOLD:
            continue
        place, (one, other) = f"{at}/{name}".strip("/"), (old.get(name), new.get(name))
        if isinstance(one, dict) and isinstance(other, dict):
            found += differences(one, other, place)
        elif one != other:
            found.append(f"{place} is {_short(one)}, not {_short(other)}")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:20]}..."


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {n: _merged(old[n], new[n]) if n in old and n in new else {**old, **new}[n]
                for n in dict.fromkeys([*old, *new])}  # fmt: skip
    return new


def write_json(path: Path, value: Any) -> None:
    """Write plain data; the file appears only when it is complete."""
    temporary = path.with_suffix(".tmp")
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)
