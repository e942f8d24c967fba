"""`penstock plan`: choose partition, placement, microbatches and schedule for a model and its devices."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from penstock.arguments import plural, printable
from penstock.cli.estimate import config_from, device_from
from penstock.cli.options import (
    AsJson,
    FamilyStages,
    JitterShare,
    MemoryLimit,
    ObjectiveOption,
    Quantile,
    Ranks,
    Seed,
    choice,
    completing,
    parse_stages,
    quantile_from,
)
from penstock.cli.rendering import (
    job_progress,
    print_table,
    require_folder,
    require_suffix,
    say_written,
    search_progress,
)
from penstock.cost.estimate import devices, is_config
from penstock.cost.estimate.model_config import is_model_name, known_models
from penstock.cost.estimate.operations import RECOMPUTATION
from penstock.cost.estimate.parallel_config import PRECISIONS
from penstock.cost.units import Units, bytes_text, seconds_text
from penstock.errors import FormatError
from penstock.formats import write_bytes
from penstock.formats.files import read_keys
from penstock.planning import Model, Plan, Rejected, read_model
from penstock.planning import plan as make_plan
from penstock.planning.explanation import Explanation, explain
from penstock.planning.job import JobPlan, JobRequest, plan_job
from penstock.planning.job.explanation import explain_job
from penstock.planning.options import TECHNIQUES
from penstock.view.frontier import PlottedPlan, frontier_picture, frontier_text
from penstock.view.tables import job_table, plan_table

# The options of `penstock plan` that model files and model configs share, in two groups: input and output.


BatchSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--batch", metavar="SAMPLES", help="Samples per step of this pipeline; with a config: of the whole job."
    ),
]
TimeLimit: TypeAlias = Annotated[
    float, typer.Option("--seconds", help="Time limit of the search; 0 evaluates families only.")
]
Explained: TypeAlias = Annotated[
    bool, typer.Option("--explain", help="Explain why the best plan wins, and what would improve it.")
]
Techniques: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--techniques",
        metavar="LIST",
        help="Also offer plans with these: recompute (stages), offload (activations to the host), or both: "
        "recompute,offload.",
    ),
]
RowCount: TypeAlias = Annotated[int, typer.Option("--top", min=1, help="Number of rows to print.")]
PlotFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Plot memory against time: .svg, .png or .html."),
]
PlanDirectory: TypeAlias = Annotated[
    Path | None,
    typer.Option("--write", metavar="DIR", help="Write schedule, costs and layout of the best plan."),
]


def names_in(text: str | None) -> tuple[str, ...]:
    """The names in a list that is separated by commas."""
    return tuple(name for part in (text or "").split(",") if (name := part.strip()))


@dataclass(frozen=True)
class PlanArguments:
    """What to plan, and how."""

    ranks: Ranks = None
    memory: MemoryLimit = None
    batch: BatchSize = None
    stages_per_rank: FamilyStages = None
    objective: ObjectiveOption = "makespan"
    seconds: TimeLimit = 10.0
    seed: Seed = 0
    jitter: JitterShare = None
    quantile: Quantile = None
    techniques: Techniques = None

    @property
    def chosen_techniques(self) -> tuple[str, ...]:
        """The names in --techniques."""
        return names_in(self.techniques)

    def check(self) -> None:
        """Raise a usage error for a value that has no meaning, or an unknown technique."""
        rules = {
            "--memory must be more than 0": (self.memory, self.memory is None or self.memory > 0),
            "--batch must be at least 1": (self.batch, self.batch is None or self.batch > 0),
            "--seconds must be 0 or more": (self.seconds, self.seconds >= 0),
            "--seed must be 0 or more": (self.seed, self.seed >= 0),
        }
        for rule, (given, is_met) in rules.items():
            if not is_met:
                raise typer.BadParameter(f"{rule} (given {given:g})")
        if unknown := [name for name in self.chosen_techniques if name not in TECHNIQUES]:
            raise typer.BadParameter(
                f"--techniques are {', '.join(TECHNIQUES)} (given {printable(unknown[0])})"
            )


@dataclass(frozen=True)
class PlanOutput:
    """What to print and write."""

    explained: Explained = False
    top: RowCount = 10
    picture: PlotFile = None
    folder: PlanDirectory = None
    as_json: AsJson = False


# The output of `penstock plan`: the ranking, the frontier, techniques, notes; or JSON.


def plan_record(made: Plan, why: Explanation | None) -> dict[str, Any]:
    """The plan as values for JSON."""
    request = made.request
    return {
        "model": request.model.name,
        "ranks": request.ranks,
        "samples": request.samples,
        "memory_limit": request.memory_limit,
        "objective": request.objective,
        "jitter": request.jitter,
        "quantile": None if request.jitter is None else request.quantile,
        "interrupted": made.interrupted,
        "missing": list(made.missing),
        "bound": made.bound,
        "gap": made.gap,
        "ranked": made.to_rows(),
        "too_large": [_rejected(each) for each in made.too_large],
        "pruned": [_rejected(each) for each in made.pruned],
        "not_evaluated": made.not_evaluated,
        "why": None if why is None else list(why.why),
        "what_ifs": None if why is None else [vars(each) for each in why.what_ifs],
    }


def _rejected(each: Rejected) -> dict[str, Any]:
    configuration = each.configuration
    return {
        "schedule": each.name,
        "stages_per_rank": configuration.stages_per_rank,
        "placement": configuration.style,
        "microbatches": configuration.microbatches,
        "peak_memory": each.memory,
        "bound": each.bound,
    }


def print_plan(made: Plan, why: Explanation | None, top: int) -> None:
    """Print the ranking, the frontier and what was left out."""
    width = shutil.get_terminal_size().columns
    console = Console(highlight=False, markup=False, width=width)
    print_table(plan_table(made, top))
    if len(made.options) > top:
        console.print(f"and {len(made.options) - top} more: --top {len(made.options)}")
    console.print()
    console.print(frontier_text(made, width), soft_wrap=True)
    console.print()
    if made.request.recompute or made.request.offload:
        print_table(_technique_table(made))
        console.print()
    for line in _notes(made):
        console.print(line, soft_wrap=True)
    if why is not None:
        print_explanation(console, why, made.units)


def print_explanation(console: Console, why: Explanation, units: Units) -> None:
    """Print why the best option wins, and what would help."""
    console.print("\nwhy it wins:")
    for line in why.why:
        console.print(f"  {line}", soft_wrap=True)
    console.print("\nwhat would help, largest gain first:")
    for each in why.what_ifs:
        change = f"{each.gain:.1%} faster" if each.gain >= 0 else f"{-each.gain:.1%} slower"
        console.print(
            f"  {change:>13}  {each.change}: {units.time(each.seconds, 4)} by {each.best}", soft_wrap=True
        )


def _technique_table(made: Plan) -> Table:
    """For each technique, the fastest plan and the one with the least memory."""
    table, units = Table(box=None, pad_edge=False), made.units
    for name in ("technique", "fastest", "memory", "least memory", "time"):
        table.add_column(name, justify="left" if name == "technique" else "right")
    for name, options in made.by_technique.items():
        first, last = options[0], options[-1]
        cells = (units.time(first.seconds, 4), units.memory(first.memory), units.memory(last.memory))
        table.add_row(name, *cells, units.time(last.seconds, 4))
    return table


def _notes(made: Plan) -> list[str]:
    """The best plan in full, and what was left out."""
    best, request, units = made.best, made.request, made.units
    layout = request.model.layout(best.configuration.counts)
    cut = f"layers per stage {list(best.configuration.counts)}" if layout is None else f"layout {layout}"
    extra = best.configuration.costs.optimizer_step
    with_step = f" plus {units.time(extra, 4)} of optimizer step" if extra else ""
    found = [f"time: {request.objective}{with_step}"]
    found.append(f"best: {best}, {cut}")
    if best.technique:
        only = "with" if "none" in made.by_technique else "fits only with"
        words = best.technique.replace("recompute ", "recomputation of ").replace("offload ", "offload of ")
        found.append(f"{only} {words}: {made.price(best):.1%} more time than the same order without it")
    if best.found_by:
        found.append(f"found by: {best.found_by}")
    bound = f"lower bound over all combinations: {units.time(made.bound, 4)}; gap <= {made.gap:.1%}"
    found.append(bound if request.jitter is None else f"{bound}, without jitter")
    if made.too_large:
        limit = "" if request.memory_limit is None else f" of {units.memory(request.memory_limit)}"
        some = "; ".join(f"{each} needs {units.memory(each.memory)}" for each in made.too_large[:3])
        rest = "; ..." if len(made.too_large) > 3 else ""
        found.append(f"over the memory limit{limit}: {len(made.too_large)} ({some}{rest})")
    if made.pruned:
        names = ", ".join(dict.fromkeys(each.name for each in made.pruned))
        found.append(f"pruned by their lower bounds: {len(made.pruned)} ({names})")
    if made.not_evaluated:
        found.append(
            f"too large to evaluate: {plural(made.not_evaluated, 'combination')} of stages and microbatches"
        )
    if made.missing:
        found.append(f"not installed, so not used by the search: {', '.join(made.missing)}")
    if made.interrupted:
        found.append("interrupted: this is the best plan found so far")
    return found


# `penstock plan config.json`: the options of a whole job, checked, and its plan.


_PANEL = "With a model config"
_CONFIG_KEYS = {"hidden_size", "num_hidden_layers", "n_embd", "n_layer"}
"""By which a config is known that lacks its model_type."""

DeviceCount: TypeAlias = Annotated[
    int | None, typer.Option("--devices", help="Number of devices of the job.", rich_help_panel=_PANEL)
]
JobDevice: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME|FILE",
        help=f"Device: {', '.join(devices())}, or a .toml file; h100 unless given.",
        rich_help_panel=_PANEL,
    ),
]
JobSequence: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--seq", metavar="TOKENS", help="Tokens of a sample; 4096 unless given.", rich_help_panel=_PANEL
    ),
]
JobTensor: TypeAlias = Annotated[
    int | None, typer.Option("--tp", help="Fix the tensor parallel ranks.", rich_help_panel=_PANEL)
]
JobContext: TypeAlias = Annotated[
    int | None, typer.Option("--cp", help="Fix the context parallel ranks.", rich_help_panel=_PANEL)
]
JobExpert: TypeAlias = Annotated[
    int | None, typer.Option("--ep", help="Fix the expert parallel ranks.", rich_help_panel=_PANEL)
]
JobMicrobatchSize: TypeAlias = Annotated[
    int | None,
    typer.Option("--microbatch-size", help="Fix the samples of a microbatch.", rich_help_panel=_PANEL),
]
JobPrecision: TypeAlias = Annotated[
    str | None, choice("--precision", PRECISIONS, "Of matrix products.", panel=_PANEL)
]
JobZero: TypeAlias = Annotated[
    int | None, typer.Option("--zero", help="ZeRO stage, 0 to 3; 1 unless given.", rich_help_panel=_PANEL)
]
JobRecompute: TypeAlias = Annotated[
    str | None,
    choice("--recompute", RECOMPUTATION, "Fix what each layer recomputes.", panel=_PANEL),
]
JobSchedules: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--schedules",
        metavar="LIST",
        help="Only these families, e.g. 1f1b,interleaved-1f1b, which Megatron runs.",
        rich_help_panel=_PANEL,
    ),
]
JobBudget: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--budget",
        help="Simulate this many times more candidates, and search orders for longer.",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True)
class JobArguments:
    """The options for a model config; None is not given."""

    devices: DeviceCount = None
    device: JobDevice = None
    sequence: JobSequence = None
    tensor: JobTensor = None
    context: JobContext = None
    expert: JobExpert = None
    microbatch_size: JobMicrobatchSize = None
    precision: JobPrecision = None
    zero: JobZero = None
    recompute: JobRecompute = None
    schedules: JobSchedules = None
    budget: JobBudget = None

    @property
    def given(self) -> list[str]:
        """The options that were given."""
        names = {"sequence": "seq", "tensor": "tp", "context": "cp", "expert": "ep"}
        return [f"--{names.get(k, k).replace('_', '-')}" for k, v in vars(self).items() if v is not None]


def is_job(source: str, arguments: JobArguments) -> bool:
    """Whether a source is a model config, or the name of a model; if not, options for one are a usage error."""
    if is_model_name(source):
        return True
    if Path(source).suffix.lower() == ".json":
        try:
            keys = read_keys(source)
        except FormatError as error:
            raise typer.BadParameter(str(error)) from None
        if is_config(keys) or (isinstance(keys, dict) and _CONFIG_KEYS & set(keys)):
            return True
    if arguments.given and Path(source).is_file():
        raise typer.BadParameter(
            f"{', '.join(arguments.given)}: only with a model's config.json, which has a model_type; {source} "
            "has none, so it is read as costs of layers or stages"
        )
    return False


def job_request(source: str, arguments: JobArguments, common: PlanArguments) -> JobRequest:
    """What to plan for a model config."""
    given = {
        "--stages-per-rank": common.stages_per_rank is not None,
        "--objective": common.objective != "makespan",
    }
    if wrong := [name for name, is_given in given.items() if is_given]:
        raise typer.BadParameter(f"{', '.join(wrong)}: only with a model file, not with a model config")
    config = config_from(source)
    if arguments.devices is None or common.batch is None:
        needed = {"--devices": arguments.devices, "--batch": common.batch}
        missing = [name for name, value in needed.items() if value is None]
        example = f"penstock plan {source} --devices 512 --device h100 --batch 1024 --seq 8192"
        raise typer.BadParameter(f"a model config needs {' and '.join(missing)}, e.g. {example}")
    return JobRequest(
        *(config, device_from(arguments.device or "h100"), arguments.devices, common.batch),
        sequence=4096 if arguments.sequence is None else arguments.sequence,
        precision=arguments.precision or "bf16",
        zero=1 if arguments.zero is None else arguments.zero,
        memory_limit=common.memory or 0.0,
        tensor=arguments.tensor,
        context=arguments.context,
        expert=arguments.expert,
        pipeline=common.ranks,
        microbatch_size=arguments.microbatch_size,
        recompute=arguments.recompute,
        families=names_in(arguments.schedules),
        budget=1.0 if arguments.budget is None else arguments.budget,
        search=common.seconds > 0,
        techniques=common.chosen_techniques,
        jitter=common.jitter,
        quantile=quantile_from(common.quantile, common.jitter),
        seed=common.seed,
    )


# The report of a job's plan: ranking, frontier, explanation, picture, files or JSON.


def render_frontier(made: PlottedPlan, output: Path) -> bytes:
    """The plot of memory against time, .svg, .png or .html."""
    if output.suffix.lower() == ".html":
        from penstock.view.frontier import frontier_html  # noqa: PLC0415 -- loaded only when drawn

        return frontier_html(made).encode()
    picture = frontier_picture(made)
    if output.suffix.lower() == ".svg":
        from penstock.view.svg import svg_of  # noqa: PLC0415 -- loaded only when drawn

        return svg_of(picture).encode()
    from penstock.view.png import png_of  # noqa: PLC0415 -- loaded only when drawn

    return png_of(picture)


def report_job(request: JobRequest, output: PlanOutput) -> None:
    """Make a job's plan, with progress on a terminal, and print and write it."""
    with job_progress() as on_progress:
        made = plan_job(request, on_progress)
        why = explain_job(made, on_progress) if output.explained else None
    if output.picture is not None:
        write_bytes(render_frontier(made, output.picture), output.picture)
    written = made.write(output.folder) if output.folder is not None else []
    if output.picture is not None:
        written = [output.picture, *written]
    if output.as_json:
        typer.echo(json.dumps(_record(made, why), indent=2))
        return say_written(*written, as_json=True)
    width = shutil.get_terminal_size().columns
    console = Console(highlight=False, markup=False, width=width)
    console.print(f"{made.title} of {plural(made.request.sequence, 'token')}")
    print_table(job_table(made, output.top))
    if len(made.options) > output.top:
        console.print(f"and {len(made.options) - output.top} more: --top {len(made.options)}")
    console.print()
    console.print(frontier_text(made, width), soft_wrap=True)
    console.print()
    for line in _job_notes(made, output.top, explained=why is not None):
        console.print(line, soft_wrap=True)
    if why is not None:
        print_explanation(console, why, made.units)
    say_written(*written)
    if output.folder is not None:
        sizes = f"--layout '{made.layout}' --microbatch-size {made.best.layout.microbatch_size}"
        typer.echo(f"flags for a trainer: penstock export torchtitan {output.folder}/schedule.json {sizes}")
    return None


