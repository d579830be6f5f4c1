"""What every translator is: a module from reference latents and anchors to target KV."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cag.align import align
from cag.errors import TranslatorError
from cag.lm.anchor import lowest_layer, with_predecessors
from cag.lm.cache import KV
from cag.lm.loading import LM
from cag.lm.spec import KVSpec

FORMAT = 1
TRANSLATORS: dict[str, type[Translator]] = {}


@dataclass(frozen=True)
class TranslatorConfig:
    """Everything a translator must know to be rebuilt and to refuse foreign models.

    Attributes
    ----------
    kind
        Name in the registry.
    reference, target
        Names of the two models, for people.
    reference_fingerprint, target_fingerprint
        Of the weights it was trained for.
    reference_spec, target_spec
        Cache geometry of both.
    rank
        Size of the latent that one reference token is reduced to.
    key_rank, value_rank
        Rank of the maps to keys and to values.
    predecessors
        How many preceding tokens' target embeddings each token sees.
    experts, active, hidden
        Mixture: number of experts, how many run per token, their hidden size.
    key_norm
        The target normalises its keys, so their scale is known and restored.
    """

    kind: str
    reference: str
    target: str
    reference_fingerprint: str
    target_fingerprint: str
    reference_spec: dict[str, Any]
    target_spec: dict[str, Any]
    rank: int = 512
    key_rank: int = 768
    value_rank: int = 512
    predecessors: int = 3
    experts: int = 0
    active: int = 2
    hidden: int = 96
    key_norm: bool = False

    @property
    def source_size(self) -> int:
        """Numbers per reference token."""
        return KVSpec(**self.reference_spec).numbers_per_token

    @property
    def anchor_size(self) -> int:
        """Numbers of anchor per target token."""
        return (self.predecessors + 1) * self.target_spec["hidden_size"]

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """(L - 1, H, D): the lowest layer is exact and not translated."""
        spec = self.target_spec
        return spec["layers"] - 1, spec["kv_heads"], spec["head_size"]


@dataclass
class Report:
    """What training measured, kept inside the translator file.

    Attributes
    ----------
    retention
        Held-out answer quality as a share of native, or None if not calibrated.
    recovered
        Held-out share of the answer NLL between no context (0) and native (1).
    details
        Data, seed, curve, minutes: anything a reader should see.
    """

    retention: float | None = None
    recovered: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


class Translator(nn.Module):
    """Maps canonical KV of a reference to canonical KV of a target.

    A subclass sets `kind`, and implements `compress` (once per reference token) and
    `expand` (once per target token). Everything else is shared.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        TRANSLATORS[cls.kind] = cls

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.config = config
        self.report = Report()

    def compress(self, source: Tensor) -> Tensor:
        """Reference KV (S, source_size) -> latents (S, rank)."""
        raise NotImplementedError

    def expand(
        self, latents: Tensor, anchors: Tensor, starts: Sequence[int] = (0,)
    ) -> tuple[Tensor, Tensor]:
        """Aligned latents (T, rank) and anchors (T, anchor_size) -> keys, values (T, L-1, H, D).

        `starts` are the rows where a passage begins.
        """
        raise NotImplementedError

    def multiplications(self) -> int:
        """Multiply-accumulates per passage token."""
        raise NotImplementedError

    def translate(
        self,
        sources: Sequence[KV],
        alignments: Sequence[Sequence[int]],
        target: LM,
        passages: Sequence[Sequence[int]],
        preceding: Sequence[int],
    ) -> KV:
        """Canonical target KV of passages in a row, without running the target's layers.

        Parameters
        ----------
        sources
            Per passage the canonical reference KV of its reference tokens.
        alignments
            Per passage the index of the reference token for each target token.
        target
            The model that will read the result; gives the anchors.
        passages
            Per passage its target tokens, T in all.
        preceding
            Target tokens before the first passage.

        Returns
        -------
        KV
            Shape (L, H, T, D).
        """
        parameter = next(self.parameters())
        rows = []
        for source, alignment in zip(sources, alignments, strict=True):
            latents = self.compress(flatten(source).to(parameter.device, parameter.dtype))
            rows.append(latents[torch.tensor(alignment, device=latents.device)])
        ids = [token for passage in passages for token in passage]
        starts = list(accumulate((len(passage) for passage in passages[:-1]), initial=0))
        anchors = with_predecessors(target, ids, preceding, self.config.predecessors)
        anchors = anchors.to(parameter.device, parameter.dtype)
        keys, values = self.expand(torch.cat(rows), anchors, starts)
        return with_lowest_layer(keys, values, lowest_layer(target, ids, len(preceding)))

    def check_models(self, reference_fingerprint: str, target: LM) -> None:
        """Refuse models this translator was not trained for.

        Raises
        ------
        TranslatorError
            Naming both fingerprints.
        """
        for role, trained, met in (
            ("reference", self.config.reference_fingerprint, reference_fingerprint),
            ("target", self.config.target_fingerprint, target.fingerprint),
        ):
            if trained != met:
                name = getattr(self.config, role)
                raise TranslatorError(
                    f"this translator was trained for {role} '{name}' with fingerprint "
                    f"{trained[:8]}, not {met[:8]}; pull the same weights or run `cag train`"
                )

    def save(self, folder: Path) -> None:
        """Write ``translator.safetensors`` (bf16) and ``translator.json``, each atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            n: t.detach().cpu().bfloat16().contiguous() for n, t in self.state_dict().items()
        }
        description = {
            "format": FORMAT,
            "config": asdict(self.config),
            "report": asdict(self.report),
        }
        temporary = folder / "translator.safetensors.tmp"
        save_file(weights, temporary, metadata={"format": str(FORMAT)})
        temporary.replace(folder / "translator.safetensors")
        temporary = folder / "translator.json.tmp"
        temporary.write_text(json.dumps(description, indent=1) + "\n")
        temporary.replace(folder / "translator.json")


def load_translator(folder: Path, dtype: torch.dtype = torch.float32) -> Translator:
    """Read a translator, strictly.

    Raises
    ------
    TranslatorError
        If a file is missing, malformed, of another format, or lacks a tensor.
    """
    try:
        config, report = parse_description(read_description(folder), folder)
        with torch.device("meta"):
            translator = TRANSLATORS[config.kind](config)
        with safe_open(folder / "translator.safetensors", "pt") as weights:
            state = {name: weights.get_tensor(name).to(dtype) for name in weights.keys()}  # noqa: SIM118
        translator.load_state_dict(state, strict=True, assign=True)
        translator.report = report
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise TranslatorError(f"cannot read the translator in '{folder}': {reason}") from error
    return translator.eval().requires_grad_(False)


def read_description(folder: Path) -> dict[str, Any]:
    """The JSON side of a translator: ``config`` and ``report``.

    Raises
    ------
    TranslatorError
        If it is unreadable or of another format.
    """
    try:
        description = json.loads((folder / "translator.json").read_text())
        found = description["format"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise TranslatorError(f"cannot read the translator in '{folder}': {error}") from error
    if found != FORMAT:
        raise TranslatorError(
            f"'{folder}' has translator format {found}, this version reads {FORMAT}; "
            "train it again with `cag train`"
        )
    return description


def parse_description(description: dict[str, Any], folder: Path) -> tuple[TranslatorConfig, Report]:
    """Config and report of a description.

    Raises
    ------
    TranslatorError
        If something is missing or unknown in it.
    """
    try:
        config = TranslatorConfig(**description["config"])
        report = Report(**description["report"])
    except (KeyError, TypeError) as error:
        raise TranslatorError(
            f"cannot read the translator in '{folder}': its description lacks or misnames {error}"
        ) from error
    if config.kind not in TRANSLATORS:
        raise TranslatorError(
            f"the translator in '{folder}' is of the unknown kind '{config.kind}'; known are: "
            + ", ".join(TRANSLATORS)
        )
    return config, report


def flatten(kv: KV) -> Tensor:
    """KV -> one row per token, shape (T, 2 * L * H * D)."""
    both = torch.stack([kv.keys, kv.values], dim=1)  # (L, 2, H, T, D)
    return both.permute(3, 0, 1, 2, 4).reshape(len(kv), -1)


def with_lowest_layer(keys: Tensor, values: Tensor, lowest: KV) -> KV:
    """Put translated (T, L-1, H, D) keys and values on top of the exact lowest layer."""
    keys, values = (x.permute(1, 2, 0, 3).to(lowest.keys.dtype) for x in (keys, values))
    return KV(torch.cat([lowest.keys, keys]), torch.cat([lowest.values, values]))


def align_texts(
    reference_spans: Sequence[tuple[int, int]], target: LM, text: str
) -> tuple[list[int], list[int]]:
    """Tokenise `text` for the target and align it: (target ids, reference index per id)."""
    ids, spans = target.encode_with_offsets(text)
    return ids, align(reference_spans, spans)
