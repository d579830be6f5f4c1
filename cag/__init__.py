"""Read documents once with a reference model; answer from translated KV caches with another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cag.answer import Answer, Comparison
    from cag.engine import CAG
    from cag.settings import Settings

__all__ = ["CAG", "Answer", "Comparison", "Settings"]

_HOMES = {
    "CAG": "cag.engine",
    "Answer": "cag.answer",
    "Comparison": "cag.answer",
    "Settings": "cag.settings",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `cag --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cag' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
