"""An answer says truly how it came about, and is the same however often it is asked for."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, tiny_lm, tiny_models
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cag.align import align
from cag.answer import Answer, Timings
from cag.compose import place_translated, read_prefix
from cag.engine import CAG
from cag.errors import (
    CagError,
    ContextTooLong,
    EmptyQuestion,
    EmptyStore,
    MissingWeights,
    UnknownModel,
)
from cag.lm.cache import KV, Context
from cag.lm.counting import decoder_layers
from cag.lm.decode import Generation
from cag.lm.loading import LM
from cag.lm.prompt import PASSAGE_FORMAT, Template, build_prompt
from cag.models import Models
from cag.retrieval import Source
from cag.scoring import token_f1
from cag.settings import Settings
from cag.translate import Translator
from cag.translate.base import TRANSLATORS
from cag.translate.config import Report, TranslatorConfig
from store import CacheStore, StoreFull

TARGETS = ("gemma3_text", "qwen2", "gpt2", "opt")
QUESTION = "How many bells has the tower?"
LONG = Generation(max_tokens=12, stop=())


def make_engine(home: Path, target: str = "gemma3_text", **changes: Any) -> CAG:
    settings = Settings(
        home=home, reference="ref", target="tgt", passage_tokens=48, max_tokens=6, k=2,
        dtype="float32", codec="fp32",
    )  # fmt: skip
    settings = replace(settings, **changes)
    return CAG(settings, models=tiny_models(settings, target=target))


def add_translator(
    engine: CAG,
    kind: str = "ridge",
    recovered: float | None = 0.9,
    retention: float | None = None,
    **changes: Any,
) -> Path:
    """A translator of random weights between the engine's two models."""
    reference, target = engine.models.lm("ref"), engine.models.lm("tgt")
    values: dict[str, Any] = {
        "kind": kind,
        "reference": "ref",
        "target": "tgt",
        "reference_fingerprint": reference.fingerprint,
        "target_fingerprint": target.fingerprint,
        "reference_spec": reference.spec.to_json(),
        "target_spec": target.spec.to_json(),
        **{"rank": 8, "key_rank": 8, "value_rank": 8, "predecessors": 2},
        **{"experts": 3, "active": 2, "hidden": 4},
    }
    torch.manual_seed(5)
    translator = TRANSLATORS[kind](TranslatorConfig(**{**values, **changes}))
    with torch.no_grad():
        for parameter in translator.parameters():
            parameter.normal_(0.0, 0.1)
    translator.report = Report(retention, recovered)
    folder = engine.settings.home / "translators" / "ref--tgt"
    translator.save(folder)
    return folder


@contextmanager
def layer_tokens(lm: LM) -> Iterator[list[int]]:
    """Tokens that leave each decoder layer, counted apart from the engine's own count."""
    layers = decoder_layers(lm)
    counts = [0] * len(layers)

    def counter(layer: int) -> Callable[..., None]:
        def count(module: Any, args: Any, output: Any) -> None:
            counts[layer] += (output[0] if isinstance(output, tuple) else output).shape[-2]

        return count

    handles = [layer.register_forward_hook(counter(i)) for i, layer in enumerate(layers)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def cache_files(engine: CAG) -> dict[str, str]:
    """Name -> SHA-256 of every stored cache."""
    paths = (engine.folder / "kv").rglob("*.safetensors")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def cache_path(engine: CAG, source: Source) -> Path:
    key = engine.store.key(source.passage.identity)
    return engine.folder / "kv" / key[:2] / f"{key}.safetensors"


def same_answer(one: Answer, other: Answer, tolerance: float = 0.0) -> None:
    assert one.answer == other.answer
    assert one.first_logits is not None and other.first_logits is not None
    torch.testing.assert_close(one.first_logits, other.first_logits, atol=tolerance, rtol=tolerance)


@pytest.fixture
def asked(engine: CAG, docs: Path) -> CAG:
    """An engine with documents and a translator."""
    engine.ingest([docs])
    add_translator(engine)
    return engine


# -- what passes the target's layers -------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "kind"), [*((family, "ridge") for family in TARGETS), ("gemma3_text", "mixture")]
)
def test_only_prefix_suffix_and_answer_pass_the_target(
    home: Path, docs: Path, target: str, kind: str
) -> None:
    engine = make_engine(home, target)
    engine.ingest([docs])
    add_translator(engine, kind)
    lm = engine.models.lm("tgt")
    modes = [("translated", False), ("direct", True), ("own", True), ("own", False)]
    for mode, read in modes:
        with layer_tokens(lm) as counts:
            answer = engine.ask(QUESTION, mode=mode, generation=LONG)
        tokens = answer.tokens
        assert (answer.path, len(answer.sources)) == (mode, 2)
        assert tokens.prefix and tokens.passage and tokens.suffix and tokens.generated
        forward = tokens.passage * read + tokens.suffix + tokens.generated
        whole = forward + tokens.prefix * (mode == "translated")  # the first question reads it
        assert counts == [whole] * lm.spec.layers, mode
        assert tokens.target_forward == forward
    engine.store.close()


