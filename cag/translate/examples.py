"""Training texts: passages, with questions where the data has them.

Reads SQuAD 1.1 JSON, JSON lines with ``question``/``answer``/``passage``, PubMedQA's JSON by
id, every document that can be ingested, and folders of all these. ``FILE[start:stop]`` takes a
slice of a file's passages, which is how splits are kept apart on the command line.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cag.documents import find_files, load
from cag.errors import IngestError, UnreadableDocument
from cag.translate import reserved

_SLICE = re.compile(r"^(?P<path>.*)\[(?P<start>\d*):(?P<stop>\d*)\]$")
_SENTENCE = re.compile(r"[^.!?]+[.!?]+")


@dataclass(frozen=True)
class Example:
    """A passage and (question, answer) pairs about it."""

    text: str
    questions: tuple[tuple[str, str], ...]


def read_examples(source: str, *, seed: int = 0, drop_reserved: bool = False) -> list[Example]:
    """Passages of one file, with cloze questions where the file has none.

    Parameters
    ----------
    source
        ``FILE`` or ``FILE[start:stop]``.
    seed
        Decides the cloze questions.
    drop_reserved
        Leave out passages that figures are reported on, instead of refusing the file.

    Raises
    ------
    IngestError
        If the file is missing or in no known format.
    ReservedPassage
        If figures are reported on any of the passages.
    """
    path, part = split_slice(source)
    files = find_files([path]) if path.is_dir() else [path]
    examples = [example for file in files for example in _file(file)][part]
    if drop_reserved:
        examples = [example for example in examples if not reserved.holds(example.text)]
    if not examples:
        raise IngestError(f"'{source}' holds no passages to train on")
    reserved.check((example.text for example in examples), source)
    chooser = random.Random(seed)
    return [e if e.questions else Example(e.text, cloze(e.text, chooser)) for e in examples]


def split_slice(source: str) -> tuple[Path, slice]:
    """The file of ``FILE`` or ``FILE[start:stop]``, and the slice of its passages."""
    match = _SLICE.match(source)
    if match is None:
        return Path(source), slice(None)
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return Path(match["path"]), slice(start, stop)


def as_question(text: str) -> str:
    """A question typed in haste, with a capital letter and one question mark."""
    text = text.strip().rstrip("?")
    return text[:1].upper() + text[1:] + "?"


def cloze(text: str, chooser: random.Random, count: int = 3) -> tuple[tuple[str, str], ...]:
    """Questions for plain text: what follows the first half of a sentence?"""
    sentences = [s.strip() for s in _SENTENCE.findall(text) if len(s.split()) >= 8]
    questions = []
    for sentence in chooser.sample(sentences, min(count, len(sentences))):
        words = sentence.split()
        cut = len(words) // 2
        half = " ".join(words[:cut])
        questions.append((f'How does "{half}" go on?', " ".join(words[cut : cut + 6])))
    return tuple(questions)


def _file(path: Path) -> list[Example]:
    try:
        return list(_read(path))
    except (OSError, KeyError, TypeError, ValueError, UnreadableDocument) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise IngestError(f"cannot read training data from '{path}': {reason}") from error


def _read(path: Path) -> Iterator[Example]:
    if path.suffix == ".jsonl":
        for line in path.read_text(encoding="utf-8").split("\n"):
            if line.strip():
                yield _line(json.loads(line))
    elif path.suffix == ".json":
        yield from _json(json.loads(path.read_text(encoding="utf-8")))
    else:
        yield from _plain(load(path).text)


def _line(row: dict[str, Any]) -> Example:
    answer = row["answer"]
    if isinstance(answer, bool):
        answer = "yes" if answer else "no"
    elif isinstance(answer, int | float):
        answer = str(answer)
    passage, question = row["passage"], row["question"]
    if not all(isinstance(value, str) for value in (passage, question, answer)):
        raise ValueError("passage, question and answer must be text")
    return Example(passage.strip(), ((as_question(question), answer),))


def _json(data: Any) -> Iterator[Example]:
    if not isinstance(data, dict):
        raise ValueError("neither SQuAD nor PubMedQA JSON; rows of your own go into a .jsonl file")
    if "data" in data:
        for article in data["data"]:
            for paragraph in article["paragraphs"]:
                questions = tuple(
                    (qa["question"].strip(), qa["answers"][0]["text"])
                    for qa in paragraph["qas"]
                    if qa["answers"]
                )
                yield Example(paragraph["context"].strip(), questions)
        return
    for row in data.values():  # PubMedQA
        yield Example(" ".join(row["CONTEXTS"]), ((row["QUESTION"], row["final_decision"]),))


def _plain(text: str, characters: int = 1000) -> Iterator[Example]:
    held = ""
    for line in text.splitlines():
        line = _untokenise(line.strip())
        if not line or line.startswith("="):
            continue
        held = f"{held} {line}".strip()
        while len(held) > characters:
            cut = held.rfind(" ", 0, characters)
            cut = cut if cut > 0 else characters
            yield Example(held[:cut], ())
            held = held[cut:].strip()
    if len(held) > characters // 4:
        yield Example(held, ())


def _untokenise(line: str) -> str:
    """Undo WikiText's spaces around punctuation; other text passes unchanged."""
    for marked, plain in ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), ("<unk>", "Kern")):
        line = line.replace(marked, plain)
    line = re.sub(r" ([,.;:!?)])", r"\1", line)
    return line.replace("( ", "(").replace(" 's", "'s")
