"""`penstock estimate`: costs of a model's layers and stages from its config, without measuring."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from penstock.arguments import plural
from penstock.cli.options import AsJson, choice, completing, costs_from, usage_errors
from penstock.cli.rendering import (
    empty_table,
    print_json,
    print_table,
    report_console,
    require_suffix,
    say_written,
)
from penstock.cost.costs import Costs
from penstock.cost.estimate import Estimate, ParallelConfig, active_parameters, parameters
from penstock.cost.estimate import estimate as make_estimate
from penstock.cost.estimate.devices import Device, device, devices
from penstock.cost.estimate.estimate import LayerEstimate, collective_seconds, operation_seconds
from penstock.cost.estimate.model_config import ModelConfig, known_models, read_config
from penstock.cost.estimate.operations import RECOMPUTATION, Passes
from penstock.cost.estimate.parallel_config import ATTENTION, KERNELS, PRECISIONS
from penstock.cost.memory import fixed_bytes_of
from penstock.cost.units import bytes_text, count_text, seconds_text
from penstock.ir.placement import Placement
from penstock.planning.estimated_model import (
    balanced_layers,
    even_blocks,
    fitted_device,
    stage_costs,
    with_measured_links,
)
from penstock.service import EstimatedStages, estimate_record

_PARTITIONS = ("even", "balanced")


def config_from(source: str) -> ModelConfig:
    """Read a model config; what is wrong with it is a usage error."""
    with usage_errors():
        return read_config(source)


def device_from(source: str) -> Device:
    """Read a device; what is wrong with its file is a usage error."""
    with usage_errors():
        return device(source)


def estimate(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help=f"A model's config.json as Hugging Face writes it, or a name: {', '.join(known_models())}.",
            autocompletion=completing(known_models),
        ),
    ],
    *,
    device_name: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="NAME|FILE",
            help=f"Device: {', '.join(devices())}, or a .toml file with the same keys.",
            autocompletion=completing(devices),
        ),
    ] = "h100",
    sequence: Annotated[int, typer.Option("--seq", metavar="TOKENS", help="Tokens of a sample.")] = 4096,
    microbatch_size: Annotated[
        int, typer.Option("--microbatch-size", metavar="SAMPLES", help="Samples of a microbatch.")
    ] = 1,
    tensor: Annotated[int, typer.Option("--tp", help="Tensor parallel ranks.")] = 1,
    context: Annotated[int, typer.Option("--cp", help="Context parallel ranks.")] = 1,
    expert: Annotated[
        int,
        typer.Option("--ep", help="Expert parallel ranks, out of the tensor, context and data parallel ones."),
    ] = 1,
    data: Annotated[int, typer.Option("--dp", help="Data parallel ranks.")] = 1,
    ranks: Annotated[int, typer.Option("--ranks", "-p", min=1, help="Number of pipeline ranks.")] = 1,
    stages_per_rank: Annotated[
        int, typer.Option("--stages-per-rank", "-v", min=1, help="Number of stages per rank.")
    ] = 1,
    partition: Annotated[
        str,
        choice("--partition", _PARTITIONS, "Blocks evenly over the stages, or all layers balanced by seconds."),
    ] = "even",
    sequence_parallel: Annotated[
        bool, typer.Option("--sp/--no-sp", help="Sequence parallelism between tensor parallel ranks.")
    ] = True,
    precision: Annotated[str, choice("--precision", PRECISIONS, "Of matrix products.")] = "bf16",
    gradient_bytes: Annotated[
        int, typer.Option("--gradient-bytes", help="Bytes of each weight's gradient: 4 or 2.")
    ] = 4,
    zero: Annotated[
        int,
        typer.Option(
            "--zero",
            help="What data parallel ranks shard: 1 optimizer state, 2 gradients too, 3 weights too (FSDP).",
        ),
    ] = 1,
    recompute_granularity: Annotated[
        str, choice("--recompute-granularity", RECOMPUTATION, "What each layer recomputes in the backward.")
    ] = "none",
    attention: Annotated[
        str, choice("--attention", ATTENTION, "flash, or unfused, which saves the probabilities.")
    ] = "flash",
    kernels: Annotated[
        str, choice("--kernels", KERNELS, "fused, or eager, which saves more tensors.")
    ] = "fused",
    fit: Annotated[
        str | None,
        typer.Option("--fit", metavar="FILE", help="Fit the seconds to costs measured with the same stages."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the costs of the stages: .toml or .json."),
    ] = None,
    explained: Annotated[
        bool, typer.Option("--explain", help="Show every operation, collective and saved tensor.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """
    Examples:
      penstock estimate config.json --device h100 --seq 8192
      penstock estimate config.json --seq 8192 --tp 8 --dp 4 --ranks 4 -o costs.toml
      penstock estimate config.json --seq 8192 --recompute-granularity full --explain
      penstock estimate config.json --device cpu --precision fp32 --seq 128 --json
    """
    require_suffix(output, (".toml", ".json"))
    parallel = ParallelConfig(
        *(sequence, microbatch_size, tensor, context, expert, data, sequence_parallel),
        *(precision, gradient_bytes, zero, recompute_granularity, attention, kernels),
    )
    found = make_estimate(config_from(config), parallel, device_from(device_name))
    placement = Placement.loop(ranks, stages_per_rank)
    counts = even_blocks(found, placement.num_stages)
    if partition == "balanced":
        counts = balanced_layers(found, placement)
    found, costs = _fitted(found, placement, counts, fit)
    stages = EstimatedStages(placement, counts, costs)
    if output is not None:
        costs.write(output)
    if as_json:
        print_json(estimate_record(found, stages))
    else:
        _print(found, stages, explained=explained)
    say_written(output, as_json=as_json)


def _fitted(
    found: Estimate, placement: Placement, counts: tuple[int, ...], profile: str | None
) -> tuple[Estimate, Costs]:
    if profile is None:
        return found, stage_costs(found, placement, counts)
    measured = costs_from(profile)
    if not measured.units.seconds:
        raise typer.BadParameter(f"--fit takes measured seconds, and the costs of {profile} are relative")
    fitted = make_estimate(found.config, found.parallel, fitted_device(found, measured, counts))
    return fitted, with_measured_links(stage_costs(fitted, placement, counts), measured)


def _time(seconds: float) -> str:
    return seconds_text(seconds, 3) if seconds else "0"


def _size(count: float) -> str:
    return bytes_text(count) if count else "0"


def _print(found: Estimate, stages: EstimatedStages, *, explained: bool) -> None:
    console = report_console(110)
    for line in _head(found):
        console.print(line)
    console.print("\neach kind of layer, on one rank, for one microbatch:")
    print_table(_time_table(found), console)
    console.print()
    print_table(_size_table(found), console)
    if len(stages.counts) > 1:
        console.print("\neach stage:")
        print_table(_stage_table(found, stages), console)
    console.print(
        f"\noptimizer step {_time(stages.costs.optimizer_step)}; F, I, W: forward, input gradient, weight "
        "gradient; state: weights, gradients, optimizer; saved: for the backward of one microbatch"
    )
    if explained:
        for kind, layer in found.by_kind.items():
            console.print(f"\n{kind}:")
            for table in _explanation(found, layer):
                print_table(table, console)
        for line in _how(found):
            console.print(line)


def _head(found: Estimate) -> list[str]:
    config, parallel, device = found.config, found.parallel, found.device
    active = active_parameters(config)
    count = f"{parameters(config) / 1e9:.4g} billion parameters"
    if active != parameters(config):
        count += f", {active / 1e9:.4g} billion active"
    sizes = {"tp": parallel.tensor_parallel, "cp": parallel.context_parallel, "ep": parallel.expert_parallel}
    sizes["dp"] = parallel.data_parallel
    ranks = ", ".join(f"{name} {size}" for name, size in sizes.items())
    peak = count_text(device.peak(parallel.precision), "FLOP/s")
    rest = f"ZeRO {parallel.zero}, recomputation: {parallel.recompute_granularity}"
    per_token = found.model_flops / (parallel.microbatch_size * parallel.sequence)
    return [
        f"{config.name}: {count}, {count_text(per_token, 'FLOPs')} per token and step",
        f"{device.name}: {peak} in {parallel.precision}, {_size(device.memory_bytes)}; {ranks}; {rest}",
        f"microbatch: {parallel.microbatch_size} x {plural(parallel.sequence, 'token')}",
    ]


def _table(*columns: str, left: int = 1) -> Table:
    return empty_table(*columns, left=left, no_wrap=True)


def _time_table(found: Estimate) -> Table:
    exchanged = ["all-to-all F", "I"] * any(x.seconds.all_to_all.total for x in found.by_kind.values())
    table = _table("layer", "count", "FLOPs F", "I", "W", "time F", "I", "W", *exchanged)
    kinds = found.config.kinds
    for kind, layer in found.by_kind.items():
        table.add_row(
            *(kind, str(kinds.count(kind))),
            *map(count_text, layer.operations.flops),
            *map(_time, layer.seconds.compute),
            *map(_time, layer.seconds.all_to_all[: len(exchanged)]),
        )
    return table


def _size_table(found: Estimate) -> Table:
    table = _table(
        *("layer", "weights", "gradients", "optimizer", "saved", "message", "collectives F", "I", "W")
    )
    for kind, layer in found.by_kind.items():
        moved = Passes.sum((Passes(), *(each.bytes for each in layer.operations.collectives)))
        held = layer.weights.parameters, layer.weights.gradients, layer.weights.optimizer_state
        table.add_row(kind, *map(_size, (*held, layer.operations.activation, layer.operations.message, *moved)))
    return table


def _stage_table(found: Estimate, stages: EstimatedStages) -> Table:
    table = _table(*("stage", "rank", "layers", "time F", "I", "W", "state", "saved", "message"), left=0)
    placement, counts, costs = stages
    number = len(counts)
    named = {
        name: costs.per_stage(name, number)
        for name in ("forward", "backward_input", "backward_weight", "activation")
    }
    messages = [*costs.per_edge("activation_message", number - 1), 0.0]
    for stage, (first, end) in enumerate(pairwise([0, *accumulate(counts)])):
        table.add_row(
            *(str(stage), str(placement.stage_to_rank[stage])),
            _layers_text(found.config.kinds[first:end]),
            *(_time(named[name][stage]) for name in list(named)[:3]),
            _size(fixed_bytes_of(costs, (stage,), number)),
            _size(named["activation"][stage]),
            _size(messages[stage]),
        )
    return table


def _layers_text(kinds: list[str]) -> str:
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return ", ".join(kind if kind in ("embedding", "output") else f"{n} {kind}" for kind, n in counts.items())


def _explanation(found: Estimate, layer: LayerEstimate) -> list[Table]:
    operations = _table("operation", "bound by", "FLOPs F", "moved F", "time F", "I", "W", "weights", left=2)
    saved = _table("saved tensor", "size", "until", left=1)
    kept = {each.what for each in layer.operations.saved}
    for each in layer.operations.operations:
        seconds = operation_seconds(each, found.device, found.parallel.precision)
        again = " (repeated)" if each in layer.operations.repeated else ""
        operations.add_row(
            *(each.name + again, each.resource),
            *(count_text(each.flops.forward), _size(each.moved.forward)),
            *map(_time, seconds),
            count_text(each.weights),
        )
        for tensor in each.saved:
            until = "recomputed" if tensor.what not in kept else "W" if tensor.for_weight else "I"
            saved.add_row(tensor.what, _size(tensor.bytes), until)
    found_tables = [operations, saved]
    if layer.operations.collectives:
        collectives = _table("collective", "group", "bytes F", "I", "W", "time F", "I", "W", left=2)
        for other in layer.operations.collectives:
            taken = collective_seconds(other, found.device, found.parallel)
            collectives.add_row(other.name, other.group, *map(_size, other.bytes), *map(_time, taken))
        found_tables.append(collectives)
    return found_tables


def _how(found: Estimate) -> list[str]:
    device, share = found.device, found.device.attainable
    node, network, host, memory = (
        count_text(rate, "B/s")
        for rate in (device.node_link, device.network_link, device.host_link, device.memory_bandwidth)
    )
    formula = "the longer of FLOPs / (share x peak) and bytes / (share x bandwidth)"
    shares = f"matmul {share.matmul:g}, attention {share.attention:g}, memory {share.memory:g}"
    links = f"{node} between {plural(device.node_devices, 'device')} of a node"
    rows = [
        "",
        f"how: an operation takes {formula}, plus {_time(share.kernel_seconds)} per kernel",
        f"     shares: {shares}, links {share.links:g}; memory bandwidth {memory}",
        f"     links: {links}, {network} between nodes",
        f"     host link: {host}; source: {device.source}",
    ]
    if share.passes != Passes(1.0, 1.0, 1.0):
        fitted = ", ".join(f"{p} {x:.4g}" for p, x in zip("FIW", share.passes))
        rows.append(f"     fitted factors: {fitted}; B over I + W {share.whole_backward:.4g}")
    return rows
