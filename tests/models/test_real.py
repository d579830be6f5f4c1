"""The default pair on real weights: `make weights` first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cag.engine import CAG
from cag.lm.cache import Context
from cag.lm.decode import Decoded, Generation, decode
from cag.lm.loading import LM
from cag.models import Models
from cag.settings import Settings
from eval.arms import Bench
from eval.measure import answer_nll
from eval.metrics import recovered

pytestmark = pytest.mark.models

DOCS = Path(__file__).parents[2] / "docs"

#: Written for this test, so that no data set is needed: (passage, question, answer).
FACTS = (
    (
        "The Lindholm lighthouse was finished in 1874 after nine years of work. Its keeper, Marta "
        "Ekdal, lived there until 1911 and wrote down the weather every morning. The tower is 42 "
        "metres high and painted in red and white stripes.",
        "Who was the keeper of the lighthouse?",
        "Marta Ekdal",
    ),
    (
        "In the spring of 2019 the town of Varnholt opened a new tram line between the harbour and "
        "the university. It cost 310 million crowns and carries 18,000 people a day. The old bus "
        "depot was turned into a market hall.",
        "What was the old bus depot turned into?",
        "a market hall",
    ),
    (
        "Tessaline is a blue dye made from the roots of a mountain shrub. Weavers of the Oru "
        "valley boil the roots for three hours and add ash. The colour fades in sunlight, so the "
        "cloth is kept in cedar chests.",
        "Why is the cloth kept in cedar chests?",
        "The colour fades in sunlight",
    ),
)


@pytest.fixture(scope="module")
def settings() -> Settings:
    return Settings.from_environment()


@pytest.fixture(scope="module")
def models(settings: Settings) -> Models:
    return Models(settings)


@pytest.fixture(scope="module")
def engine(
    settings: Settings, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CAG]:
    engine = CAG(settings, models=models, store_folder=tmp_path_factory.mktemp("store"))
    engine.ingest([DOCS])
    yield engine
    engine.store.close()


def greedy(lm: LM, text: str, tokens: int) -> str:
    result = Decoded()
    ids = lm.tokenizer(text).input_ids
    for _ in decode(lm, Context(lm), ids, Generation(max_tokens=tokens, stop=()), result):
        pass
    return result.text


def test_gemma_is_tokenised_as_its_authors_do(models: Models, settings: Settings) -> None:
    tokenizer = models.lm(settings.target).tokenizer
    assert tokenizer("The capital of France is").input_ids == [2, 818, 5279, 529, 7001, 563]


def test_smollm_gets_no_bos(models: Models, settings: Settings) -> None:
    lm = models.lm(settings.reference)
    assert lm.tokenizer("x").input_ids == lm.encode("x")


@pytest.mark.parametrize("role", ["reference", "target"])
@pytest.mark.parametrize("text", ["Zoë’s naïve café\n\tdef f(x):  return x", "日本語 🙂 e\u0301 …"])
def test_tokens_cover_the_text(models: Models, settings: Settings, role: str, text: str) -> None:
    lm = models.lm(getattr(settings, role))
    ids, spans = lm.encode_with_offsets(text)
    assert lm.tokenizer.decode(ids) == text
    assert spans[0][0] == 0 and spans[-1][1] == len(text)


@pytest.mark.parametrize("role", ["reference", "target"])
def test_the_weights_arrived_whole(models: Models, settings: Settings, role: str) -> None:
    lm = models.lm(getattr(settings, role))
    assert "Paris" in greedy(lm, "The capital of France is the city of", 4)


def test_the_own_path_answers_like_the_direct_one(
    settings: Settings, tmp_path: Path, engine: CAG
) -> None:
    exact = CAG(
        replace(settings, dtype="float32", codec="fp32", max_tokens=12), store_folder=tmp_path
    )
    sources = engine.retrieve("Which library keeps the vectors?", 1)
    for question in ("Which library keeps the vectors?", "What is a passage?"):
        direct = exact.ask(question, mode="direct", sources=sources)
        exact.ask(question, mode="own", sources=sources)
        own = exact.ask(question, mode="own", sources=sources)
        assert own.answer == direct.answer
        assert own.reason == ""  # nothing had to be read again


def test_a_translated_answer_reads_no_document(engine: CAG) -> None:
    answer = engine.ask("In which format are the caches stored?")
    assert (answer.path, answer.reason) == ("translated", "")
    tokens = answer.tokens
    assert tokens.passage > 50
    forward = tokens.suffix + tokens.generated
    assert tokens.target_forward == forward
    assert "safetensors" in answer.answer.lower()


def test_translated_caches_tell_what_the_passage_says(models: Models, settings: Settings) -> None:
    reference, target = (models.lm(n) for n in (settings.reference, settings.target))
    translator = models.translator(reference.name, target.name)
    assert translator is not None, "the default pair ships no translator"
    bench = Bench(reference, target, {"translated": translator})
    totals = torch.zeros(4)
    for index, (passage, question, answer) in enumerate(FACTS):
        suffix = target.encode(bench.template.suffix.format(question=question))
        other = FACTS[index - 1][0]
        contexts = (
            bench.native(target, [passage]),
            bench.start(target),
            bench.translated("translated", [passage]),
            bench.translated("translated", [other]),
        )
        totals += torch.tensor([answer_nll(target, c, suffix, answer) for c in contexts])
    native, none, translated, wrong = totals.tolist()
    assert recovered(translated, native, none) > 0.6
    assert recovered(wrong, native, none) < 0.4  # another passage's cache does not help
