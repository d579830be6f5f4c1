"""What every translator is: a module from reference latents and anchors to target KV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
from cag.lm.spec import hash_weights
from cag.translate.config import Report, TranslatorConfig
from cag.translate.moments import Moments

FORMAT = 1
TRANSLATORS: dict[str, type[Translator]] = {}


@dataclass(frozen=True)
class Batch:
    """Passages to fit on, one after the other.

    Attributes
    ----------
    source
        Flat reference KV of the aligned token of each target token, with shape (T, S).
    anchors
        Shape (T, anchor_size).
    outputs
        The target's own keys, then values, above the lowest layer: (T, 2 * outputs).
    starts
        Rows where a passage begins.
    """

    source: Tensor
    anchors: Tensor
    outputs: Tensor
    starts: Sequence[int]


#: Gives the training passages, at most so many of them; can be called again.
Batches = Callable[[int | None], Iterator[Batch]]


class Translator(nn.Module):
    """Maps canonical KV of a reference to canonical KV of a target.

    A subclass sets `kind`, and implements `compress` (once per reference token), `predict`
    (once per target token), `fit` and `multiplications`. Everything else is shared.

    Attributes
    ----------
    closed_form
        Names of parameters that `fit` sets; descent moves them gently.
    frozen
        Names of parameters that descent leaves alone.
    output_mean, output_scale
        Standardise keys and values; shape (2, outputs).
    norm_weight
        What the target multiplies unit keys with, shape (L-1, D), where it does.
    """

    kind: ClassVar[str]
    closed_form: ClassVar[tuple[str, ...]] = ()
    frozen: ClassVar[tuple[str, ...]] = ()
    output_mean: Tensor
    output_scale: Tensor
    norm_weight: Tensor

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        TRANSLATORS[cls.kind] = cls

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.config = config
        self.report = Report()
        layers, _, size = config.output_shape
        self.register_buffer("output_mean", torch.zeros(2, config.outputs))
        self.register_buffer("output_scale", torch.ones(2, config.outputs))
        if config.key_norm:
            self.register_buffer("norm_weight", torch.ones(layers, size))

    def compress(self, source: Tensor) -> Tensor:
        """Flat reference KV (S, numbers per token) -> latents (S, any)."""
        raise NotImplementedError

    def predict(self, latents: Tensor, anchors: Tensor, starts: Sequence[int] = (0,)) -> Tensor:
        """Aligned latents (T, any) and anchors (T, anchor_size) -> standardised KV (T, 2, outputs).

        `starts` are the rows where a passage begins.
        """
        raise NotImplementedError

    def fit(self, batches: Batches, first: int) -> None:
        """Set everything that has a closed form.

        Parameters
        ----------
        batches
            The training passages.
        first
            How many of them are enough for the widest regression.
        """
        raise NotImplementedError

    def multiplications(self) -> int:
        """Multiply-accumulates per passage token."""
        raise NotImplementedError

    def expand(
        self, latents: Tensor, anchors: Tensor, starts: Sequence[int] = (0,)
    ) -> tuple[Tensor, Tensor]:
        """Like `predict`, as keys and values with shape (T, L-1, H, D) each."""
        return self.finish(self.predict(latents, anchors, starts))

    def finish(self, standardised: Tensor) -> tuple[Tensor, Tensor]:
        """Undo the standardisation and restore the key norm: (T, L-1, H, D) each."""
        both = torch.addcmul(self.output_mean, standardised, self.output_scale)
        both = both.unflatten(-1, self.config.output_shape)
        keys, values = both.unbind(1)
        return (self._renormalise(keys) if self.config.key_norm else keys), values

    def _renormalise(self, keys: Tensor) -> Tensor:
        """Give keys the scale that the target's QK-norm would: its weight times unit RMS."""
        live = self.norm_weight.abs() > 1e-2  # some of Gemma's norm weights are exactly zero
        inverse = torch.where(live, 1 / torch.where(live, self.norm_weight, 1.0), 0.0)
        unit = keys.float() * inverse[:, None]  # (T, L-1, H, D)
        count = live.sum(-1).clamp_min(1)[:, None, None]
        mean_square = torch.linalg.vector_norm(unit, dim=-1, keepdim=True).square() / count
        factor = torch.rsqrt(mean_square + 1e-6) * live[:, None]
        return (keys.float() * factor).to(keys.dtype)

    def scale_outputs(self, moments: Moments) -> Tensor:
        """One scale per layer and kind, so that large channels keep their weight; (2, outputs)."""
        deviation = moments.output_statistics()[1].view(2, self.config.output_shape[0], -1)
        return deviation.mean(-1, keepdim=True).expand_as(deviation).reshape(2, -1)

    def standardise(self, moments: Moments) -> Tensor:
        """Take `output_mean` and `output_scale` from moments; returns the scale."""
        scale = self.scale_outputs(moments)
        self.output_mean.copy_(moments.output_statistics()[0].view(2, -1))
        self.output_scale.copy_(scale)
        return scale

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

    @property
    def fingerprint(self) -> str:
        """Of its weights, as a model's is."""
        return hash_weights(self.state_dict())

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
        temporary = folder / "translator.safetensors.tmp"
        save_file(weights, temporary, metadata={"format": str(FORMAT)})
        temporary.replace(folder / "translator.safetensors")
        save_description(self, folder)


def save_description(translator: Translator, folder: Path) -> None:
    """Write ``translator.json``: config and report."""
    description = {
        "format": FORMAT,
        "config": asdict(translator.config),
        "report": asdict(translator.report),
    }
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
