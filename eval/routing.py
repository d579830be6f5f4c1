"""How a mixture shares its tokens among its experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cag.translate import Mixture
from eval.arms import Bench


@torch.inference_mode()
def routing(
    bench: Bench, passages: Sequence[Sequence[str]], name: str = "translated"
) -> dict[str, Any] | None:
    """Routing statistics while passages are translated; None if the translator has no experts.

    Parameters
    ----------
    passages
        Groups of passages that stand in one prompt.

    Returns
    -------
    dict
        ``passages`` and ``tokens`` counted, ``tokens_per_expert`` (share of all tokens that an
        expert ran for, so that they add up to the number of active experts), ``weight`` (share
        of the mixing weights, adding up to 1), ``entropy`` (mean over tokens of that of the
        mixing weights, in nats, at most ``most_entropy``) and ``usage_entropy`` (that of
        ``weight`` as a share of what even use would give).
    """
    mixture = bench.translators.get(name)
    if not isinstance(mixture, Mixture) or not passages:
        return None
    weights, chosen = _routed(bench, mixture, passages, name)
    experts, active = mixture.config.experts, weights.shape[1]
    tokens = len(weights)
    ran = torch.bincount(chosen.flatten(), minlength=experts).float() / tokens
    weight = torch.zeros(experts).index_add_(0, chosen.flatten(), weights.flatten()) / tokens
    entropy = float(torch.special.entr(weights).sum(-1).mean())
    usage = float(torch.special.entr(weight).sum()) / math.log(experts) if experts > 1 else 1.0
    return {
        "passages": sum(map(len, passages)),
        "tokens": tokens,
        "routing": mixture.config.routing,
        "tokens_per_expert": ran.tolist(),
        "weight": weight.tolist(),
        "entropy": entropy,
        "most_entropy": math.log(active),
        "usage_entropy": usage,
    }


def _routed(
    bench: Bench, mixture: Mixture, passages: Sequence[Sequence[str]], name: str
) -> tuple[Tensor, Tensor]:
    """Weights and experts of every token, both (tokens, active)."""
    seen: list[tuple[Tensor, Tensor]] = []
    route = mixture.route

    def noting(normed: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(route(normed))
        return seen[-1]

    mixture.route = noting  # type: ignore[method-assign]
    try:
        for group in passages:
            bench.translation(name, group)
    finally:
        del mixture.route  # the class's own is behind it
    weights, chosen = (torch.cat([part[side] for part in seen]).cpu() for side in (0, 1))
    return weights.float(), chosen
