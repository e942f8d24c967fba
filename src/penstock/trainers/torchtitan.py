"""torchtitan: the settings and the CSV of a schedule, and its pipeline functions on Penstock's runtime."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.arguments import listed, plural, some
from penstock.cost.estimate.model_config import ModelConfig
from penstock.errors import ExportError, Message, MissingExtraError, Parameter, PipelineError
from penstock.formats import dumps
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planning.layout import PipelineLayout
from penstock.trainers.export import Export, check_layout, check_schedule, raise_problems

if TYPE_CHECKING:
    from penstock.pipelining.schedules import _PipelineSchedule

# Export to torchtitan: the CSV of a schedule, and the settings of its `parallelism` and `training` sections.
#
# torchtitan takes the placement from the schedule's NAME, not from the CSV: a V with two stages per rank for
# ZBVZeroBubble and DualPipeV, else a loop with equally many stages on each rank. So the name is one with this
# placement, and the CSV has the order. If the order is that of the named schedule, there is no CSV. The CSV has
# F, I, W and B only: torch adds the messages and the sharding.
#
# Both versions take all settings as flags of their command line. 0.2.2 takes them from a TOML file too; 0.3.0
# has configs in Python, which its flags change.

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
_CSV = "schedule.csv"
_TOML = "torchtitan.toml"
_FLAGS = "flags.txt"


@dataclasses.dataclass(frozen=True)
class TitanVersion:
    """What a version of torchtitan has, as far as pipelines need it."""

    models: Mapping[str, str]
    """Its model of each `model_type` that it runs in pipelines."""
    models_without_pipelines: Mapping[str, str]
    """Those of the others that it has: they have no `pipelining_fn`."""
    head: str
    """The module name of the output layer."""
    reads_toml: bool
    has_cuda_graphs: bool
    """Which are on by default, and which it refuses in pipelines."""
    runs_tied: bool
    """Whether it runs models whose config has tied weights in pipelines; 0.2.2 trains them untied."""


VERSIONS = {
    "0.2.2": TitanVersion(
        models={"llama": "llama3", "deepseek_v2": "deepseek_v3", "deepseek_v3": "deepseek_v3"},
        models_without_pipelines={"qwen3": "qwen3", "qwen3_moe": "qwen3"},
        head="output",
        reads_toml=True,
        has_cuda_graphs=False,
        runs_tied=True,
    ),
    "0.3.0": TitanVersion(
        models={
            "llama": "llama3",
            "deepseek_v2": "deepseek_v3",
            "deepseek_v3": "deepseek_v3",
            "qwen3": "qwen3",
            "qwen3_moe": "qwen3",
        },
        models_without_pipelines={},
        head="lm_head",
        reads_toml=False,
        has_cuda_graphs=True,
        runs_tied=False,
    ),
}
"""The known versions of torchtitan, oldest first."""


def installed_version() -> str | None:
    """Return the version of the installed torchtitan."""
    try:
        return metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        return None


def export_torchtitan(
    schedule: Schedule,
    layout: PipelineLayout,
    microbatch_size: int = 1,
    directory: str = "",
    model: ModelConfig | None = None,
    version: str | None = None,
) -> Export:
    """The files for torchtitan, which finds them in `directory`; modules are named as in its language models.

    `version` is one of `VERSIONS`: by default the installed one if it is known, else the newest. A `model` that
    this version does not run in pipelines is refused.
    """
    if version is not None and version not in VERSIONS:
        known = f" must be one of {listed(VERSIONS)} (given {version})"
        raise ExportError(Message(Parameter("version"), known))
    installed, newest = installed_version(), list(VERSIONS)[-1]
    number = version or (installed if installed in VERSIONS else newest)
    titan = VERSIONS[number]
    found, problems = check_schedule(schedule, "torchtitan")
    problems += [] if model is None else _check_model(model, number)
    problems += check_layout(schedule, layout, can_be_empty=False)
    if layout.mtp_layers:
        problems.append(
            f"torchtitan {number} runs no MTP layers in pipelines, and the layout {layout} has some (m)"
        )
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
    stages = _module_names(layout, titan.head)
    flags = [f"--parallelism.{key}={value}" for key, value in settings.items()]
    flags.append(f"--parallelism.module_fqns_per_model_part {' '.join(map(','.join, stages))}")
    flags += [f"--training.{key}={value}" for key, value in batch.items()]
    flags += ["--training.disable_cuda_graphs"] * titan.has_cuda_graphs
    if titan.reads_toml:
        files[_TOML] = _toml(settings, stages, batch)
    else:
        files[_FLAGS] = " \\\n".join(flags) + "\n"
    notes = _notes(schedule, name, number, is_named=bool(named))
    if version is None and installed not in (None, number):
        notes.append(
            f"torchtitan {installed} is installed, which Penstock does not know: it knows {listed(VERSIONS)}"
        )
    return Export("torchtitan", files, flags, notes)


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


def _check_model(model: ModelConfig, number: str) -> list[str | Message]:
    """Why a version of torchtitan does not run a model in pipelines."""
    titan = VERSIONS[number]
    if not model.architecture:
        return []
    if model.architecture not in titan.models:
        known = titan.models_without_pipelines.get(model.architecture)
        reason = (
            f"has no {model.architecture} model" if known is None else f"has no pipelining_fn for its {known}"
        )
    elif model.tied and not titan.runs_tied:
        reason = "refuses tied weights in pipelines"
    else:
        return []
    refusal = (
        f"torchtitan {number} {reason}, so it cannot run {model.name} in a pipeline: it runs the model types "
        f"{listed(titan.models)}; for a model of your own give "
    )
    return [Message(refusal, Parameter("layers", model.layers), " in place of ", Parameter("model"))]


def _notes(schedule: Schedule, name: str, number: str, *, is_named: bool) -> list[str]:
    notes = [f"these are flags of torchtitan {number}"]
    if VERSIONS[number].reads_toml:
        notes[0] += f"; {_TOML} has the same settings as tables"
    if VERSIONS[number].has_cuda_graphs:
        notes[0] += ", which has no CUDA graphs in pipelines"
    if is_named:
        return notes
    notes.append(f"{name} is given for its placement only; the order is that of {_CSV}, which each rank reads")
    if schedule.table.has_pairs:
        notes.append(
            "torch's runtime runs both halves of an overlapped pair one after the other; test a step of this "
            "schedule with a timeout first"
        )
    return notes


def _module_names(layout: PipelineLayout, head: str) -> list[list[str]]:
    """The modules of each stage."""
    return [
        ["tok_embeddings"] * stage.has_embedding
        + [f"layers.{layer}" for layer in stage.layers]
        + ["norm", head] * stage.has_head
        for stage in layout
    ]


def _toml(settings: Mapping[str, object], stages: Sequence[Sequence[str]], batch: Mapping[str, int]) -> str:
    lines = [
        "[parallelism]",
        *(f"{key} = {json.dumps(value)}" for key, value in settings.items()),
        "module_fqns_per_model_part = [",
        *(f"  {json.dumps(modules)}," for modules in stages),
        "]",
        "",
        "[training]",
        *(f"{key} = {value}" for key, value in batch.items()),
        "",
    ]
    return "\n".join(lines)


# torchtitan's pipeline functions on Penstock's runtime: give them to a `TrainSpec` of 0.2.2, or a `ModelSpec`
# of 0.3.0, in place of torchtitan's own.
#
# torchtitan splits the model, applies its other parallelisms and wraps the loss; Penstock builds the schedule
# by its name, or from the CSV, and runs it over the stages. A CSV may have any order with the placement that
# torchtitan derives from the name (`penstock export torchtitan` chooses the name).
#
# The arguments are those of the installed torchtitan, and all go to its own function. With a CSV, it builds a
# simple schedule of the same placement, over whose stages the order of the CSV runs.


# ruff: noqa: ANN401 -- torch's private names; torchtitan has no types

_Pipelined: TypeAlias = "tuple[_PipelineSchedule, list[Any], bool, bool]"


def pipeline_llm(*args: Any, **kwargs: Any) -> _Pipelined:
    """The schedule, the model parts, and whether this rank has the first and the last stage."""
    return _pipeline("pipeline_llm", args, kwargs)


def pipeline_vlm(*args: Any, **kwargs: Any) -> _Pipelined:
    """The same for a model whose first stage has a `vision_encoder`; torchtitan 0.2.2 has no such function."""
    return _pipeline("pipeline_vlm", args, kwargs, optional=("vision_encoder",))


def _pipeline(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], optional: Sequence[str] = ()
) -> _Pipelined:
    """Call torchtitan's function of this name, whose own split has the `optional` modules of the model too."""
    try:
        from torchtitan.distributed import pipeline_parallel  # noqa: PLC0415 -- optional
    except ImportError as error:
        raise MissingExtraError(f"this function needs torchtitan: pip install torchtitan ({error})") from error
    from penstock.pipelining import schedules  # noqa: PLC0415 -- needs torch

    theirs: Callable[..., Any] | None = getattr(pipeline_parallel, name, None)
    if theirs is None:
        raise PipelineError(
            f"torchtitan {installed_version()} has no {name}: install torchtitan 0.3.0, or give pipeline_llm a "
            "model without a vision encoder"
        )
    call = inspect.signature(theirs).bind(*args, **kwargs)
    given = call.arguments
    job = given.get("job_config")  # of 0.2.2, with all settings
    settings, number = (given["parallelism"], "0.3.0") if job is None else (job.parallelism, "0.2.2")
    schedule_name, csv = settings.pipeline_parallel_schedule, settings.pipeline_parallel_schedule_csv
    overlap = getattr(settings, "pipeline_parallel_expert_parallel_overlap", False)  # of 0.2.2
    kind = schedules.get_schedule_class(schedule_name)
    if overlap and given["parallel_dims"].ep > 1 and kind is schedules.ScheduleDualPipeV:
        raise PipelineError(
            "torchtitan's overlap of expert-parallel communication is code for torch's runtime: set "
            "parallelism.pipeline_parallel_expert_parallel_overlap = false"
        )
    own = ["tok_embeddings", "norm", VERSIONS[number].head]
    _check_modules(given["model"], settings.module_fqns_per_model_part, own, optional)
    plain = settings
    if csv:  # torch's class of this name may be abstract, or refuse the number of microbatches
        is_v = kind in (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV)
        is_single = issubclass(kind, schedules.PipelineScheduleSingle)
        stand_in = "ZBVZeroBubble" if is_v else "GPipe" if is_single else "LoopedBFS"
        names = {"pipeline_parallel_schedule": stand_in, "pipeline_parallel_schedule_csv": ""}
        plain = dataclasses.replace(settings, **names)
    if job is None:
        given["parallelism"] = plain
    else:
        given["job_config"] = copy.copy(job)
        given["job_config"].parallelism = plain
    built, parts, has_first, has_last = theirs(*call.args, **call.kwargs)
    return schedules.schedule_over(built, schedule_name, csv or ""), parts, has_first, has_last