def _job_notes(made: JobPlan, top: int, *, explained: bool) -> list[str]:
    """The best option in full, and what was left out; an explanation has the excluded sizes itself.

    The table has the first `top` options.
    """
    best, counts = made.best, made.evaluation.counts
    found = [
        "tokens/s: of each device; m: microbatches of a pipeline; v: stages per rank; time: of a whole step"
    ]
    if made.request.jitter is not None:
        slowest = "of the slowest data parallel replica"
        quantile = f"the {made.request.quantile:g} quantile {slowest}, steps vary by {made.request.jitter:.0%}"
        steady = seconds_text(made.best.seconds_without_jitter)
        found.append(f"time: {quantile}; {made.best} takes {steady} without")
    if made.interrupted:
        found.append("interrupted: what was found until then")
    if not all(each.is_exact for each in made.options[:top]):
        found.append("*: extended from fewer microbatches, without queues of messages")
    found.append(f"best: {best}, layout {made.layout}")
    limit = f"{bytes_text(made.request.memory_limit)} ({made.request.limit_share})"
    over = f"{counts['too large']} over the memory limit of {limit}"
    simulated = f"{counts['evaluated']} simulated, {counts['pruned']} pruned by their lower bounds"
    found.append(f"{plural(counts['layouts'], 'layout')}; candidates: {simulated}, {over}")
    if made.data_sizes.excluded and not explained:
        found.append(str(made.data_sizes))
    if counts["not evaluated"]:
        least = f"the next has a lower bound of {seconds_text(made.evaluation.next_bound)}"
        found.append(f"not evaluated: {counts['not evaluated']}; {least}: --budget 4 evaluates more")
    return found


