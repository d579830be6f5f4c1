"""Arms: different ways for a model to come by a passage. One function and one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cag.lm.cache import KV, Context
from cag.lm.loading import LM
from cag.lm.prefill import prefill
from cag.lm.prompt import DEFAULT_TEMPLATE, PASSAGE_FORMAT, REFERENCE_PREFIX, Template, prefix_ids
from cag.translate import Translator
from cag.translate.base import align_texts
from eval.data import Question


@dataclass
class Bench:
    """Models, translators and primed prefixes that the arms share."""

    reference: LM
    target: LM
    translators: dict[str, Translator]
    template: Template = DEFAULT_TEMPLATE
    _primed: dict[str, Context] = field(default_factory=dict)
    _sources: dict[str, tuple[KV, list[tuple[int, int]]]] = field(default_factory=dict)

    def start(self, lm: LM) -> Context:
        """A context that holds the prefix only."""
        if lm.name not in self._primed:
            context = Context(lm)
            ids = prefix_ids(lm, self.template.prefix)
            context.run(torch.tensor([ids], device=lm.device), logits=None)
            self._primed[lm.name] = context
        return self._primed[lm.name].fork()

    def native(self, lm: LM, passage: str) -> Context:
        """The model reads prefix and passage itself."""
        context = self.start(lm)
        ids = lm.encode(PASSAGE_FORMAT.format(text=passage))
        context.run(torch.tensor([ids], device=lm.device), logits=None)
        return context

    def translated(self, kind: str, passage: str) -> Context:
        """The target gets the passage from one of the translators."""
        source, spans = self.source(passage)
        text = PASSAGE_FORMAT.format(text=passage)
        ids, alignment = align_texts(spans, self.target, text)
        context = self.start(self.target)
        before = prefix_ids(self.target, self.template.prefix)
        translator = self.translators[kind]
        context.append(translator.translate([source], [alignment], self.target, [ids], before))
        return context

    def source(self, passage: str) -> tuple[KV, list[tuple[int, int]]]:
        """Reference KV of a passage, as the store keeps it (bf16), and its spans."""
        if passage not in self._sources:
            self._sources.clear()  # questions of one passage follow each other
            ids, spans = self.reference.encode_with_offsets(PASSAGE_FORMAT.format(text=passage))
            (kv,) = prefill(self.reference, prefix_ids(self.reference, REFERENCE_PREFIX), [ids])
            self._sources[passage] = (kv.to(torch.bfloat16), spans)
        return self._sources[passage]


#: An arm gives the model that answers and its context: (bench, question, another's passage).
Arm = Callable[[Bench, Question, str], tuple[LM, Context]]

ARMS: dict[str, Arm] = {
    "native": lambda b, q, other: (b.target, b.native(b.target, q.passage)),
    "translated": lambda b, q, other: (b.target, b.translated("translated", q.passage)),
    "ridge": lambda b, q, other: (b.target, b.translated("ridge", q.passage)),
    "no_context": lambda b, q, other: (b.target, b.start(b.target)),
    "wrong_passage": lambda b, q, other: (b.target, b.translated("translated", other)),
    "reference": lambda b, q, other: (b.reference, b.native(b.reference, q.passage)),
}
