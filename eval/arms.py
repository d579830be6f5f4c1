"""Arms: different ways for a model to come by its passages. One function and one line each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from cag.lm.cache import KV, Context
from cag.lm.loading import LM
from cag.lm.prefill import prefill
from cag.lm.prompt import DEFAULT_TEMPLATE, PASSAGE_FORMAT, REFERENCE_PREFIX, Template, prefix_ids
from cag.lm.replay import replay
from cag.refresh import choose_tokens, extend
from cag.retrieval import Words
from cag.translate import Translator
from cag.translate.base import align_texts
from eval.data import Question

Span = tuple[int, int]


@dataclass
class Bench:
    """Models, translators and primed prefixes that the arms share.

    Attributes
    ----------
    translators
        By the name of the arm that uses them.
    pool
        Passages that the arm `text_rag` retrieves from.
    """

    reference: LM
    target: LM
    translators: dict[str, Translator]
    template: Template = DEFAULT_TEMPLATE
    pool: Sequence[str] = ()
    _primed: dict[str, Context] = field(default_factory=dict)
    _sources: dict[str, tuple[KV, list[Span]]] = field(default_factory=dict)

    def start(self, lm: LM) -> Context:
        """A context that holds the prefix only."""
        if lm.name not in self._primed:
            context = Context(lm)
            ids = prefix_ids(lm, self.template.prefix)
            context.run(torch.tensor([ids], device=lm.device), logits=None)
            self._primed[lm.name] = context
        return self._primed[lm.name].fork()

    def native(self, lm: LM, passages: Sequence[str]) -> Context:
        """The model reads prefix and passages itself."""
        return self.read(self.start(lm), lm, self.tokens(lm, passages))

    @staticmethod
    def read(context: Context, lm: LM, ids: Sequence[int]) -> Context:
        """Extend a context by tokens that the model reads."""
        if ids:
            context.run(torch.tensor([list(ids)], device=lm.device), logits=None)
        return context

    @staticmethod
    def ids(lm: LM, passages: Sequence[str]) -> list[list[int]]:
        """Token ids of every passage as it stands in a prompt."""
        return [lm.encode(PASSAGE_FORMAT.format(text=text)) for text in passages]

    @classmethod
    def tokens(cls, lm: LM, passages: Sequence[str]) -> list[int]:
        """Token ids of all passages in a row."""
        return [token for ids in cls.ids(lm, passages) for token in ids]

    def translation(self, name: str, passages: Sequence[str]) -> KV:
        """The target's canonical KV of passages in a row, from one of the translators."""
        sources, alignments, ids = [], [], []
        for passage in passages:
            source, spans = self.source(passage)
            tokens, alignment = align_texts(spans, self.target, PASSAGE_FORMAT.format(text=passage))
            sources.append(source)
            alignments.append(alignment)
            ids.append(tokens)
        before = prefix_ids(self.target, self.template.prefix)
        return self.translators[name].translate(sources, alignments, self.target, ids, before)

    def translated(self, name: str, passages: Sequence[str]) -> Context:
        """The target gets the passages from one of the translators."""
        context = self.start(self.target)
        context.append(self.translation(name, passages))
        return context

    def source(self, passage: str) -> tuple[KV, list[Span]]:
        """Reference KV of a passage, as the store keeps it (bf16), and its spans."""
        if passage not in self._sources:
            if len(self._sources) >= 16:  # questions of one passage follow each other
                self._sources.clear()
            ids, spans = self.reference.encode_with_offsets(PASSAGE_FORMAT.format(text=passage))
            (kv,) = prefill(self.reference, prefix_ids(self.reference, REFERENCE_PREFIX), [ids])
            self._sources[passage] = (kv.to(torch.bfloat16), spans)
        return self._sources[passage]


#: An arm gives the model that answers and its context: (bench, question, another's passages).
Arm = Callable[[Bench, Question, Sequence[str]], tuple[LM, Context]]


def by_translator(name: str) -> Arm:
    """The target answers from what a translator makes of the passages."""
    return lambda b, q, other: (b.target, b.translated(name, q.passages))


def apart(b: Bench, q: Question, other: Sequence[str]) -> tuple[LM, Context]:
    """The target reads every passage by itself: composed as a translation is, nothing translated.

    What it loses against native is the price of composing, the rest of translating. Where
    positions are learned, those of every passage begin behind the prefix, and cost something, too.
    """
    context = b.start(b.target)
    for ids in b.ids(b.target, q.passages):
        alone = b.read(b.start(b.target), b.target, ids)
        context.append(alone.canonical(alone.length - len(ids), alone.length))
    return b.target, context


