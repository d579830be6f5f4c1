"""How close two answers are: words in common, and distributions of the first token."""

from __future__ import annotations

import re
import string
from collections import Counter

import torch
from torch import Tensor


def recovered_share(native: float, found: float, none: float) -> float:
    """Where an NLL stands between no context (0) and native (1); 0 if the text wins nothing."""
    return (none - found) / (none - native) if none > native else 0.0


def first_token_kl(native: Tensor, found: Tensor) -> float:
    """KL(native || found) in nats, from the first token's logits with shape (vocabulary,)."""
    wanted, other = native.float().log_softmax(-1), found.float().log_softmax(-1)
    return max(0.0, float(torch.sum(wanted.exp() * (wanted - other))))


def normalise(text: str) -> list[str]:
    """Words as SQuAD's metric compares them: lower case, no punctuation, no articles."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def token_f1(found: str, wanted: str) -> float:
    """SQuAD token F1 (Rajpurkar et al. 2016, section 6.1); two empty answers agree."""
    left, right = normalise(found), normalise(wanted)
    if not left or not right:
        return float(left == right)
    shared = sum((Counter(left) & Counter(right)).values())
    return 2 * shared / (len(left) + len(right))