def _record(made: JobPlan, why: Explanation | None) -> dict[str, Any]:
    request = made.request
    return {
        "model": request.config.name,
        "device": request.device.name,
        "devices": request.devices,
        "samples": request.batch,
        "sequence": request.sequence,
        "memory_limit": request.memory_limit,
        "jitter": request.jitter,
        "quantile": None if request.jitter is None else request.quantile,
        "bound": made.bound,
        "counts": dict(made.evaluation.counts),
        "excluded_data_parallel_sizes": list(made.data_sizes.excluded),
        "ranked": made.to_rows(),
        "why": None if why is None else list(why.why),
        "what_ifs": None if why is None else [vars(each) for each in why.what_ifs],
    }


ModelFile: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="FILE|MODEL",
        help="Costs of layers or of profiled stages (.toml or .json), a model's config.json, or its name.",
        autocompletion=completing(known_models),
    ),
]


def plan(
    model: ModelFile,
    *,
    arguments: PlanArguments,
    output: PlanOutput,
    job: JobArguments,
) -> None:
    """From a model config: also tensor, context, expert, pipeline and data parallel sizes for all devices.
    Ctrl-C stops the search and keeps the best plan found so far.

    Examples:
      penstock plan examples/models/llama-8b.toml
      penstock plan model.toml -p 16 --memory 80GB --batch 128 --explain
      penstock plan model.toml --jitter 0.05 --quantile 0.95 --json
      penstock plan model.toml -o frontier.svg --write best/
      penstock plan llama-3-70b --devices 512 --device h100 --batch 1024 --seq 8192 --explain
      penstock plan config.json --devices 64 --batch 256 --schedules 1f1b,interleaved-1f1b --write best/
      penstock plan config.json --devices 64 --batch 256 --techniques offload --jitter 0.05 -o frontier.html
      penstock plan examples/models/llama-70b.toml --memory 28GB --techniques recompute,offload
    """
    if output.picture is not None:
        require_suffix(output.picture, (".svg", ".png", ".html"), advice="; --write DIR writes the schedule")
    if output.folder is not None:
        require_folder(output.folder)
    arguments.check()
    if is_job(model, job):
        report_job(job_request(model, job, arguments), output)
    else:
        _plan_model(_read_model(model), arguments, output)