def replayed(inject: bool) -> Arm:
    """The paper's setting: the target runs over the passages, a window of its layers injected.

    Its cost is that of reading natively, and the translation on top. Not to `inject` a translation
    is the control: what the target itself computes is injected, so that nothing may change.
    """

    def arm(b: Bench, q: Question, other: Sequence[str]) -> tuple[LM, Context]:
        ids = b.tokens(b.target, q.passages)
        if inject:
            injected = b.translation("translated", q.passages)
        else:
            native = b.native(b.target, q.passages)
            injected = native.canonical(native.length - len(ids), native.length)
        layers = b.target.spec.layers
        window = range(layers // 3, 2 * layers // 3)
        return b.target, replay(b.target, b.start(b.target), ids, injected, window).context

    return arm


# -- refreshing ----------------------------------------------------------------------------

#: Chooses tokens to read natively: (target, question) -> mask over the passages' tokens.
Chooser = Callable[[LM, Question], list[bool]]


def last_tokens(count: int) -> Chooser:
    """The last `count` tokens of the passages."""

    def choose(lm: LM, question: Question) -> list[bool]:
        total = len(Bench.tokens(lm, question.passages))
        return [at >= total - count for at in range(total)]

    return choose


def best_sentences(share: float) -> Chooser:
    """The sentences closest to the question, up to a share of all tokens."""

    def choose(lm: LM, question: Question) -> list[bool]:
        texts = [PASSAGE_FORMAT.format(text=passage) for passage in question.passages]
        spans = [lm.encode_with_offsets(text)[1] for text in texts]
        return choose_tokens(question.question, texts, spans, share)

    return choose


def refreshed(choose: Chooser) -> Arm:
    """Chosen tokens are read natively at their place, behind what is translated before them."""

    def arm(b: Bench, q: Question, other: Sequence[str]) -> tuple[LM, Context]:
        kv, mask = b.translation("translated", q.passages), choose(b.target, q)
        context = b.start(b.target)
        extend(b.target, context, kv, b.tokens(b.target, q.passages), mask)
        return b.target, context

    return arm


def only_refreshed(choose: Chooser) -> Arm:
    """The control: the same tokens read natively, nothing translated."""

    def arm(b: Bench, q: Question, other: Sequence[str]) -> tuple[LM, Context]:
        ids = b.tokens(b.target, q.passages)
        kept = [token for token, chosen in zip(ids, choose(b.target, q), strict=True) if chosen]
        return b.target, b.read(b.start(b.target), b.target, kept)

    return arm


def text_rag(b: Bench, q: Question, other: Sequence[str]) -> tuple[LM, Context]:
    """The usual way: retrieve as many passages as are given, by TF-IDF, and read their text."""
    scores = _words(tuple(dict.fromkeys([*b.pool, *q.passages]))).scores(q.question)
    best = sorted(scores, key=lambda text: -scores[text])[: len(q.passages)]
    return b.target, b.native(b.target, best)


@functools.lru_cache(maxsize=1)
def _words(pool: tuple[str, ...]) -> Words:
    """The index of a task's passages, which all its questions share."""
    return Words({text: text for text in pool})


#: Percent of the passages' tokens that the refresh arms read natively.
REFRESHED = (10, 25, 50, 75)

ARMS: dict[str, Arm] = {
    "native": lambda b, q, other: (b.target, b.native(b.target, q.passages)),
    "apart": apart,
    "translated": by_translator("translated"),
    "ridge": by_translator("ridge"),
    "single_projection": by_translator("single_projection"),
    "shared_latent": by_translator("shared_latent"),
    "replay": replayed(inject=True),
    "replay_plain": replayed(inject=False),
    "no_context": lambda b, q, other: (b.target, b.start(b.target)),
    "wrong_passage": lambda b, q, other: (b.target, b.translated("translated", other)),
    "reference": lambda b, q, other: (b.reference, b.native(b.reference, q.passages)),
    "text_rag": text_rag,
    **{
        f"{kind}_{name}": make(choose)
        for name, choose in {
            **{str(percent): best_sentences(percent / 100) for percent in REFRESHED},
            "last_16": last_tokens(16),
        }.items()
        for kind, make in {"refresh": refreshed, "only": only_refreshed}.items()
    },
}

#: Which translator an arm needs.
NEEDS: dict[str, str] = {
    "ridge": "ridge",
    "single_projection": "single_projection",
    "shared_latent": "shared_latent",
    **{n: "translated" for n in ARMS if n.startswith("refresh_")},
    **dict.fromkeys(("translated", "replay", "wrong_passage"), "translated"),
}

#: Arms in which the reference plays no part: pairs of one target share them.
TARGET_ALONE = frozenset(
    {"native", "apart", "replay_plain", "no_context", "text_rag"}
    | {name for name in ARMS if name.startswith("only_")}
)
