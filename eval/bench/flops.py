"""What a translation costs against what it saves, pair by pair, from configs alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from cag.errors import MissingWeights
from cag.lm.known import KNOWN
from cag.lm.pull import resolve
from cag.lm.quiet import quiet_transformers
from cag.settings import Settings
from eval.flops import (
    RECIPE,
    head,
    llama_3_1_8b,
    lowest_layer,
    per_token,
    query,
    qwen2_5_7b,
    translation,
)

#: Four times the default's ranks and hidden size: what the larger models could afford.
WIDE = {**RECIPE, **{n: 4 * RECIPE[n] for n in ("rank", "key_rank", "value_rank", "hidden")}}

PASSAGE, PROMPT = 1000, 100


def run_flops(settings: Settings) -> dict[str, Any]:
    """Cost of every ordered pair of pulled models, and of a pair of the 7B class.

    Returns
    -------
    dict
        ``pairs``: MACs per passage token and FLOPs of a query of `PASSAGE` and `PROMPT`
        tokens; ``skipped``: known models whose configs are not here.
    """
    configs, skipped = _pulled(settings.home)
    pairs = [
        _pair(reference, target, configs[reference], configs[target], "default", RECIPE)
        for reference, target in itertools.permutations(configs, 2)
    ]
    large = llama_3_1_8b(), qwen2_5_7b()
    for name, recipe in (("default", RECIPE), ("wide", WIDE)):
        pairs.append(_pair("llama-3.1-8b", "qwen2.5-7b", *large, name, recipe))
    return {
        "passage_tokens": PASSAGE,
        "prompt_tokens": PROMPT,
        "recipes": {"default": RECIPE, "wide": WIDE},
        "pairs": pairs,
        "skipped": skipped,
    }


def _pulled(home: Path) -> tuple[dict[str, Any], list[str]]:
    """Configs of the known language models that are here, and names of those that are not."""
    configs: dict[str, Any] = {}
    skipped = []
    for name in (model.name for model in KNOWN.values() if model.kind == "llm"):
        try:
            folder = resolve(name, home)
        except MissingWeights:
            skipped.append(name)
            continue
        with quiet_transformers():
            configs[name] = AutoConfig.from_pretrained(folder, local_files_only=True)
    return configs, skipped


def _pair(
    reference: str, target: str, source: Any, sink: Any, name: str, recipe: dict[str, Any]
) -> dict[str, Any]:
    own, translated, lowest = (
        per_token(sink),
        translation(source, sink, **recipe),
        lowest_layer(sink),
    )
    flops = query(source, sink, PASSAGE, PROMPT, **recipe)
    return {
        "reference": reference,
        "target": target,
        "recipe": name,
        "target_macs_per_token": own,
        "target_head_macs": head(sink),
        "translator_macs_per_token": translated,
        "lowest_layer_macs_per_token": lowest,
        "share": translated / own,
        "share_with_lowest_layer": (translated + lowest) / own,
        "query_flops": flops,
        "query_ratio": flops["direct"] / flops["translated"],
    }


def flops_table(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of text."""
    width = max(len(f"{p['reference']} -> {p['target']}") for p in result["pairs"])
    yield (
        f"{'pair':{width}} {'recipe':8} {'target':>9} {'translator':>10} {'share':>6} "
        f"{'direct':>10} {'translated':>10} {'ratio':>6}"
    )
    for pair in result["pairs"]:
        flops = pair["query_flops"]
        yield (
            f"{pair['reference'] + ' -> ' + pair['target']:{width}} {pair['recipe']:8} "
            f"{pair['target_macs_per_token'] / 1e6:7.1f} M "
            f"{pair['translator_macs_per_token'] / 1e6:8.1f} M {pair['share']:6.1%} "
            f"{flops['direct'] / 1e9:8.1f} G {flops['translated'] / 1e9:8.1f} G "
            f"{pair['query_ratio']:6.2f}"
        )
    yield (
        "target, translator: MACs per passage token; direct, translated: FLOPs of "
        f"{result['passage_tokens']} passage and {result['prompt_tokens']} prompt tokens"
    )
    for name in result["skipped"]:
        yield f"{name}: skipped, not pulled"
