"""What a question is, what a task is, and the roles that keep figures honest."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cag.errors import IngestError

#: ``report``: figures only. ``choose``: settings may be chosen by it. ``train``: may be fitted on.
Role = Literal["report", "choose", "train"]


@dataclass(frozen=True)
class Question:
    """A question with its passages and every accepted answer.

    Attributes
    ----------
    id
        Unique within its task, the same in every run.
    passages
        Texts that are given, in order; at least one.
    answers
        Accepted answers; the first one's likelihood is measured.
    choices
        The closed set of answers, or nothing where the answer is free text.
    """

    id: str
    passages: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """A data set, or a part of one, that questions are drawn from.

    Attributes
    ----------
    name
        How the command line calls it.
    role
        What its questions may be used for.
    file
        Where it lies below the data folder; empty if it is generated.
    read
        Reads that file.
    """

    name: str
    role: Role
    file: str
    read: Callable[[Path], list[Question]]

    def questions(self, root: Path, n: int | None = None, seed: int = 0) -> list[Question]:
        """All questions, or `n` drawn with a seed, those of one passage next to each other.

        Raises
        ------
        IngestError
            If the file is missing, malformed or holds no questions.
        """
        path = root / self.file
        try:
            found = self.read(path)
        except (OSError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise IngestError(f"cannot read task '{self.name}' from '{path}': {reason}") from error
        if not found:
            raise IngestError(f"'{path}' holds no questions with an answer")
        return sample(found, len(found) if n is None else n, seed)


def sample(questions: Sequence[Question], n: int, seed: int) -> list[Question]:
    """`n` questions drawn with a seed, then ordered so that passages stay together."""
    drawn = random.Random(seed).sample(list(questions), min(n, len(questions)))
    return sorted(drawn, key=lambda question: (question.passages, question.id))


def yes_no(answer: object) -> str:
    """The word for a JSON truth value.

    Raises
    ------
    ValueError
        If it is none.
    """
    if not isinstance(answer, bool):
        raise ValueError(f"an answer is {answer!r}, not true or false")
    return "yes" if answer else "no"


def folded(text: str) -> str:
    """Letters and digits only, in lower case: what two copies of a passage have in common."""
    return "".join(filter(str.isalnum, text.casefold()))
