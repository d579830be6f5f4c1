"""A comparison that was asked for, and how the page's address says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cag.engine import MODES
from cag.settings import Settings

MOST_PASSAGES, MOST_TOKENS = 50, 512


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes
    ----------
    question
        Empty if nothing was asked yet.
    targets
        Models that answer, in order.
    paths
        Out of `cag.engine.MODES`, in that order.
    k
        Passages that are retrieved.
    tokens
        Longest answer, in tokens.
    """

    question: str
    targets: tuple[str, ...]
    paths: tuple[str, ...]
    k: int
    tokens: int

    @classmethod
    def from_query(
        cls, query: Mapping[str, Sequence[str]], settings: Settings, offered: Sequence[str]
    ) -> Request:
        """What an address asks for; what it lacks or what makes no sense is the default.

        Parameters
        ----------
        query
            Every value of each parameter.
        settings
            Give the defaults.
        offered
            Names of targets that there are.
        """
        targets = tuple(name for name in offered if name in query.get("target", ()))
        paths = tuple(mode for mode in MODES if mode in query.get("path", ()))
        return cls(
            question=_last(query, "q"),
            targets=targets or tuple(offered[:1]),
            paths=paths or ("translated", "direct"),
            k=_number(_last(query, "k"), settings.k, MOST_PASSAGES),
            tokens=_number(_last(query, "tokens"), settings.max_tokens, MOST_TOKENS),
        )

    def to_query(self) -> dict[str, str | list[str]]:
        """The parameters of an address that asks for this."""
        return {
            "q": self.question,
            "target": list(self.targets),
            "path": list(self.paths),
            "k": str(self.k),
            "tokens": str(self.tokens),
        }


def _last(query: Mapping[str, Sequence[str]], name: str) -> str:
    return next(iter(reversed(query.get(name, ()))), "").strip()


def _number(text: str, default: int, most: int) -> int:
    """A number from 1 to `most`."""
    return min(most, max(1, int(text) if text.isascii() and text.isdecimal() else default))
