"""Losses that train a translator against the target's own reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cag.lm.cache import KV, Context
from cag.lm.loading import LM
from cag.lm.rotary import Rotary
from cag.translate.base import Translator
from cag.translate.pairs import Pair


@dataclass
class AttentionMatching:
    """How well the target's native queries find the same things in a translated cache.

    Compares, per layer and head, the attention distribution over [prefix | passage | suffix]
    (KL) and the attention output (relative squared error). The local form of the Context
    Correction Loss (arXiv 2607.28979): no backward pass through the target is needed.

    Parameters
    ----------
    target
        The target model.
    prefix
        Its canonical KV of the prefix.
    """

    target: LM
    prefix: KV

    def __post_init__(self) -> None:
        self._prefix_keys = rotated(self.target, self.prefix, 0).float()
        self._prefix_values = self.prefix.values.float()
        windows = [w or 10**9 for w in self.target.spec.sliding]
        self._windows = torch.tensor(windows, device=self.target.device)

    def __call__(self, translated: KV, pair: Pair) -> tuple[Tensor, Tensor]:
        """KL and relative output error, each averaged over layers, heads and queries."""
        with torch.no_grad():
            wanted, wanted_out = self._attend(pair.native, pair)
        found, found_out = self._attend(translated, pair)
        kl = (wanted.exp() * (wanted - found)).sum(-1)[1:].mean()
        spread = wanted_out - wanted_out.mean(2, keepdim=True)
        error = (found_out - wanted_out).square().sum((1, 2, 3))
        return kl, (error / spread.square().sum((1, 2, 3)).clamp_min(1e-6))[1:].mean()

    def _attend(self, passage: KV, pair: Pair) -> tuple[Tensor, Tensor]:
        keys = rotated(
            self.target,
            KV.join([passage.to(torch.float32), pair.suffix.to(torch.float32)]),
            len(self.prefix),
        )
        values = torch.cat([passage.values.float(), pair.suffix.values.float()], dim=2)
        keys = torch.cat([self._prefix_keys, keys], dim=2)
        values = torch.cat([self._prefix_values, values], dim=2)
        groups = self.target.spec.query_heads // self.target.spec.kv_heads
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        logits = pair.queries.float() @ keys.transpose(-1, -2)
        places = torch.arange(keys.shape[2], device=keys.device)
        back = (pair.query_positions + len(self.prefix))[:, None] - places
        hidden = (back < 0) | (back >= self._windows[:, None, None])
        log_weights = logits.masked_fill(hidden[:, None], -1e9).log_softmax(-1)
        return log_weights, log_weights.exp() @ values


def rotated(lm: LM, kv: KV, start: int) -> Tensor:
    """Keys of canonical KV as they are at positions from `start`, differentiable; (L, H, T, D)."""
    rotary = Rotary(lm, torch.arange(start, start + len(kv)))
    return torch.stack([rotary.rotate(kv.keys[i], i) for i in range(lm.spec.layers)])


def answer_loss(target: LM, prefix: KV, translated: Sequence[KV], pairs: Sequence[Pair]) -> Tensor:
    """End to end: suffixes read by the frozen target behind translated passages.

    Returns
    -------
    Tensor
        Per pair KL(native || translated) and cross-entropy of the answer tokens, both in
        nats per token, and the relative squared error of the last hidden states over the
        suffix; shape (B, 3).
    """
    rows = []
    for kv in translated:
        whole = KV.join([prefix.to(torch.float32), kv])
        rows.append((rotated(target, whole, 0).to(target.dtype), whole.values.to(target.dtype)))
    context, mask = Context.stacked(target, rows)
    suffixes = torch.nn.utils.rnn.pad_sequence([p.suffix_ids for p in pairs], batch_first=True)
    lengths = torch.tensor([len(p.suffix_ids) for p in pairs], device=mask.device)
    real = torch.arange(suffixes.shape[1], device=mask.device) < lengths[:, None]
    output = context.run(suffixes, logits=None, mask=torch.cat([mask, real.long()], dim=1))
    states = output.last_hidden_state
    at = [p.answers.nonzero()[:, 0] for p in pairs]
    head = target.model.get_output_embeddings()
    with torch.no_grad():
        native = torch.cat([p.states[i] for p, i in zip(pairs, at, strict=True)])
        wanted = head(native.to(target.dtype)).float().log_softmax(-1)
    found = head(torch.cat([states[row, i] for row, i in enumerate(at)])).float().log_softmax(-1)
    gold = torch.cat([p.suffix_ids[i + 1] for p, i in zip(pairs, at, strict=True)])
    kl = (wanted.exp() * (wanted - found)).sum(-1)
    entropy = F.nll_loss(found, gold, reduction="none")
    losses, sizes = [], [len(i) for i in at]
    for row, (k, e) in enumerate(zip(kl.split(sizes), entropy.split(sizes), strict=True)):
        state = pairs[row].states.float()
        error = (states[row, : len(state)].float() - state).square().sum(-1)
        shift = (error / state.square().sum(-1)).mean()
        losses.append(torch.stack([k.mean(), e.mean(), shift]))
    return torch.stack(losses)


def outputs_of(native: KV) -> Tensor:
    """All keys, then all values of layers above the lowest: (T, 2 * (L-1) * H * D)."""
    both = torch.stack([native.keys[1:], native.values[1:]]).float()  # (2, L-1, H, T, D)
    return both.permute(3, 0, 1, 2, 4).flatten(1)


def kv_error(translator: Translator, standardised: Tensor, pair: Pair) -> Tensor:
    """Smooth L1 between standardised translated and native KV, a number."""
    wanted = outputs_of(pair.native).unflatten(-1, (2, -1))
    wanted = (wanted - translator.output_mean) / translator.output_scale
    return F.smooth_l1_loss(standardised.float(), wanted)


def replay_error(target: LM, start: Context, translated: KV, pair: Pair) -> Tensor:
    """The Context Correction Loss of arXiv 2607.28979, for a window of all layers but the lowest.

    The target runs over the passage while its attention sees the translated KV; what its
    layers compute on the way should be the native KV. Returns the squared error of keys and of
    values relative to their spread, averaged over layers: a number.
    """
    layers = range(1, target.spec.layers)
    at = start.length
    with start.injecting(translated, layers) as computed:
        start.run(pair.ids[None], logits=None)
    native_keys = rotated(target, pair.native.to(torch.float32), at)
    errors = []
    for layer in layers:
        natives = (native_keys[layer], pair.native.values[layer].float())
        for found, native in zip(computed[layer], natives, strict=True):
            spread = (native - native.mean(1, keepdim=True)).square().sum()
            errors.append((found[0].float() - native).square().sum() / spread.clamp_min(1e-6))
    return torch.stack(errors).mean()
