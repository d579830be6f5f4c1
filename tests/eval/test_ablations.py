"""Ablations change one thing, share what they can, and go on where they were."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TEXT, tiny_lm

from cag.lm.cache import KV
from cag.lm.prompt import Template
from cag.translate.config import spread
from cag.translate.examples import Example
from cag.translate.recipe import Recipe
from cag.translate.training import Trainer
from eval import ablations
from eval.ablations import (
    RANKS,
    native_below,
    native_keys,
    native_values,
    run_ablations,
    table,
)

RECIPE = Recipe(
    rank=8, key_rank=12, value_rank=8, predecessors=3, experts=4, active=2, hidden=8,
    projection_passages=10, minutes=0.004, batch=2,
)  # fmt: skip
SHORT = Template(prefix="Read this.\nContext:", suffix="\nQ: {question}\nA:")


def made_up(count: int, seed: int) -> list[Example]:
    chooser = random.Random(seed)
    words = [word.strip(".,") for word in TEXT.split()]
    said = [chooser.choices(words, k=12) for _ in range(count)]
    return [Example(f"{' '.join(s)}.", ((f"Where is {s[0]}?", s[3]),)) for s in said]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], Any]:
    """Every variant on tiny models."""
    folder = tmp_path_factory.mktemp("ablations")
    reference, target = tiny_lm("llama", 60), tiny_lm("gemma3_text", 20, seed=1)
    examples, held_out = made_up(12, 0), made_up(4, 1)

    def make(recipe: Recipe, work: Path) -> Trainer:
        trainer = Trainer(reference, target, folder, examples, held_out, recipe, SHORT, work=work)
        trainer.half = False
        return trainer

    return folder, run_ablations(make, RECIPE, folder), make


def named(rows: list[dict[str, Any]], group: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows if row["group"] == group}


def test_every_variant_is_measured(done: tuple[Path, list[dict[str, Any]], Any]) -> None:
    _, rows, _ = done
    groups = {row["group"] for row in rows}
    assert groups == {
        "closed form", "anchor", "reference layers", "rank", "keys and values", "experts",
        "routing", "correction",
    }  # fmt: skip
    assert all(row["passages"] == 4 and abs(row["recovered"]) < 1e3 for row in rows)
    ranks = [named(rows, "rank")[r]["parameters"] for r in RANKS]
    assert ranks == sorted(ranks) and ranks[0] < ranks[-1]
    layers = named(rows, "reference layers")
    assert layers["1"]["multiplications"] < layers["3"]["multiplications"]
    anchors = [row["multiplications"] for row in named(rows, "anchor").values()][:5]
    assert anchors == sorted(set(anchors))


def test_rows_of_the_same_recipe_agree(done: tuple[Path, list[dict[str, Any]], Any]) -> None:
    _, rows, _ = done
    closed = named(rows, "closed form")["default"]["nll"]
    assert closed == named(rows, "keys and values")["both translated"]["nll"]
    assert closed == pytest.approx(named(rows, "anchor")["and 3 before"]["nll"])
    # a descent keeps what did best on these passages, so it is never worse than its start
    for row in named(rows, "correction").values():
        assert row["nll"] <= closed + 1e-4, row["name"]


def test_a_second_run_measures_nothing_again(
    done: tuple[Path, list[dict[str, Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rows, make = done
    lines = (folder / "ablations.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    monkeypatch.setattr(ablations._Pool, "measure", None)  # calling it would fail
    assert run_ablations(make, RECIPE, folder) == rows
    assert run_ablations(make, RECIPE, folder, only=["rank"]) == [
        row for row in rows if row["group"] == "rank"
    ]


def test_the_table_holds_every_row(done: tuple[Path, list[dict[str, Any]], Any]) -> None:
    _, rows, _ = done
    text = table(rows, 12, 0.004)
    assert all(
        f"| {row['group']} | {row['name']} | {row['recovered']:.3f} |" in text for row in rows
    )


def test_edits_put_native_kv_back() -> None:
    translated, native = (KV(torch.full((4, 1, 2, 3), x), torch.full((4, 1, 2, 3), x + 1))
                          for x in (0.0, 5.0))  # fmt: skip
    assert native_keys(translated, native).keys is native.keys
    assert native_keys(translated, native).values is translated.values
    assert native_values(translated, native).values is native.values
    below = native_below(3)(translated, native)
    assert torch.equal(below.keys[:3], native.keys[:3])
    assert torch.equal(below.values[3:], translated.values[3:])


@pytest.mark.parametrize("count", [1, 3, 7])
def test_reference_layers_are_spread_up_to_the_top(count: int) -> None:
    chosen = spread(30, count)
    assert len(chosen) == count and chosen[-1] == 29
    gaps = [b - a for a, b in pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1