@pytest.mark.parametrize("target", TARGETS)
def test_a_refresh_reads_its_share_and_all_of_it_is_the_direct_path(
    home: Path, docs: Path, target: str
) -> None:
    engine = make_engine(home, target)
    engine.ingest([docs])
    add_translator(engine)
    plain = engine.ask(QUESTION, generation=LONG)
    none = engine.ask(QUESTION, refresh=0.0, generation=LONG)
    same_answer(none, plain)
    some = engine.ask(QUESTION, refresh=0.3, generation=LONG)
    wanted = round(0.3 * some.tokens.passage)
    assert (some.path, some.tokens.refreshed) == ("translated", wanted)
    assert some.tokens.target_forward == some.tokens.suffix + some.tokens.generated + wanted
    assert some.first_logits is not None and plain.first_logits is not None
    assert not torch.allclose(some.first_logits, plain.first_logits, atol=1e-3)
    whole = engine.ask(QUESTION, refresh=1.0, generation=LONG)
    same_answer(whole, engine.ask(QUESTION, mode="direct", generation=LONG), 1e-4)
    again = CAG(replace(engine.settings, refresh=0.3), models=engine.models)
    same_answer(again.ask(QUESTION, generation=LONG), some, 1e-5)
    engine.store.close()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_refresh_is_a_share(asked: CAG, share: float) -> None:
    with pytest.raises(CagError, match="between 0 and 1"):
        asked.ask(QUESTION, refresh=share)


def test_two_templates_do_not_share_a_prefix(asked: CAG) -> None:
    other = CAG(asked.settings, models=asked.models, template=Template(prefix="Other. Context:"))
    for engine in (asked, other, asked, other):
        one, two = (engine.ask(QUESTION, mode=mode) for mode in ("direct", "own"))
        same_answer(one, two, 1e-4)
        assert one.tokens.prefix != asked.ask(QUESTION).tokens.prefix or engine is asked


def test_a_model_that_was_replaced_reads_the_prefix_itself(asked: CAG) -> None:
    asked.ask(QUESTION)
    other = tiny_lm("qwen2", 20, seed=4)
    other.name = "tgt"
    asked.models.add(other)
    fresh = CAG(asked.settings, models=asked.models)
    one, two = (engine.ask(QUESTION, mode="direct") for engine in (asked, fresh))
    same_answer(one, two)


