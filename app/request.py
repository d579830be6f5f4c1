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
    refresh
        Percent of the passages' tokens that the target reads over their translation.
    """

    question: str
    targets: tuple[str, ...]
    paths: tuple[str, ...]
    k: int
    tokens: int
    refresh: int = 0

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
        targets = tuple(n for n in dict.fromkeys(query.get("target", ())) if n in offered)
        paths = tuple(mode for mode in MODES if mode in query.get("path", ()))
        return cls(
            question=_last(query, "q"),
            targets=targets or tuple(offered[:1]),
            paths=paths or ("translated", "direct"),
            k=_number(_last(query, "k"), settings.k, MOST_PASSAGES),
            tokens=_number(_last(query, "tokens"), settings.max_tokens, MOST_TOKENS),
            refresh=_number(_last(query, "refresh"), round(100 * settings.refresh), 100, least=0),
        )

    def to_query(self) -> dict[str, str | list[str]]:
        """The parameters of an address that asks for this."""
        return {
            "q": self.question,
            "target": list(self.targets),
            "path": list(self.paths),
            "k": str(self.k),
            "tokens": str(self.tokens),
            "refresh": str(self.refresh),
        }

    def as_lists(self) -> dict[str, list[str]]:
        """The same as an address gives it back."""
        values = {n: v if isinstance(v, list) else [v] for n, v in self.to_query().items()}
        return {name: value for name, value in values.items() if value}


def _last(query: Mapping[str, Sequence[str]], name: str) -> str:
    return next(iter(reversed(query.get(name, ()))), "").strip()


def _number(text: str, default: int, most: int, least: int = 1) -> int:
    """A number from `least` to `most`."""
    number = int(text[:9]) if text.isascii() and text.isdecimal() else default
    return min(most, max(least, number))
