"""Settings, from defaults and the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cag.errors import BadSetting

_LEAST = {"max_store_gb": 0.0, "keep_mb": 0.0, "min_retention": -math.inf, "refresh": 0.0}
_MOST = {"refresh": 1.0}


def default_home() -> Path:
    """Where everything `cag` writes lies: ``$CAG_HOME``, or ``~/.cag``."""
    return Path(os.environ.get("CAG_HOME") or Path.home() / ".cag").expanduser().absolute()


@dataclass(frozen=True)
class Settings:
    """Everything that can be set; each field has an environment variable ``CAG_<NAME>``.

    Attributes
    ----------
    home
        Folder of models, store, translators and runs.
    reference, target, embedder
        Model names: a known name, a local folder, or a hub id that was pulled.
    dtype, device
        ``"auto"`` measures and picks.
    codec
        How caches lie on disk.
    keep_mb
        How much memory of the target's device the translations may take that are kept for the
        next questions, in MiB.
    max_store_gb
        Cap of the store in GiB; least recently used caches go first.
    passage_tokens
        Longest passage, in reference tokens.
    join_tokens
        Short paragraphs are joined into one passage up to this many reference tokens.
    batch
        Passages per reference prefill.
    k
        Passages per question.
    refresh
        Share of the passages' tokens, 0 to 1, that the target reads itself over their translation.
    max_tokens
        Longest answer, in tokens.
    min_retention
        A translator whose retention or recovered share on held-out passages is below this is
        not used; the answer takes the direct path and says so.
    """

    home: Path = field(default_factory=default_home)
    reference: str = "smollm2-135m-instruct"
    target: str = "gemma-3-270m"
    embedder: str = "all-minilm-l6-v2"
    dtype: str = "auto"
    device: str = "auto"
    codec: str = "bf16"
    max_store_gb: float = 20.0
    keep_mb: float = 512.0
    passage_tokens: int = 384
    join_tokens: int = 128
    batch: int = 4
    k: int = 1
    refresh: float = 0.0
    max_tokens: int = 48
    min_retention: float = 0.8

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Defaults, overridden by ``CAG_*`` variables.

        Raises
        ------
        BadSetting
            If a variable does not parse.
        """
        environment = os.environ if environment is None else environment
        defaults, changes = cls(), dict[str, Any]()
        for name in cls.__dataclass_fields__:
            text = environment.get(f"CAG_{name.upper()}")
            if not text:
                continue
            kind = type(getattr(defaults, name))
            value: Any
            try:
                value = Path(text).expanduser().absolute() if name == "home" else kind(text)
                if kind in (int, float) and not (
                    _LEAST.get(name, 1) <= value <= _MOST.get(name, math.inf) and value < math.inf
                ):
                    raise ValueError
            except (ValueError, RuntimeError):
                raise BadSetting(
                    f"CAG_{name.upper()}={text!r} is not a valid {kind.__name__} "
                    "for it; unset it or fix it"
                ) from None
            changes[name] = value

        return replace(defaults, **changes)

    @property
    def store_folder(self) -> Path:
        """Where caches, catalog and vectors lie."""
        return self.home / "store"

    @property
    def max_store_bytes(self) -> int:
        """The store's cap in bytes."""
        return int(self.max_store_gb * 2**30)
