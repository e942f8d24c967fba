"""torchtitan: the settings and the CSV of a schedule, and its `pipeline_llm` on Penstock's runtime."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.arguments import listed, plural
from penstock.cost.estimate.model_config import ModelConfig
from penstock.errors import Message, MissingExtraError, Parameter, PipelineError
from penstock.formats import dumps
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planning.layout import PipelineLayout
from penstock.trainers.export import Export, check_layout, check_schedule, raise_problems

if TYPE_CHECKING:
    from penstock.pipelining.schedules import _PipelineSchedule

# Export to torchtitan: the CSV of a schedule, and the settings of its `[parallelism]` and `[training]` tables.
#
# torchtitan takes the placement from the schedule's NAME, not from the CSV: a V with two stages per rank for
# ZBVZeroBubble and DualPipeV, else a loop with equally many stages on each rank. So the name is one with this
# placement, and the CSV has the order. If the order is that of the named schedule, there is no CSV. The CSV has
# F, I, W and B only: torch adds the messages and the sharding.

_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""torch's names of families."""
_SINGLE = {"GPipe", "1F1B"}
MODELS = {"llama": "llama3", "deepseek_v2": "deepseek_v3", "deepseek_v3": "deepseek_v3"}
"""torchtitan's model of each `model_type` that it runs in pipelines."""
MODELS_WITHOUT_PIPELINES = {"qwen3": "qwen3", "qwen3_moe": "qwen3"}
"""Those of the others that it has: their `TrainSpec` has no `pipelining_fn`."""
VERSION = "0.2.2"
"""Of torchtitan, which these are the models of."""
_CSV = "schedule.csv"
_TOML = "torchtitan.toml"


def export_torchtitan(
    schedule: Schedule,
    layout: PipelineLayout,
    microbatch_size: int = 1,
    directory: str = "",
    model: ModelConfig | None = None,
) -> Export:
    """The files for torchtitan, which finds them in `directory`; modules are named as in its Llama models.

    A `model` that torchtitan does not run in pipelines is refused.
    """
    found, problems = check_schedule(schedule, "torchtitan")
    problems += [] if model is None else _check_model(model)
    problems += check_layout(schedule, layout, can_be_empty=False)
    if layout.mtp_layers:
        problems.append(f"torchtitan's models have no MTP layers, and the layout {layout} has some (m)")
    per_rank = schedule.num_stages // schedule.num_ranks
    is_v = schedule.placement.style == "v" and per_rank == 2
    problems += [] if is_v else _check_loop(schedule.placement)
    raise_problems("torchtitan", schedule, problems)
    own = [name for family in found.families if (name := _NAMES.get(family)) is not None]
    named = [name for name in own if (name in _SINGLE) == (per_rank == 1)]
    name = named[0] if named else "ZBVZeroBubble" if is_v else "1F1B" if per_rank == 1 else "Interleaved1F1B"
    files = {} if named else {_CSV: dumps(schedule.only(kind for kind in Kind if kind.is_compute), "csv")}
    settings = {
        "pipeline_parallel_degree": schedule.num_ranks,
        "pipeline_parallel_schedule": name,
        **({} if named else {"pipeline_parallel_schedule_csv": str(Path(directory, _CSV))}),
        "pipeline_parallel_microbatch_size": microbatch_size,
    }
    batch = {"local_batch_size": schedule.microbatches * microbatch_size}
    files[_TOML] = _toml(settings, layout, batch)
    flags = [f"--parallelism.{key}={value}" for key, value in settings.items()]
    flags += [f"--training.{key}={value}" for key, value in batch.items()]
    return Export("torchtitan", files, flags, _notes(schedule, name, is_named=bool(named)))


def _check_loop(placement: Placement) -> list[str]:
    """Why a placement is not the loop that torchtitan derives from a name."""
    per_rank, rest = divmod(placement.num_stages, placement.num_ranks)
    if not rest and placement.style == "loop":
        return []
    problem = (
        f"stages are on the ranks {list(placement.stage_to_rank)}, but torchtitan takes the placement from "
        "the schedule's name: a loop with equally many stages on each rank, or a V with two; nearest is "
    )
    return [
        problem + ("1f1b" if per_rank == 1 else f"interleaved-1f1b with {plural(per_rank, 'stage')} per rank")
    ]


