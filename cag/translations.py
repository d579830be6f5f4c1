"""Translations of passages, kept in memory: what is asked about again is not translated again."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby

import torch

from cag.align import align
from cag.answer import Timings, timed
from cag.library import Passage
from cag.lm.cache import KV
from cag.lm.loading import LM
from cag.lm.prompt import Prompt
from cag.translate.base import Translator
from store import cache_key

#: Loads the stored reference caches of passages.
Load = Callable[[Sequence[Passage]], Sequence[KV]]


class Translations:
    """Translates passages for a prompt; the least recently used translations go first.

    A translation is taken from memory only if everything that shaped it is the same: stored
    cache, translator, target, its tokens, and what of the prompt before it the translator sees.
    Passages that are not there are translated together, as one product is faster than many: so
    it is the same up to rounding. Safe under threads.

    Parameters
    ----------
    max_bytes
        How much memory they may take; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._kept: OrderedDict[Hashable, KV] = OrderedDict()
        self._generation = 0  # of what may be put in: `clear` begins a new one
        self._lock = threading.Lock()

    @torch.inference_mode()
    def of(
        self,
        target: LM,
        translator: Translator,
        prompt: Prompt,
        passages: Sequence[Passage],
        load: Load,
        timings: Timings,
    ) -> tuple[KV, int]:
        """Canonical target KV of a prompt's passages, at least one, in a row.

        Parameters
        ----------
        load
            Called with those passages in a row that are not in memory.

        Returns
        -------
        tuple
            The KV, with shape (L, H, T, D), and how many of the T tokens were in memory.
        """
        generation = self._generation
        whole, keys, starts = prompt.ids, list[Hashable](), [len(prompt.prefix)]
        for passage, ids in zip(passages, prompt.passages, strict=True):
            before = whole[: starts[-1]]
            keys.append(_key(target, translator, passage, before, ids))
            starts.append(starts[-1] + len(ids))
        found = [self._get(key) for key in keys]
        parts, kept = list[KV](), 0
        for missing, group in groupby(range(len(found)), key=lambda index: found[index] is None):
            run = list(group)
            if not missing:
                parts += [kv for kv in (found[index] for index in run) if kv is not None]
                kept += sum(len(prompt.passages[index]) for index in run)
                continue
            chosen = slice(run[0], run[-1] + 1)
            caches = load(passages[chosen])
            with timed(timings, "align"):
                pairs = zip(passages[chosen], prompt.spans[chosen], strict=True)
                alignments = [align(passage.spans, spans) for passage, spans in pairs]
            with timed(timings, "translate"):
                first = starts[run[0]]
                kv = translator.translate(
                    caches, alignments, target, prompt.passages[chosen], whole[:first]
                )
                for index in run:
                    part = kv[starts[index] - first : starts[index + 1] - first]
                    self._put(keys[index], part, generation)
                parts.append(kv)
        with timed(timings, "translate"):
            return KV.join(parts) if len(parts) > 1 else parts[0], kept

    def clear(self) -> None:
        """Forget all of them, and what is being translated right now as well."""
        with self._lock:
            self._generation += 1
            self._kept.clear()
            self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def _get(self, key: Hashable) -> KV | None:
        with self._lock:
            kv = self._kept.get(key)
            if kv is not None:
                self._kept.move_to_end(key)
            return kv

    def _put(self, key: Hashable, kv: KV, generation: int) -> None:
        if kv.bytes > self.max_bytes:
            return
        if kv.keys.untyped_storage().nbytes() > kv.keys.nbytes:  # it would hold its neighbours, too
            kv = KV(kv.keys.clone(), kv.values.clone())
        with self._lock:
            if generation != self._generation:
                return
            if (old := self._kept.pop(key, None)) is not None:
                self.bytes -= old.bytes
            self._kept[key] = kv
            self.bytes += kv.bytes
            while self.bytes > self.max_bytes:
                self.bytes -= self._kept.popitem(last=False)[1].bytes


def _key(
    target: LM,
    translator: Translator,
    passage: Passage,
    before: Sequence[int],
    ids: Sequence[int],
) -> Hashable:
    """Everything that shapes the translation of a passage."""
    seen = max(0, translator.config.predecessors)
    return (
        cache_key(passage.identity),
        passage.text,
        weakref.ref(translator),  # equal to another only while it lives, and to its own alone
        target.fingerprint,
        target.dtype,
        None if any(target.spec.rope) else len(before),  # learned positions: in the lowest layer
        tuple(before[len(before) - min(seen, len(before)) :]),
        tuple(ids),
    )
