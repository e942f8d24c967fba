"""The options that describe a training job: model config, device, sequence, parallel sizes, precision."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeAlias

import typer

from penstock.cost.estimate.devices import Device, device, devices
from penstock.cost.estimate.model_config import ModelConfig, known_models, read_config
from penstock.errors import FormatError


class Precision(str, Enum):
    """Of matrix products."""

    bf16 = "bf16"
    fp8 = "fp8"
    fp32 = "fp32"


class Recomputation(str, Enum):
    """What each layer recomputes in the backward."""

    none = "none"
    selective = "selective"
    pointwise = "pointwise"
    latent = "latent"
    full = "full"


class AttentionKernel(str, Enum):
    """How attention is computed."""

    flash = "flash"
    unfused = "unfused"


class Kernels(str, Enum):
    """How norms and gates are computed."""

    fused = "fused"
    eager = "eager"


def _complete_device(prefix: str) -> list[str]:
    return [name for name in devices() if name.startswith(prefix)]


def config_from(source: str) -> ModelConfig:
    """Read a model config; what is wrong with it is a usage error."""
    try:
        return read_config(source)
    except FormatError as error:
        raise typer.BadParameter(str(error)) from None


def device_from(source: str) -> Device:
    """Read a device; what is wrong with its file is a usage error."""
    try:
        return device(source)
    except FormatError as error:
        raise typer.BadParameter(str(error)) from None


def complete_model(prefix: str) -> list[str]:
    """The names of well-known models that begin so."""
    return [name for name in known_models() if name.startswith(prefix)]


ConfigFile: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help=f"A model's config.json as Hugging Face writes it, or a name: {', '.join(known_models())}.",
        autocompletion=complete_model,
    ),
]
DeviceOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME|FILE",
        help=f"Device: {', '.join(devices())}, or a .toml file with the same keys.",
        autocompletion=_complete_device,
    ),
]
SequenceLength: TypeAlias = Annotated[int, typer.Option("--seq", metavar="TOKENS", help="Tokens of a sample.")]
MicrobatchSize: TypeAlias = Annotated[
    int, typer.Option("--microbatch-size", metavar="SAMPLES", help="Samples of a microbatch.")
]
TensorParallel: TypeAlias = Annotated[int, typer.Option("--tp", help="Tensor parallel ranks.")]
ContextParallel: TypeAlias = Annotated[int, typer.Option("--cp", help="Context parallel ranks.")]
ExpertParallel: TypeAlias = Annotated[
    int, typer.Option("--ep", help="Expert parallel ranks, out of the tensor, context and data parallel ones.")
]
DataParallel: TypeAlias = Annotated[int, typer.Option("--dp", help="Data parallel ranks.")]
SequenceParallel: TypeAlias = Annotated[
    bool, typer.Option("--sp/--no-sp", help="Sequence parallelism between tensor parallel ranks.")
]
PrecisionOption: TypeAlias = Annotated[Precision, typer.Option("--precision", help="Of matrix products.")]
GradientBytes: TypeAlias = Annotated[
    int, typer.Option("--gradient-bytes", help="Bytes of each weight's gradient: 4 or 2.")
]
ZeroStage: TypeAlias = Annotated[
    int,
    typer.Option(
        "--zero",
        help="What data parallel ranks shard: 1 optimizer state, 2 gradients too, 3 weights too (FSDP).",
    ),
]
RecomputeOption: TypeAlias = Annotated[
    Recomputation, typer.Option("--recompute", help="What each layer recomputes in the backward.")
]
AttentionOption: TypeAlias = Annotated[
    AttentionKernel, typer.Option("--attention", help="flash, or unfused, which saves the probabilities.")
]
KernelsOption: TypeAlias = Annotated[
    Kernels, typer.Option("--kernels", help="fused, or eager, which saves more tensors.")
]