def _plan_model(model: Model, arguments: PlanArguments, output: PlanOutput) -> None:
    """Plan a model with costs of layers or stages, and print and write the plan."""
    stages, techniques = arguments.stages_per_rank, arguments.chosen_techniques
    with search_progress(model.units) as on_progress:
        made = make_plan(
            model,
            ranks=arguments.ranks,
            memory_limit=arguments.memory,
            samples=arguments.batch,
            stages_per_rank=None if stages is None else parse_stages(stages),
            objective=arguments.objective,
            seconds=arguments.seconds,
            seed=arguments.seed,
            jitter=arguments.jitter,
            quantile=quantile_from(arguments.quantile, arguments.jitter),
            recompute="recompute" in techniques,
            offload="offload" in techniques,
            on_progress=on_progress,
        )
        why = explain(made, on_progress) if output.explained else None
    if output.picture is not None:
        write_bytes(render_frontier(made, output.picture), output.picture)
    written = made.write(output.folder) if output.folder is not None else []
    if output.as_json:
        typer.echo(json.dumps(plan_record(made, why), indent=2))
    else:
        print_plan(made, why, output.top)
    pictures = [] if output.picture is None else [output.picture]
    say_written(*pictures, *written, as_json=output.as_json)


def _read_model(source: str) -> Model:
    try:
        return read_model(source)
    except FormatError as error:
        raise typer.BadParameter(str(error)) from None