def _check_model(model: ModelConfig) -> list[str | Message]:
    """Why torchtitan does not run a model in pipelines."""
    if not model.architecture or model.architecture in MODELS:
        return []
    known = MODELS_WITHOUT_PIPELINES.get(model.architecture)
    reason = f"has no {model.architecture} model" if known is None else f"has no pipelining_fn for its {known}"
    refusal = (
        f"torchtitan {VERSION} {reason}, so it cannot run {model.name} in a pipeline: it runs the model types "
        f"{listed(MODELS)}; for a TrainSpec of your own give "
    )
    return [Message(refusal, Parameter("layers", model.layers), " in place of ", Parameter("model"))]


def _notes(schedule: Schedule, name: str, *, is_named: bool) -> list[str]:
    notes = [f"copy the tables of {_TOML} to the job's config: module_fqns_per_model_part has no flag"]
    if is_named:
        return notes
    notes.append(f"{name} is given for its placement only; the order is that of {_CSV}, which each rank reads")
    if schedule.table.has_pairs:
        notes.append(
            "torch's runtime runs both halves of an overlapped pair one after the other; test a step of this "
            "schedule with a timeout first"
        )
    return notes


def _toml(settings: dict[str, object], layout: PipelineLayout, batch: dict[str, int]) -> str:
    lines = [
        "[parallelism]",
        *(f"{key} = {json.dumps(value)}" for key, value in settings.items()),
        "module_fqns_per_model_part = [",
    ]
    for stage in layout:
        modules = ["tok_embeddings"] * stage.has_embedding + [f"layers.{layer}" for layer in stage.layers]
        lines.append(f"  {json.dumps(modules + ['norm', 'output'] * stage.has_head)},")
    lines += ["]", "", "[training]", *(f"{key} = {value}" for key, value in batch.items()), ""]
    return "\n".join(lines)


# torchtitan's `pipeline_llm` on Penstock's runtime: give it to a `TrainSpec` in place of torchtitan's own.
#
# torchtitan splits the model and applies its other parallelisms; Penstock builds the schedule by its name, or
# from the CSV, and runs it. A CSV may have any order with the placement that torchtitan derives from the name
# (`penstock export torchtitan` chooses the name).


# ruff: noqa: ANN401 -- torch's private names; torchtitan has no types


def pipeline_llm(
    model: Any,
    parallel_dims: Any,
    job_config: Any,
    device: Any,
    model_args: Any,
    parallelize_fn: Any,
    loss_fn: Any,
) -> tuple[_PipelineSchedule, list[Any], bool, bool]:
    """The schedule, the model parts, and whether this rank has the first and the last stage."""
    try:
        from torchtitan.distributed import pipeline_parallel  # noqa: PLC0415 -- optional
    except ImportError as error:
        raise MissingExtraError(f"this function needs torchtitan: pip install torchtitan ({error})") from error
    from penstock.pipelining import schedules  # noqa: PLC0415 -- needs torch

    settings = job_config.parallelism
    name, overlap = settings.pipeline_parallel_schedule, settings.pipeline_parallel_expert_parallel_overlap
    if overlap and parallel_dims.ep > 1 and schedules.get_schedule_class(name) is schedules.ScheduleDualPipeV:
        raise PipelineError(
            "torchtitan's overlap of expert-parallel communication is code for torch's runtime: set "
            "parallelism.pipeline_parallel_expert_parallel_overlap = false"
        )
    without_csv = copy.copy(job_config)
    without_csv.parallelism = dataclasses.replace(settings, pipeline_parallel_schedule_csv="")
    built, parts, has_first, has_last = pipeline_parallel.pipeline_llm(
        model, parallel_dims, without_csv, device, model_args, parallelize_fn, loss_fn
    )
    csv = settings.pipeline_parallel_schedule_csv
    schedule = schedules.schedule_over(built, name, csv, loss_fn=loss_fn, scale_grads=False)
    return schedule, parts, has_first, has_last
