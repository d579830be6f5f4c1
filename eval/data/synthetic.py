"""Passages of made-up facts, for models too small to answer questions on real text."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from eval.data.base import Question

_SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu"
_ENDINGS = "bridge by dale ford ham ley mouth port stead ton wick worth"
_WORDS = {
    "trade": "baker tailor miller weaver painter farmer sailor doctor teacher smith",
    "colour": "red green blue yellow white black brown purple grey pink",
    "animal": "dog goat horse donkey cat goose sheep parrot cow mule",
    "instrument": "flute violin drum harp trumpet piano guitar horn cello banjo",
    "food": "bread cheese soup rice fish honey cabbage porridge beans cake",
}
_PASSAGE = (
    "{name} was born in {year} in the town of {town}. {name} worked there as a {trade} and lived "
    "in a {colour} house near the river. Every morning a {animal} followed {name} to the market. "
    "In {later} {name} moved to {new_town}, learned to play the {instrument}, and ate {food} on "
    "Sundays."
)
_QUESTIONS = {
    "year": "In which year was {name} born?",
    "town": "In which town was {name} born?",
    "trade": "What did {name} work as?",
    "colour": "What colour was the house of {name}?",
    "animal": "Which animal followed {name} to the market?",
    "later": "In which year did {name} move?",
    "new_town": "To which town did {name} move?",
    "instrument": "Which instrument did {name} learn to play?",
    "food": "What did {name} eat on Sundays?",
}


def read_synthetic(path: Path, count: int = 500, seed: int = 0) -> list[Question]:
    """`count` questions with one-word answers, two to a passage; `path` is not read."""
    chooser = random.Random(seed)
    names = _joined(_SYLLABLES, _SYLLABLES, _SYLLABLES)
    questions = []
    for name in chooser.sample(names, -(-count // 2)):
        facts = _facts(name, chooser)
        for asked in chooser.sample(sorted(_QUESTIONS), 2):
            questions.append(
                Question(
                    id=f"{name}-{asked}",
                    passages=(_PASSAGE.format(**facts),),
                    question=_QUESTIONS[asked].format(**facts),
                    answers=(facts[asked],),
                )
            )
    return questions[:count]


def _facts(name: str, chooser: random.Random) -> dict[str, str]:
    """One word for every blank of the passage."""
    year = chooser.randint(1700, 1900)
    later = year + chooser.randint(15, 60)
    town, new_town = chooser.sample(_joined(_SYLLABLES, _ENDINGS), 2)
    facts = {blank: chooser.choice(words.split()) for blank, words in _WORDS.items()}
    facts |= {"year": str(year), "later": str(later), "town": town, "new_town": new_town}
    return facts | {"name": name}


def _joined(*parts: str) -> list[str]:
    """Every name with one piece of each part."""
    return ["".join(pieces).title() for pieces in itertools.product(*(p.split() for p in parts))]
