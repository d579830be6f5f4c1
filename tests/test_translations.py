"""What was translated before is taken from memory, and only if it would come out the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
import torch
from conftest import random_pair, random_translator, tiny_lm

from cag.answer import Timings
from cag.library import Passage
from cag.lm.cache import KV
from cag.lm.loading import LM
from cag.lm.prefill import prefill
from cag.lm.prompt import DEFAULT_TEMPLATE, PASSAGE_FORMAT, build_prompt
from cag.translate import Translator
from cag.translations import Translations

TEXTS = ["The harbour is old.", "Boats are blue.", "Nine bells ring at noon."]
PLENTY = 2**30
REFERENCE, TARGET = random_pair()


def passage(number: int) -> Passage:
    text = PASSAGE_FORMAT.format(text=TEXTS[number])
    spans = REFERENCE.encode_with_offsets(text)[1]
    return Passage(str(number), "", "", 0, 0, TEXTS[number], spans, {"ids": number})


class Asker:
    """Asks for passages by number, and notes which of them were loaded."""

    def __init__(self, target: LM, translator: Translator, max_bytes: int = PLENTY) -> None:
        self.target, self.translator = target, translator
        self.translations = Translations(max_bytes)
        self.loaded: list[str] = []

    def load(self, passages: Sequence[Passage]) -> list[KV]:
        self.loaded += [passage.id for passage in passages]
        texts = [PASSAGE_FORMAT.format(text=passage.text) for passage in passages]
        return [prefill(REFERENCE, [], [REFERENCE.encode(text)])[0] for text in texts]

    def __call__(self, *numbers: int) -> tuple[KV, int]:
        passages = [passage(number) for number in numbers]
        prompt = build_prompt(self.target, DEFAULT_TEMPLATE, [p.text for p in passages], "Why?")
        self.loaded = []
        return self.translations.of(
            self.target, self.translator, prompt, passages, self.load, Timings()
        )


def same(one: KV, other: KV) -> None:
    torch.testing.assert_close(one.keys, other.keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one.values, other.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["ridge", "mixture"])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "opt"])
def test_memory_changes_no_translation_in_any_order(family: str, kind: str) -> None:
    target = tiny_lm(family, 20, seed=1)
    translator = random_translator(kind, target)
    remembering, forgetful = Asker(target, translator), Asker(target, translator, 0)
    orders = [order for count in (1, 2, 3) for order in permutations(range(3), count)]
    for order in [*orders, *orders[::-1]]:
        (kv, kept), (fresh, none) = remembering(*order), forgetful(*order)
        same(kv, fresh)
        assert none == 0 and forgetful.loaded == [str(number) for number in order]
        assert (kept == len(kv)) == (not remembering.loaded)
    assert remembering(2, 0)[1] > 0


def test_what_is_kept_needs_no_cache() -> None:
    ask = Asker(TARGET, random_translator())
    first, kept = ask(0)
    assert (kept, ask.loaded) == (0, ["0"])
    again, kept = ask(0)
    assert (kept, ask.loaded) == (len(first), [])
    assert torch.equal(again.keys, first.keys) and torch.equal(again.values, first.values)
    _, kept = ask(0, 1)
    assert (kept, ask.loaded) == (len(first), ["1"])


def test_another_translator_or_target_starts_anew() -> None:
    target = TARGET
    ask = Asker(target, random_translator())
    ask(0)
    ask.translator = random_translator("mixture")
    assert ask(0)[1] == 0
    ask.target = tiny_lm("gemma3_text", 20, seed=2)
    assert ask.target.fingerprint != target.fingerprint
    assert ask(0)[1] == 0
    ask.target = target
    assert ask(0)[1] > 0


def test_the_least_recently_used_go_first() -> None:
    target, translator = TARGET, random_translator()
    sizes = [Asker(target, translator)(number)[0].bytes for number in range(3)]
    ask = Asker(target, translator, max_bytes=sum(sizes) - 1)
    ask(0), ask(1), ask(0), ask(2)
    assert ask.translations.bytes == sizes[0] + sizes[2] and len(ask.translations) == 2
    assert ask(0)[1] > 0 and ask(2)[1] > 0
    assert ask(1)[1] == 0
    ask.translations.clear()
    assert ask.translations.bytes == len(ask.translations) == 0
    small = Asker(target, translator, max_bytes=min(sizes) - 1)
    small(0)
    assert small(0)[1] == 0 and small.translations.bytes == 0


def test_what_is_translated_while_all_is_forgotten_is_not_kept() -> None:
    ask = Asker(TARGET, random_translator())
    load = ask.load

    def forgetting(passages: Sequence[Passage]) -> list[KV]:
        ask.translations.clear()  # as when a document is removed meanwhile
        return load(passages)

    ask.load = forgetting  # type: ignore[method-assign]
    assert len(ask(0)[0]) > 0 and len(ask.translations) == 0
