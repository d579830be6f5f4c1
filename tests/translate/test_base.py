"""A translator comes back from disk as it was, or is refused; translating runs no layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, TEXT, flops_per_token, random_pair, random_translator, tiny_lm
from safetensors.torch import load_file, save_file
from test_ridge import toy_config
from torch import Tensor

from cag.errors import TranslatorError
from cag.lm.cache import KV, Context
from cag.lm.counting import count_layer_tokens
from cag.lm.loading import LM
from cag.lm.prefill import prefill
from cag.translate.base import (
    TRANSLATORS,
    Translator,
    align_texts,
    flatten,
    load_translator,
)
from cag.translate.training import _key_norm_weights

REFERENCE, TARGET = random_pair()
KINDS = list(TRANSLATORS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_translator().save(tmp_path / "saved")
    return tmp_path / "saved"


def translated(translator: Translator, target: LM, text: str, prefix: list[int]) -> KV:
    ids, spans = REFERENCE.encode_with_offsets(text)
    (source,) = prefill(REFERENCE, [], [ids])
    ids, alignment = align_texts(spans, target, text)
    return translator.translate([source], [alignment], target, [ids], prefix)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gemma3_text", "gpt2"])
def test_passages_together_are_what_they_are_one_by_one(family: str, kind: str) -> None:
    target = tiny_lm(family, 20, seed=1)
    translator = random_translator(kind, target)
    texts = [" The harbour is old.", " Boats are blue.", " Nine bells ring at noon."]
    before = target.encode("Context:")
    sources, alignments, passages, alone = [], [], [], []
    for text in texts:
        ids, spans = REFERENCE.encode_with_offsets(text)
        sources += prefill(REFERENCE, [], [ids])
        ids, alignment = align_texts(spans, target, text)
        alignments.append(alignment)
        past = [*before, *(token for passage in passages for token in passage)]
        alone.append(translated(translator, target, text, past))
        passages.append(ids)
    together = translator.translate(sources, alignments, target, passages, before)
    expected = KV.join(alone)
    torch.testing.assert_close(together.keys, expected.keys, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(together.values, expected.values, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_comes_back_rounded_to_bf16(kind: str, tmp_path: Path) -> None:
    layers = None if kind == "single_projection" else [0, 2]
    saved = random_translator(kind, reference_layers=layers, routing="uniform")
    saved.report.recovered, saved.report.details = 0.5, {"seed": 3}
    saved.save(tmp_path / "new" / "folder")
    loaded = load_translator(tmp_path / "new" / "folder")
    assert type(loaded) is type(saved)
    assert (loaded.config, loaded.report) == (saved.config, saved.report)
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    expected = {n: t.bfloat16().float() for n, t in saved.state_dict().items()}
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_second_save_loses_nothing_and_leaves_no_other_file(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    load_translator(folder, torch.bfloat16).save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert before.keys() == {"translator.json", "translator.safetensors"}


def edit_weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "translator.safetensors")
        change(tensors)
        save_file(tensors, folder / "translator.safetensors")

    return damage


def edit_description(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "translator.json"
        description = json.loads(path.read_text())
        change(description)
        path.write_text(json.dumps(description))

    return damage


def cut(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing tensor": edit_weights(lambda t: t.pop("down")),
    "extra tensor": edit_weights(lambda t: t.update(more=torch.zeros(1))),
    "wrong shape": edit_weights(lambda t: t.update(down=torch.zeros(2, 2))),
    "truncated weights": cut("translator.safetensors"),
    "empty weights": lambda f: (f / "translator.safetensors").write_bytes(b""),
    "no weights": lambda f: (f / "translator.safetensors").unlink(),
    "truncated description": cut("translator.json"),
    "no description": lambda f: (f / "translator.json").unlink(),
    "not text": lambda f: (f / "translator.json").write_bytes(b"\xff\xfe\x00"),
    "a list": lambda f: (f / "translator.json").write_text("[]"),
    "no config": edit_description(lambda d: d.pop("config")),
    "no report": edit_description(lambda d: d.pop("report")),
    "unknown setting": edit_description(lambda d: d["config"].update(colour="red")),
    "unknown kind": edit_description(lambda d: d["config"].update(kind="oracle")),
    "foreign geometry": edit_description(lambda d: d["config"].update(target_spec={})),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_translator_is_refused_in_one_line(
    damage: Callable[[Path], None], folder: Path
) -> None:
    damage(folder)
    with pytest.raises(TranslatorError) as caught:
        load_translator(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_format_says_which_and_what_to_do(folder: Path) -> None:
    edit_description(lambda d: d.update(format=99))(folder)
    with pytest.raises(TranslatorError, match=r"format 99, this version reads 1; .*cag train"):
        load_translator(folder)


def test_foreign_models_are_refused_by_both_fingerprints() -> None:
    translator = random_translator()
    translator.check_models(REFERENCE.fingerprint, TARGET)
    other = tiny_lm("gemma3_text", 20, seed=2)
    for reference, target, trained, met in (
        (other.fingerprint, TARGET, REFERENCE, other),
        (REFERENCE.fingerprint, other, TARGET, other),
    ):
        with pytest.raises(TranslatorError) as caught:
            translator.check_models(reference, target)
        message = str(caught.value)
        assert trained.name in message and "\n" not in message
        assert trained.fingerprint[:8] in message and met.fingerprint[:8] in message


@pytest.mark.parametrize("family", FAMILIES)
def test_translating_runs_no_layer_and_its_lowest_layer_is_exact(family: str) -> None:
    target = tiny_lm(family, 20, seed=1)
    prefix = target.encode("Context:")
    with count_layer_tokens(target) as counted, torch.inference_mode():
        kv = translated(random_translator(target=target), target, TEXT, prefix)
    assert counted.tokens == 0
    ids, spec = target.encode(TEXT), target.spec
    assert kv.keys.shape == (spec.layers, spec.kv_heads, len(ids), spec.head_size)
    assert kv.values.shape == kv.keys.shape
    context = Context(target)
    with torch.inference_mode():
        context.run(torch.tensor([prefix + ids]), logits=None)
    native = context.canonical(len(prefix), context.length)
    torch.testing.assert_close(kv.keys[0], native.keys[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kv.values[0], native.values[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_translated_without_looking_ahead(kind: str) -> None:
    translator = random_translator(kind)
    whole = translated(translator, TARGET, TEXT, [])
    begun = translated(translator, TARGET, TEXT[:50], [])
    shared = len(TARGET.encode(TEXT[:46]))
    torch.testing.assert_close(begun[:shared].keys, whole[:shared].keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(begun[:shared].values, whole[:shared].values, atol=1e-4, rtol=1e-4)


def test_a_bf16_translator_gives_kv_in_the_targets_dtype(folder: Path) -> None:
    kv = translated(load_translator(folder, torch.bfloat16), TARGET, TEXT, [])
    assert kv.keys.dtype == kv.values.dtype == TARGET.dtype == torch.float32


def test_flatten_gives_one_row_per_token() -> None:
    keys = torch.randn(3, 2, 7, 4)
    kv = KV(keys, -keys)
    rows = flatten(kv)
    assert torch.equal(rows[2:5], flatten(kv[2:5]))
    assert torch.equal(rows.view(7, 3, 2, 2, 4)[:, :, 0], keys.permute(2, 0, 1, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_multiplications_are_those_that_run(kind: str) -> None:
    translator = TRANSLATORS[kind](toy_config(kind, experts=4, hidden=6, key_norm=True))
    assert flops_per_token(translator) == 2 * translator.multiplications() > 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "single_projection"])
def test_reference_layers_that_are_not_chosen_may_hold_anything(kind: str) -> None:
    translator = random_translator(kind, reference_layers=[1, 3])
    ids, spans = REFERENCE.encode_with_offsets(TEXT[:80])
    (source,) = prefill(REFERENCE, [], [ids])
    ids, alignment = align_texts(spans, TARGET, TEXT[:80])

    def without(layer: int) -> KV:
        keys, values = source.keys.clone(), source.values.clone()
        keys[layer], values[layer] = 0.0, 0.0
        return translator.translate([KV(keys, values)], [alignment], TARGET, [ids], [])

    whole = translator.translate([source], [alignment], TARGET, [ids], [])
    same = [torch.equal(without(layer).keys, whole.keys) for layer in range(4)]
    assert same == [True, False, True, False]
    assert translator.config.source_size == REFERENCE.spec.numbers_per_token // 2


@pytest.mark.parametrize("kind", ["ridge", "mixture"])
def test_predecessors_below_zero_hide_the_tokens_themselves(kind: str) -> None:
    """Two passages of equal reference KV differ in their lowest layer only."""
    ids = TARGET.encode(TEXT[:60])
    kv = KV(torch.randn(4, 2, 9, 8), torch.randn(4, 2, 9, 8))
    alignment = [min(i, 8) for i in range(len(ids))]
    for predecessors, seen in ((-1, False), (0, True)):
        translator = random_translator(kind, predecessors=predecessors)
        one, other = (
            translator.translate([kv], [alignment], TARGET, [read], []) for read in (ids, ids[::-1])
        )
        assert not torch.equal(one.keys[0], other.keys[0])
        assert torch.equal(one.keys[1:], other.keys[1:]) is not seen
        assert torch.equal(one.values[1:], other.values[1:]) is not seen


# -- the key norm ----------------------------------------------------------------------------


def renormalised(translator: Translator, keys: Tensor) -> Tensor:
    """What `finish` makes of keys (T, L-1, H, D) if nothing is standardised."""
    flat = keys.flatten(1)
    found, values = translator.finish(torch.stack([flat, flat], dim=1))
    assert torch.equal(values, keys)
    return found


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_keys_get_the_scale_of_the_norm_weight(size: float) -> None:
    torch.manual_seed(0)
    translator = TRANSLATORS["ridge"](toy_config(key_norm=True))
    weight = torch.tensor([[0.5, -2.0, 0.0, 30.0], [1.0, 1.0, 1.0, 1.0]])
    translator.norm_weight.copy_(weight)
    raw = size * torch.randn(9, 2, 2, 4)
    keys = renormalised(translator, raw)
    live = weight != 0
    assert not keys[:, 0, :, 2].any()  # a zero weight makes a zero
    assert torch.equal(keys.sign(), raw.sign() * live[:, None])
    for layer in range(2):
        unit = keys[:, layer, :, live[layer]] / weight[layer, live[layer]]
        rms = unit.square().mean(-1).sqrt()
        torch.testing.assert_close(rms, torch.ones_like(rms), atol=1e-4, rtol=0)
    torch.testing.assert_close(renormalised(translator, keys), keys, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_native_keys_already_have_their_norm(family: str) -> None:
    lm = tiny_lm(family)
    for layer in lm.body.layers:
        layer.self_attn.k_norm.weight.normal_(1.0, 0.3)
    config = replace(toy_config(key_norm=True), target_spec=lm.spec.to_json())
    translator = TRANSLATORS["ridge"](config)
    translator.norm_weight.copy_(_key_norm_weights(lm))
    (native,) = prefill(lm, [], [lm.encode(TEXT)[:40]])
    keys = native.keys[1:].permute(2, 0, 1, 3)
    torch.testing.assert_close(renormalised(translator, keys), keys, atol=1e-3, rtol=1e-3)


def test_settings_that_a_kind_cannot_follow_are_refused() -> None:
    with pytest.raises(TranslatorError, match="needs all of them"):
        random_translator("single_projection", reference_layers=[1])
    with pytest.raises(TranslatorError, match="unknown routing 'best'; use one of: learned"):
        random_translator("mixture", routing="best")
