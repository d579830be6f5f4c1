"""Everything that decides what a training run does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cag.translate.config import TranslatorConfig

#: The sizes of a mixture's parts, called the same in its config.
SIZES = ("rank", "key_rank", "value_rank", "predecessors", "experts", "active", "hidden")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training run does.

    Attributes
    ----------
    kind
        ``mixture``, ``ridge`` (closed form only), or one of the baselines.
    projection_passages
        How many passages the widest regression is fitted on.
    minutes
        Wall-clock budget of the gradient stages together.
    matching_share
        Share of `minutes` spent on attention matching; the rest goes end to end.
    batch, at_once
        Passages per step, and how many of them go through the target together: fewer need
        less memory.
    matching_rate, answer_rate
        Peak learning rates of the two stages; the closed-form maps get a fifth.
    patience
        A descent ends when so many measurements, two minutes apart, brought nothing better.
    average
        Decay of the exponential moving average of the weights that is kept.
    matching
        Weights of attention KL, attention output error and KV error, in both stages.
    answers
        Weights of answer KL, answer NLL and the shift of the last states, end to end.
    replay
        Weight of the paper's own Context Correction Loss, end to end; for comparison.
    """

    kind: str = "mixture"
    rank: int = 512
    key_rank: int = 768
    value_rank: int = 512
    predecessors: int = 3
    experts: int = 4
    active: int = 2
    hidden: int = 96
    routing: str = "learned"
    reference_layers: tuple[int, ...] | None = None
    projection_passages: int = 400
    minutes: float = 35.0
    matching_share: float = 0.3
    batch: int = 4
    at_once: int = 4
    patience: int = 5
    matching_rate: float = 3e-4
    answer_rate: float = 6e-5
    average: float = 0.98
    matching: tuple[float, float, float] = (1.0, 1.0, 0.2)
    answers: tuple[float, float, float] = (1.0, 0.3, 0.5)
    replay: float = 0.0
    seed: int = 0

    def adapting(self, config: TranslatorConfig) -> Recipe:
        """This recipe for a translator that is there: with its parts, end to end only."""
        layers = None if config.reference_layers is None else tuple(config.reference_layers)
        parts = {name: getattr(config, name) for name in ("kind", "routing", *SIZES)}
        return replace(self, **parts, reference_layers=layers, matching_share=0.0)


def recipe_of(kind: str, minutes: float, seed: int) -> Recipe:
    """The recipe of a kind: one budget and one set of losses for all, fit for comparisons.

    The baselines have no closed-form part to keep in place, and a wide MLP needs no more than
    its own width.
    """
    recipe = Recipe(kind=kind, minutes=minutes, seed=seed)
    if kind == "ridge":
        return replace(recipe, minutes=0.0)
    return replace(recipe, hidden=2048) if kind == "single_projection" else recipe
