"""What a translator's file says about it: how it is built, and what training measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cag.lm.spec import KVSpec


@dataclass(frozen=True)
class TranslatorConfig:
    """Everything a translator must know to be rebuilt and to refuse foreign models.

    Attributes
    ----------
    kind
        Name in the registry.
    reference, target
        Names of the two models, for people.
    reference_fingerprint, target_fingerprint
        Of the weights it was trained for.
    reference_spec, target_spec
        Cache geometry of both.
    rank
        Size of the latent that one reference token is reduced to.
    key_rank, value_rank
        Rank of the maps to keys and to values.
    predecessors
        How many preceding tokens' target embeddings each token sees; -1 takes away its own, too.
    experts, active, hidden
        Mixture: number of experts, how many run per token, their hidden size.
    routing
        Mixture: ``learned``, or for comparison ``uniform`` (all experts, equal weights) or
        ``random``.
    reference_layers
        The reference layers that are used; None takes all.
    key_norm
        The target normalises its keys, so their scale is known and restored.
    """

    kind: str
    reference: str
    target: str
    reference_fingerprint: str
    target_fingerprint: str
    reference_spec: dict[str, Any]
    target_spec: dict[str, Any]
    rank: int = 512
    key_rank: int = 768
    value_rank: int = 512
    predecessors: int = 3
    experts: int = 0
    active: int = 2
    hidden: int = 96
    routing: str = "learned"
    reference_layers: list[int] | None = None
    key_norm: bool = False

    @property
    def source_size(self) -> int:
        """Numbers per reference token that are used."""
        spec = KVSpec(**self.reference_spec)
        share = spec.layers if self.reference_layers is None else len(self.reference_layers)
        return spec.numbers_per_token // spec.layers * share

    def selected(self, source: Tensor) -> Tensor:
        """The used part of a flat source: (S, numbers per token) -> (S, source_size)."""
        if self.reference_layers is None:
            return source
        by_layer = source.unflatten(-1, (self.reference_spec["layers"], -1))
        return by_layer[:, self.reference_layers].flatten(1)

    @property
    def anchor_size(self) -> int:
        """Numbers of anchor per target token."""
        return (self.predecessors + 1) * self.target_spec["hidden_size"]

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """(L - 1, H, D): the lowest layer is exact and not translated."""
        spec = self.target_spec
        return spec["layers"] - 1, spec["kv_heads"], spec["head_size"]

    @property
    def outputs(self) -> int:
        """Numbers of keys, and as many of values, that are predicted per token."""
        layers, heads, size = self.output_shape
        return layers * heads * size


@dataclass
class Report:
    """What training measured, kept inside the translator file.

    Attributes
    ----------
    retention
        Held-out answer F1 as a share of native, or None if not calibrated.
    recovered
        Held-out share of the answer NLL between no context (0) and native (1).
    details
        Data, seed, curve, minutes: anything a reader should see.
    """

    retention: float | None = None
    recovered: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def shortfall(self, required: float) -> str:
        """Why it is not good enough to answer with, as one line; empty if it is.

        Both measures count: retention is what a user notices, but some dozens of answers
        measure it roughly; the recovered share is precise.
        """
        for name, found in (("retention", self.retention), ("recovered share", self.recovered)):
            if found is not None and not found >= required:  # NaN is not enough, either
                return (
                    f"its {name} on held-out passages is {found:.2f}, {required:.2f} is required "
                    "(CAG_MIN_RETENTION)"
                )
        return ""


def spread(layers: int, count: int) -> tuple[int, ...]:
    """`count` reference layers, evenly spread, the top one included."""
    if count >= layers:
        return tuple(range(layers))
    return tuple(sorted({round((i + 1) * (layers - 1) / count) for i in range(count)}))
