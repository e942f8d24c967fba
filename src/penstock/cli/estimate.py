"""`penstock estimate`: costs of a model's layers and stages from its config, without measuring."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.cli.estimate_options import (
    AttentionKernel,
    AttentionOption,
    ConfigFile,
    ContextParallel,
    DataParallel,
    DeviceOption,
    ExpertParallel,
    GradientBytes,
    Kernels,
    KernelsOption,
    MicrobatchSize,
    Precision,
    PrecisionOption,
    Recomputation,
    RecomputeOption,
    SequenceLength,
    SequenceParallel,
    TensorParallel,
    ZeroStage,
    config_from,
    device_from,
)
from penstock.cli.estimate_report import Stages, print_estimate, record_of
from penstock.cli.inputs import costs_from
from penstock.cli.options import AsJson
from penstock.cli.rendering import require_suffix, say_written
from penstock.cost.costs import Costs
from penstock.cost.estimate import Estimate, Setting
from penstock.cost.estimate import estimate as make_estimate
from penstock.ir.placement import Placement
from penstock.planning.estimated import (
    balanced_layers,
    even_blocks,
    fitted_device,
    stage_costs,
    with_measured_links,
)

__all__ = ["estimate"]


class Partition(str, Enum):
    """How layers become stages."""

    even = "even"
    balanced = "balanced"


PipelineRanks: TypeAlias = Annotated[
    int, typer.Option("--ranks", "-p", min=1, help="Number of pipeline ranks.")
]
StagesPerRank: TypeAlias = Annotated[
    int, typer.Option("--stages-per-rank", "-v", min=1, help="Number of stages per rank.")
]
PartitionOption: TypeAlias = Annotated[
    Partition,
    typer.Option("--partition", help="Blocks evenly over the stages, or all layers balanced by their seconds."),
]
CostsFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write the costs of the stages: .toml or .json."),
]
Profile: TypeAlias = Annotated[
    str | None,
    typer.Option("--fit", metavar="FILE", help="Fit the seconds to costs measured with the same stages."),
]
Explained: TypeAlias = Annotated[
    bool, typer.Option("--explain", help="Show every operation, collective and saved tensor.")
]


def estimate(
    config: ConfigFile,
    *,
    device_name: DeviceOption = "h100",
    sequence: SequenceLength = 4096,
    microbatch_size: MicrobatchSize = 1,
    tensor: TensorParallel = 1,
    context: ContextParallel = 1,
    expert: ExpertParallel = 1,
    data: DataParallel = 1,
    ranks: PipelineRanks = 1,
    stages_per_rank: StagesPerRank = 1,
    partition: PartitionOption = Partition.even,
    sequence_parallel: SequenceParallel = True,
    precision: PrecisionOption = Precision.bf16,
    gradient_bytes: GradientBytes = 4,
    zero: ZeroStage = 1,
    recompute: RecomputeOption = Recomputation.none,
    attention: AttentionOption = AttentionKernel.flash,
    kernels: KernelsOption = Kernels.fused,
    fit: Profile = None,
    output: CostsFile = None,
    explained: Explained = False,
    as_json: AsJson = False,
) -> None:
    """
    Examples:
      penstock estimate config.json --device h100 --seq 8192
      penstock estimate config.json --seq 8192 --tp 8 --dp 4 --ranks 4 -o costs.toml
      penstock estimate config.json --seq 8192 --recompute full --explain
      penstock estimate config.json --device cpu --precision fp32 --seq 128 --json
    """
    if output is not None:
        require_suffix(output, (".toml", ".json"))
    setting = Setting(
        *(sequence, microbatch_size, tensor, context, expert, data, sequence_parallel),
        *(precision.value, gradient_bytes, zero, recompute.value, attention.value, kernels.value),
    )
    found = make_estimate(config_from(config), setting, device_from(device_name))
    placement = Placement.loop(ranks, stages_per_rank)
    counts = even_blocks(found, placement.num_stages)
    if partition is Partition.balanced:
        counts = balanced_layers(found, placement)
    found, costs = _fitted(found, placement, counts, fit)
    stages = Stages(placement, counts, costs)
    if output is not None:
        costs.write(output)
    if as_json:
        typer.echo(json.dumps(record_of(found, stages), indent=2))
    else:
        print_estimate(found, stages, explained=explained)
    if output is not None:
        say_written(output, as_json=as_json)


def _fitted(
    found: Estimate, placement: Placement, counts: tuple[int, ...], profile: str | None
) -> tuple[Estimate, Costs]:
    """The estimate and the costs of its stages, fitted to a profile if there is one."""
    if profile is None:
        return found, stage_costs(found, placement, counts)
    measured = costs_from(profile)
    if not measured.units.seconds:
        raise typer.BadParameter(f"--fit takes measured seconds, and the costs of {profile} are relative")
    fitted = make_estimate(found.config, found.setting, fitted_device(found, measured, counts))
    return fitted, with_measured_links(stage_costs(fitted, placement, counts), measured)
