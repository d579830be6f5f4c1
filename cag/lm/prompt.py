"""The prompt, as pieces: prefix | passages | suffix.

Both paths use these same pieces. Each is tokenised by itself, so the tokens of a passage
never depend on what stands beside it, and a direct answer reads exactly the ids that a
translated one is built on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cag.errors import EmptyQuestion
from cag.lm.loading import LM

_EXAMPLE = """\
Read the context and answer the question with a short phrase copied from the context.

Context: The Amazon river flows through Brazil, Peru and Colombia. It is about 6,400 \
kilometres long and ends in the Atlantic Ocean.
Question: Where does the Amazon river end?
Answer: the Atlantic Ocean
Question: How long is the Amazon river?
Answer: about 6,400 kilometres

Context:"""


@dataclass(frozen=True)
class Template:
    """Text around passages and question.

    Attributes
    ----------
    prefix
        Everything before the first passage. Constant, so that it can never invalidate a
        cache from one day to the next.
    suffix
        Format of what follows the passages; ``{question}`` is the question.
    stop
        Strings that end an answer.
    """

    prefix: str = _EXAMPLE
    suffix: str = "\nQuestion: {question}\nAnswer:"
    stop: tuple[str, ...] = ("\n",)

    @property
    def fingerprint(self) -> str:
        """Identifies the template in metadata."""
        text = "\0".join((self.prefix, self.suffix, *self.stop))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


DEFAULT_TEMPLATE = Template()

#: How a passage stands in any prompt, of the reference as of the target. One format for all, so
#: that a stored cache fits every prompt and passages can stand in any order.
PASSAGE_FORMAT = " {text}"

#: What the reference model reads before a passage: something for its attention to sink into.
REFERENCE_PREFIX = "Context:"


@dataclass(frozen=True)
class Prompt:
    """Token ids of one prompt for one model, piece by piece.

    Attributes
    ----------
    prefix, passages, suffix
        Ids of the pieces.
    spans
        Per passage the characters that each of its tokens covers.
    question
        As it stands in the suffix.
    """

    prefix: list[int]
    passages: list[list[int]]
    suffix: list[int]
    spans: list[list[tuple[int, int]]]
    question: str

    @property
    def ids(self) -> list[int]:
        """The whole prompt as one sequence."""
        return [*self.prefix, *self.passage_ids, *self.suffix]

    @property
    def passage_ids(self) -> list[int]:
        """Ids of all passages in order."""
        return [token for passage in self.passages for token in passage]


def prefix_ids(lm: LM, text: str) -> list[int]:
    """Ids of a prefix, led by exactly one BOS where the model has one.

    Whether it has one is what its tokenizer does, not whether a BOS id is defined: Qwen and
    SmolLM2 define one and never use it.
    """
    tokenizer = lm.tokenizer
    led = tokenizer("x").input_ids
    bos = [led[0]] if led and led[0] == tokenizer.bos_token_id else []
    return bos + lm.encode(text)


def build_prompt(lm: LM, template: Template, passages: Sequence[str], question: str) -> Prompt:
    """Tokenise a question over some passages.

    Raises
    ------
    EmptyQuestion
        If the question holds no text.
    """
    question = question.strip()
    if not question:
        raise EmptyQuestion("the question is empty; write what you want to know")
    encoded = [lm.encode_with_offsets(PASSAGE_FORMAT.format(text=text)) for text in passages]
    return Prompt(
        prefix=prefix_ids(lm, template.prefix),
        passages=[ids for ids, _ in encoded],
        suffix=lm.encode(template.suffix.format(question=question)),
        spans=[spans for _, spans in encoded],
        question=question,
    )