def test_a_fallback_reads_the_passages(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    tokens = engine.ask(QUESTION).tokens
    assert tokens.target_forward == tokens.passage + tokens.suffix + tokens.generated


def test_a_token_that_ends_the_answer_is_neither_counted_nor_read(asked: CAG) -> None:
    lm = asked.models.lm("tgt")
    first = asked.ask(QUESTION).first_logits
    assert first is not None
    lm.model.generation_config.eos_token_id = int(first.argmax())
    answer = asked.ask(QUESTION)
    assert (answer.answer, answer.finish, answer.tokens.generated) == ("", "stop", 0)
    assert answer.tokens.target_forward == answer.tokens.suffix


def test_without_passages_nothing_is_translated(asked: CAG) -> None:
    answer = asked.ask(QUESTION, sources=[])
    assert (answer.path, answer.sources, answer.tokens.passage) == ("translated", [], 0)
    same_answer(answer, asked.ask(QUESTION, sources=[], mode="direct"), 1e-5)


def test_a_translated_question_needs_no_reference_model(
    asked: CAG, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    find = asked.models.lm
    monkeypatch.setattr(asked.models, "lm", lambda name: used.append(name) or find(name))
    assert asked.ask(QUESTION).path == "translated"
    assert set(used) == {"tgt"}


# -- composing -----------------------------------------------------------------------------


class Given(Translator):
    """Hands on the KV it is given, which is the target's own."""

    kind = "given"

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def translate(self, sources: Sequence[KV], *_: Any) -> KV:
        return KV.join(sources)


TRANSLATORS.pop("given")


def rotated(lm: LM, keys: torch.Tensor, layer: int, start: int) -> torch.Tensor:
    """Keys (H, T, D) where transformers itself would have turned them to."""
    name = lm.spec.rope[layer]
    if name is None:
        return keys
    positions = torch.arange(start, start + keys.shape[1])[None]
    kinds = () if name == "default" else (name,)
    cos, sin = lm.body.rotary_emb(keys[None], positions, *kinds)
    return apply_rotary_pos_emb(keys[None], keys[None], cos, sin)[1][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_passages_land_rotated_at_their_places_in_any_order(
    engine: CAG, docs: Path, family: str
) -> None:
    engine.ingest([docs])
    lm = tiny_lm(family)
    passages = list(engine.library.passages())[:3]
    texts = {
        passage.id: lm.encode(PASSAGE_FORMAT.format(text=passage.text)) for passage in passages
    }
    torch.manual_seed(0)
    shape = (lm.spec.layers, lm.spec.kv_heads)
    caches = {
        i: KV(*torch.randn(2, *shape, len(ids), lm.spec.head_size)) for i, ids in texts.items()
    }
    for order in itertools.permutations(passages):
        prompt = build_prompt(lm, engine.template, [p.text for p in order], QUESTION)
        context = read_prefix(lm, engine.template)
        kv = KV.join([caches[passage.id] for passage in order])
        place_translated(lm, context, prompt, [p.text for p in order], kv, Timings())
        assert context.length == len(prompt.prefix) + len(prompt.passage_ids)
        start = len(prompt.prefix)
        for passage in order:
            kv = caches[passage.id]
            stop = start + len(kv)
            for layer, (keys, values) in enumerate(context._layers()):
                expected = rotated(lm, kv.keys[layer], layer, start)
                torch.testing.assert_close(keys[0, :, start:stop], expected, atol=1e-5, rtol=1e-5)
                assert torch.equal(values[0, :, start:stop], kv.values[layer])
            start = stop


@pytest.mark.parametrize("mode", ["direct", "translated"])
@torch.inference_mode()
def test_the_best_passage_stands_next_to_the_question(asked: CAG, mode: str) -> None:
    sources, lm = asked.retrieve("harbour lighthouse railway", k=3), asked.models.lm("tgt")
    passages = [source.passage for source in sources[::-1]]
    prompt = build_prompt(lm, asked.template, [p.text for p in passages], QUESTION)
    context = read_prefix(lm, asked.template)
    if mode == "direct":
        context.run(torch.tensor([prompt.passage_ids]), logits=None)
    else:
        translator = asked.models.translator("ref", "tgt")
        hits = [asked.store.get(passage.identity).tensors for passage in passages]
        caches = [KV(hit["keys"], hit["values"]) for hit in hits]
        pairs = zip(passages, prompt.spans, strict=True)
        alignments = [align(passage.spans, spans) for passage, spans in pairs]
        assert translator is not None
        context.append(translator.translate(caches, alignments, lm, prompt.passages, prompt.prefix))
    wanted = context.run(torch.tensor([prompt.suffix])).logits[0, -1]
    answer = asked.ask(QUESTION, mode=mode, sources=sources)
    assert answer.path == mode and answer.sources == sources
    torch.testing.assert_close(answer.first_logits, wanted, atol=1e-4, rtol=1e-4)


def test_sources_may_come_in_any_order(asked: CAG, monkeypatch: pytest.MonkeyPatch) -> None:
    from cag import engine as module

    lengths: list[int] = []
    decode = module.decode

    def noted(lm: LM, context: Context, *rest: Any) -> Iterator[str]:
        lengths.append(context.length)
        return decode(lm, context, *rest)

    monkeypatch.setattr(module, "decode", noted)
    sources = asked.retrieve("harbour lighthouse railway", k=3)
    orders = list(itertools.permutations(sources))
    answers = [asked.ask(QUESTION, sources=order) for order in orders]
    wanted = answers[0].tokens.prefix + answers[0].tokens.passage
    assert lengths == [wanted] * 6
    assert [answer.sources for answer in answers] == [list(order) for order in orders]
    first = [answer.first_logits for answer in answers]
    assert not any(torch.equal(*pair) for pair in itertools.combinations(first, 2))  # type: ignore


# -- own -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_own_equals_direct_for_one_passage(home: Path, docs: Path, family: str) -> None:
    """Both when the cache is made and when it is reused; longer than Gemma's window of 24."""
    engine = make_engine(home, family)
    engine.ingest([docs])
    direct = engine.ask(QUESTION, mode="direct", k=1, generation=LONG)
    for reason in ("1 passages were read and stored first (not stored)", ""):
        own = engine.ask(QUESTION, mode="own", k=1, generation=LONG)
        assert (own.path, own.reason) == ("own", reason)
        same_answer(own, direct, 1e-4)
    engine.store.close()


def test_own_equals_direct_for_many_passages_and_stores_each_place_once(asked: CAG) -> None:
    sources = asked.retrieve("harbour lighthouse railway", k=3)
    for order in (sources, sources[::-1]):
        direct = asked.ask(QUESTION, mode="direct", sources=order)
        for _ in range(2):
            same_answer(asked.ask(QUESTION, mode="own", sources=order), direct, 1e-4)
    assert not asked.ask(QUESTION, mode="own", sources=sources[1:]).reason  # same predecessors
    before = cache_files(asked)
    asked.ask("Who rings?", mode="own", sources=sources)
    assert cache_files(asked) == before


def test_own_caches_go_with_every_passage_they_have_seen(asked: CAG, docs: Path) -> None:
    before = cache_files(asked)
    tower, harbour = (
        next(p for p in asked.library.passages() if p.document == str(docs / name))
        for name in ("tower.txt", "harbour.md")
    )
    order = [Source(tower, 1.0), Source(harbour, 1.0)]  # the best stands last and saw the other
    asked.ask(QUESTION, mode="own", sources=order)
    asked.ask(QUESTION, mode="own", sources=order[:1])
    made = set(cache_files(asked)) - set(before)
    assert len(made) == 3
    asked.store.gc(asked.library.live_keys())
    assert set(cache_files(asked)) == made | set(before)
    asked.remove(str(docs / "harbour.md"))
    assert len(made & set(cache_files(asked))) == 1
    assert not asked.ask(QUESTION, mode="own", sources=order[:1]).reason


def test_gc_takes_an_own_cache_of_a_document_forgotten_meanwhile(asked: CAG) -> None:
    before = cache_files(asked)
    (source,) = asked.retrieve(QUESTION, k=1)
    stream = asked.stream(QUESTION, mode="own", sources=[source])
    asked.remove(source.passage.document)
    assert "".join(stream)
    asked.store.gc(asked.library.live_keys())
    assert not set(cache_files(asked)) - set(before)


def test_an_answer_does_not_need_room_in_the_store(
    asked: CAG, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise StoreFull("no room left")

    monkeypatch.setattr(CacheStore, "put", full)
    answer = asked.ask(QUESTION, mode="own", k=1)
    assert answer.path == "own" and "no room left" in answer.reason
    same_answer(answer, asked.ask(QUESTION, mode="direct", k=1), 1e-4)


def test_models_are_used_while_another_is_loaded(home: Path, saved: Path) -> None:
    models = tiny_models(Settings(home=home, reference="ref", target="tgt"))
    with models._loading("lm", "slow"):
        assert models.lm("ref").name == "ref"
        assert models.lm(str(saved)).name == str(saved)


def test_own_survives_a_damaged_cache(asked: CAG) -> None:
    before = set(cache_files(asked))
    first = asked.ask(QUESTION, mode="own", k=1)
    (made,) = set(cache_files(asked)) - before
    path = next((asked.folder / "kv").rglob(made))
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    again = asked.ask(QUESTION, mode="own", k=1)
    assert "checksum" in again.reason
    same_answer(again, first)
    assert not asked.ask(QUESTION, mode="own", k=1).reason


# -- the same question again ---------------------------------------------------------------


@pytest.mark.parametrize("mode", ["translated", "direct", "own"])
def test_asking_twice_changes_nothing(asked: CAG, mode: str) -> None:
    first = asked.ask(QUESTION, mode=mode)
    before = cache_files(asked)
    again = asked.ask(QUESTION, mode=mode)
    same_answer(again, first, 1e-5 if mode == "own" else 0.0)  # own keys were turned back and forth
    assert again.sources == first.sources
    assert cache_files(asked) == before


def test_a_new_process_answers_the_same(asked: CAG) -> None:
    first = asked.ask(QUESTION)
    asked.store.close()
    later = make_engine(asked.settings.home)
    again = later.ask(QUESTION)
    assert again.path == "translated"
    same_answer(again, first)
    later.store.close()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (flip, "checksum does not match"),
        (truncate, "unreadable"),
        (lambda path: path.write_bytes(b""), "unreadable"),
        (Path.unlink, "not stored"),
    ],
    ids=["flipped", "truncated", "empty", "missing"],
)
def test_a_damaged_cache_is_read_again(asked: CAG, damage: Callable[[Path], Any], why: str) -> None:
    first, files = asked.ask(QUESTION), cache_files(asked)
    source = asked.retrieve("harbour of Lindholm", k=1)[0]
    whole = asked.ask(QUESTION, sources=[source])
    damage(cache_path(asked, source))
    asked.translations.clear()
    again = asked.ask(QUESTION, sources=[source])
    assert again.path == "translated"
    assert again.reason.startswith(f"passage {source.passage.id} was read again ({why}")
    same_answer(again, whole, 1e-5)
    assert set(cache_files(asked)) == set(files)
    assert asked.store.verify() == []
    asked.translations.clear()
    assert not asked.ask(QUESTION, sources=[source]).reason
    same_answer(asked.ask(QUESTION), first, 1e-5)


def test_a_damaged_cache_whose_model_is_gone_falls_back(asked: CAG) -> None:
    source = asked.retrieve(QUESTION, k=1)[0]
    cache_path(asked, source).unlink()
    other = tiny_lm("llama", 60, seed=9)
    other.name = "ref"
    asked.models.add(other)
    answer = asked.ask(QUESTION, sources=[source])
    assert answer.path == "fallback" and "run `cag ingest` again" in answer.reason
    assert answer.translator is None
    same_answer(answer, asked.ask(QUESTION, mode="direct", sources=[source]))
    asked.models._lms.pop("ref")  # its weights are not here, either
    assert asked.ask(QUESTION, sources=[source]).path == "fallback"


# -- kept translations ---------------------------------------------------------------------


def test_what_was_asked_about_before_is_not_translated_again(asked: CAG) -> None:
    first, again = asked.ask(QUESTION, k=2), asked.ask(QUESTION, k=2)
    assert first.tokens.kept == 0 and first.timings.load > 0
    assert again.tokens.kept == again.tokens.passage == first.tokens.passage > 0
    assert again.timings.load == again.timings.align == 0
    assert again.tokens.target_forward == first.tokens.target_forward
    same_answer(again, first)
    refreshed = asked.ask(QUESTION, k=2, refresh=0.5)
    assert refreshed.tokens.kept == refreshed.tokens.passage
    same_answer(asked.ask(QUESTION, k=2), first)


def test_what_is_asked_about_most_is_not_the_first_to_go(asked: CAG) -> None:
    (source,) = asked.retrieve(QUESTION, k=1)
    key = asked.store.key(source.passage.identity)
    asked.ask(QUESTION, sources=[source])
    before = asked.store._caches.get(key)
    assert asked.ask(QUESTION, sources=[source]).tokens.kept > 0
    after = asked.store._caches.get(key)
    assert after["used"] > before["used"] and {**after, "used": 0} == {**before, "used": 0}
    asked.store.delete(key)
    assert asked.ask(QUESTION, sources=[source]).tokens.kept > 0
    assert asked.store._caches.get(key) is None


def test_a_removed_document_leaves_no_translation_behind(asked: CAG) -> None:
    asked.ask(QUESTION)
    assert len(asked.translations)
    asked.remove(next(iter(asked.library.documents())))
    assert not len(asked.translations)
    asked.ask(QUESTION)
    asked.ingest_texts({"note": "The lighthouse keeper owns a green boat."})
    assert not len(asked.translations)


# -- fallback ------------------------------------------------------------------------------


def falls_back(engine: CAG, reason: str) -> None:
    answer = engine.ask(QUESTION)
    assert (answer.path, answer.translator) == ("fallback", None)
    assert reason in answer.reason and "\n" not in answer.reason
    same_answer(answer, engine.ask(QUESTION, mode="direct"))


def test_no_translator(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    falls_back(engine, "`cag train ref tgt")


@pytest.mark.parametrize("role", ["reference", "target"])
def test_a_translator_of_other_weights(engine: CAG, docs: Path, role: str) -> None:
    engine.ingest([docs])
    add_translator(engine, **{f"{role}_fingerprint": "0123456789abcdef"})
    falls_back(engine, f"trained for {role}")


@pytest.mark.parametrize(
    ("recovered", "retention", "why"),
    [(0.799, None, "recovered share on"), (-1.0, None, "-1.00"), (0.9, 0.5, "retention on")],
)
def test_a_translator_below_the_gate(
    engine: CAG, docs: Path, recovered: float, retention: float | None, why: str
) -> None:
    engine.ingest([docs])
    add_translator(engine, recovered=recovered, retention=retention)
    falls_back(engine, "CAG_MIN_RETENTION")
    assert why in engine.ask(QUESTION).reason


@pytest.mark.parametrize(("recovered", "retention"), [(0.8, None), (None, None), (0.9, 0.8)])
def test_a_translator_at_the_gate_or_unmeasured_is_used(
    engine: CAG, docs: Path, recovered: float | None, retention: float | None
) -> None:
    engine.ingest([docs])
    add_translator(engine, recovered=recovered, retention=retention)
    answer = engine.ask(QUESTION)
    assert (answer.path, answer.translator) == ("translated", "ref--tgt (ridge)")


@pytest.mark.parametrize("name", ["translator.json", "translator.safetensors"])
def test_a_broken_translator(engine: CAG, docs: Path, name: str) -> None:
    engine.ingest([docs])
    (add_translator(engine) / name).write_bytes(b"{}")
    falls_back(engine, "cannot read the translator")


def test_passages_of_two_reference_models(asked: CAG, docs: Path) -> None:
    """Only what the translator's reference has read can be translated."""
    other = tiny_lm("qwen2", 40)
    other.name = "other"
    asked.models.add(other)
    second = CAG(replace(asked.settings, reference="other"), models=asked.models)
    (docs / "new.txt").write_text("The mill has two wheels.")
    second.ingest([docs / "new.txt"])
    sources = [second.retrieve(words, k=1)[0] for words in ("nine bells", "mill wheels")]
    assert [s.passage.title for s in sources] == ["tower.txt", "new.txt"]
    answer = second.ask(QUESTION, sources=sources[::-1])
    assert answer.path == "fallback" and "trained for reference" in answer.reason
    second.store.close()


def test_a_translator_trained_meanwhile_is_found(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    assert engine.ask(QUESTION).path == "fallback"
    add_translator(engine)
    assert engine.ask(QUESTION).path == "translated"


# -- what cannot be answered ---------------------------------------------------------------


def one_line(error: pytest.ExceptionInfo[CagError]) -> bool:
    return len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("question", ["", " \n\t "])
def test_an_empty_question(asked: CAG, question: str) -> None:
    for refuse in (asked.ask, asked.stream, asked.compare, asked.retrieve):
        with pytest.raises(EmptyQuestion) as error:
            refuse(question)
        assert one_line(error)


def test_an_empty_store(engine: CAG) -> None:
    for refuse in (engine.ask, engine.stream, engine.compare, engine.retrieve):
        with pytest.raises(EmptyStore, match="cag ingest") as error:
            refuse(QUESTION)
        assert one_line(error)


@pytest.mark.parametrize("mode", ["translated", "direct", "own"])
def test_a_question_longer_than_the_window(asked: CAG, mode: str) -> None:
    before = cache_files(asked)
    with pytest.raises(ContextTooLong, match="reads at most 512"):
        asked.stream("bells " * 400, mode=mode)
    with pytest.raises(ContextTooLong, match="--k"):
        asked.ask(QUESTION, mode=mode, k=9)
    with pytest.raises(ContextTooLong):
        asked.ask(QUESTION, mode=mode, generation=Generation(max_tokens=400))
    assert cache_files(asked) == before
    assert asked.ask(QUESTION, mode=mode).path == mode


def test_the_window_may_be_filled_to_the_last_token(asked: CAG) -> None:
    tokens = asked.ask(QUESTION).tokens
    room = 512 - tokens.prefix - tokens.passage - tokens.suffix
    generation = Generation(max_tokens=room, stop=())
    asked.models.lm("tgt").model.generation_config.eos_token_id = None
    assert asked.ask(QUESTION, generation=generation).path == "translated"
    with pytest.raises(ContextTooLong, match="513 tokens"):
        asked.ask(QUESTION, generation=replace(generation, max_tokens=room + 1))


def test_an_unknown_mode(asked: CAG) -> None:
    with pytest.raises(CagError, match="translated, direct, own") as error:
        asked.ask(QUESTION, mode="guess")
    assert one_line(error)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gemma-3-270", UnknownModel), ("gemma-3-270m", MissingWeights), ("nope", UnknownModel)],
)
def test_an_unknown_target(asked: CAG, name: str, kind: type[CagError]) -> None:
    for refuse in (asked.ask, asked.compare):
        with pytest.raises(kind, match=name) as error:
            refuse(QUESTION, target=name)
        assert one_line(error)


def test_more_passages_than_there_are(asked: CAG) -> None:
    assert len(asked.retrieve(QUESTION, k=1000)) == len(asked.library)
    assert asked.retrieve(QUESTION, k=0) == []


# -- comparing, streaming, JSON ------------------------------------------------------------


def test_compare(asked: CAG) -> None:
    compared = asked.compare(QUESTION)
    one, other = compared.translated, compared.direct
    assert (one.path, other.path) == ("translated", "direct")
    assert one.sources == other.sources and len(one.sources) == 2
    assert 0 <= compared.token_f1 <= 1
    assert compared.first_token_kl > 0  # the translator is random
    same_answer(one, asked.ask(QUESTION))
    same_answer(other, asked.ask(QUESTION, mode="direct"))
    assert set(compared.to_json()) == {"translated", "direct", "token_f1", "first_token_kl"}


def test_a_fallback_compares_as_equal(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    compared = engine.compare(QUESTION)
    assert compared.translated.path == "fallback"
    assert (compared.token_f1, compared.first_token_kl) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("found", "wanted", "score"),
    [
        ("The Tower.", "tower", 1.0),
        ("", "the", 1.0),
        ("", "tower", 0.0),
        ("nine bells", "nine old bells ring", 2 / 3),
    ],
)
def test_token_f1(found: str, wanted: str, score: float) -> None:
    assert token_f1(found, wanted) == token_f1(wanted, found) == pytest.approx(score)


@pytest.mark.parametrize("mode", ["translated", "direct", "own"])
def test_streamed_pieces_join_to_the_answer(asked: CAG, mode: str) -> None:
    stream = asked.stream(QUESTION, mode=mode, generation=LONG)
    pieces = list(stream)
    assert len(pieces) > 1 and all(pieces)
    assert "".join(pieces) == stream.answer.answer
    same_answer(stream.answer, asked.ask(QUESTION, mode=mode, generation=LONG), 1e-5)


def scripted(monkeypatch: pytest.MonkeyPatch, *pieces: str) -> None:
    """Let the target say something in particular."""
    monkeypatch.setattr("cag.engine.decode", lambda *_: iter(pieces))


def test_space_before_an_answer_is_not_shown(asked: CAG, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, " ", "  nine", " bells")
    stream = asked.stream(QUESTION)
    assert list(stream) == ["nine", " bells"]
    assert stream.answer.answer == "nine bells"


def test_space_after_an_answer_is_not_shown(asked: CAG, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "nine", " bells", " ")
    stream = asked.stream(QUESTION)
    assert "".join(stream) == stream.answer.answer == "nine bells"


def test_a_stream_left_early_does_not_block_the_next_question(asked: CAG) -> None:
    stream = asked.stream(QUESTION)
    done = threading.Event()

    def ask() -> None:
        next(iter(stream))
        asked.ask(QUESTION)
        done.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    finished = done.wait(3)
    stream._pieces.close()  # type: ignore[attr-defined]
    thread.join(10)
    assert finished


def test_json_of_an_answer(asked: CAG) -> None:
    answer = asked.ask(QUESTION)
    found = answer.to_json()
    contract = {"answer", "path", "reference", "target", "translator", "sources", "timings_ms"}
    beyond = {"question", "reason", "finish", "tokens_per_second"}
    assert set(found) == contract | {"tokens"} | beyond
    assert (found["reference"], found["target"]) == ("ref", "tgt")
    assert set(found["timings_ms"]) == {
        "retrieve", "load", "align", "translate", "prefill", "first_token", "total",
    }  # fmt: skip
    assert set(found["tokens"]) == {
        "prefix", "passage", "suffix", "generated", "refreshed", "kept", "target_forward",
    }  # fmt: skip
    for row, source in zip(found["sources"], answer.sources, strict=True):
        assert set(row) == {"document", "title", "start", "end", "score", "passage_id"}
        text = Path(row["document"]).read_text()
        assert text[row["start"] : row["end"]] == source.passage.text


def test_parts_of_the_time_add_up_to_less_than_the_whole(asked: CAG) -> None:
    times = asked.ask(QUESTION).timings
    parts = (times.retrieve, times.load, times.align, times.translate, times.prefill)
    assert all(part > 0 for part in parts)
    assert sum(parts) <= times.first_token <= times.total
    direct = asked.ask(QUESTION, mode="direct").timings
    assert (direct.load, direct.align, direct.translate) == (0, 0, 0)


# -- models and threads --------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny model as a folder."""
    lm, folder = tiny_lm("qwen2", 20), tmp_path / "saved"
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return folder


def test_a_model_is_loaded_once_by_all_threads(asked: CAG, saved: Path) -> None:
    before = asked.models.loads
    with ThreadPoolExecutor(3) as threads:
        loaded = list(threads.map(asked.models.lm, [str(saved)] * 3))
    for mode in ("direct", "own", "translated"):
        asked.ask(QUESTION, target=str(saved), mode=mode)
    assert asked.models.loads == before + 1
    assert all(lm is loaded[0] for lm in loaded)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_a_user_error(home: Path, saved: Path, device: str) -> None:
    with pytest.raises(CagError, match=f"device '{device}' does not work here"):
        Models(Settings(home=home, device=device)).lm(str(saved))


def test_an_unknown_dtype_is_a_user_error(home: Path, saved: Path) -> None:
    models = Models(Settings(home=home, dtype="float99"))
    with pytest.raises(CagError):
        models.lm(str(saved))


@pytest.mark.parametrize("modes", [("translated", "translated"), ("own", "direct")])
def test_threads_answer_like_one_after_another(asked: CAG, modes: Sequence[str]) -> None:
    questions = [QUESTION, "What colour are the boats?", "Where does the railway go?"] * 2
    jobs = [(question, modes[i % 2]) for i, question in enumerate(questions)]

    def ask(job: tuple[str, str]) -> Answer:
        return asked.ask(job[0], mode=job[1])

    for job in jobs:
        ask(job)  # so that own caches are there
    wanted = [ask(job) for job in jobs]
    start = threading.Barrier(2)

    def together(half: Sequence[tuple[str, str]]) -> list[Answer]:
        start.wait()
        return [ask(job) for job in half]

    with ThreadPoolExecutor(2) as threads:
        found = list(itertools.chain(*threads.map(together, (jobs[:3], jobs[3:]))))
    for one, other in zip(found, wanted, strict=True):
        same_answer(one, other)
        assert (one.sources, one.tokens) == (other.sources, other.tokens)


# -- what is stored ------------------------------------------------------------------------


def test_a_removed_document_is_gone(asked: CAG, docs: Path) -> None:
    files = cache_files(asked)
    assert asked.remove(str(docs / "tower.txt")) == 4
    assert {s.passage.document for s in asked.retrieve(QUESTION, k=99)} == {
        str(docs / "harbour.md")
    }
    assert len(cache_files(asked)) == len(files) - 1  # its four passages were one text
    with pytest.raises(CagError, match="cag store list"):
        asked.remove(str(docs / "tower.txt"))


def test_documents_ingested_by_another_process_are_found(asked: CAG, docs: Path) -> None:
    asked.retrieve(QUESTION)
    other = make_engine(asked.settings.home)
    (docs / "mill.txt").write_text("The mill has two wheels.")
    other.ingest([docs])
    other.store.close()
    assert asked.retrieve("mill wheels", k=1)[0].passage.title == "mill.txt"