def _check_modules(
    model: Any, stages: Sequence[Sequence[str]] | None, own: Sequence[str], optional: Sequence[str]
) -> None:
    """Raise if a stage names a module that the model does not have, or a module is in no stage.

    torchtitan would remove from each stage what its names leave out, and skip names without a module. Without
    `stages`, its own split has all layers, the `own` modules, and the `optional` ones that the model has.
    """
    from penstock.pipelining import schedules  # noqa: PLC0415 -- needs torch

    known = schedules.names_of_modules(model)
    if stages is None:
        split = {*own, *(name for name in known if name in optional or name.startswith("layers."))}
        unknown = [name for name in own if name not in known]
        problems = [f"torchtitan's own split has {listed(unknown)}, and the model has not"] if unknown else []
    else:
        split = {name for modules in stages for name in modules}
        problems = [
            f"stage {stage} has {listed(unknown)}, and the model has not"
            for stage, modules in enumerate(stages)
            if (unknown := [name for name in modules if name not in known])
        ]
    if left := [name for name in known if name not in split]:
        problems.append(f"no stage has {some(left)}")
    if not problems:
        return
    by_container = [list(group) for _, group in groupby(known, lambda name: name.partition(".")[0])]
    brief = [f"{group[0]} to {group[-1]}" if len(group) > 1 else group[0] for group in by_container]
    remedy = f"set parallelism.module_fqns_per_model_part to the modules of each stage, of {listed(brief)}"
    heading = f"the stages do not have the modules of {type(model).__name__}:"
    raise PipelineError("\n  ".join([heading, *problems, remedy]))
