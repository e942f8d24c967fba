"""`penstock plan`: choose partition, placement, microbatches and schedule for a model and its devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from penstock.arguments import plural
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
    usage_errors,
)
from penstock.cli.rendering import (
    empty_table,
    print_json,
    print_table,
    report_console,
    require_folder,
    require_suffix,
    say_written,
    search_progress,
)
from penstock.cli.usage_errors import option_name
from penstock.cost.estimate import devices, is_config
from penstock.cost.estimate.model_config import is_model_name, known_models
from penstock.cost.estimate.operations import RECOMPUTATION
from penstock.cost.estimate.parallel_config import PRECISIONS
from penstock.cost.units import Units, bytes_text, seconds_text
from penstock.formats import write_bytes
from penstock.formats.files import read_keys
from penstock.planning import JobRequest, PlanRequest, read_model
from penstock.planning import plan as make_plan
from penstock.planning.explanation import Explanation, explain
from penstock.planning.jobs import data_sizes
from penstock.planning.planner import JobPlan, LayerPlan
from penstock.view.frontier import frontier_html, frontier_picture, frontier_text
from penstock.view.png import png_of
from penstock.view.svg import svg_of
from penstock.view.tables import plan_table


@dataclass(frozen=True)
class PlanArguments:
    """What to plan, and how."""

    ranks: Ranks = None
    memory: MemoryLimit = None
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="SAMPLES", help="Samples per step of this pipeline; with a config: of the whole job."
        ),
    ] = None
    stages_per_rank: FamilyStages = None
    objective: ObjectiveOption = "makespan"
    seconds: Annotated[float, typer.Option(help="Time limit of the search; 0 evaluates families only.")] = 10.0
    seed: Seed = 0
    jitter: JitterShare = None
    quantile: Quantile = None
    recompute: Annotated[bool, typer.Option("--recompute", help="Also offer plans that recompute stages.")] = (
        False
    )
    offload: Annotated[
        bool, typer.Option("--offload", help="Also offer plans that keep activations on the host.")
    ] = False

    @property
    def shared(self) -> dict[str, Any]:
        """The fields that both requests have."""
        names = ("seed", "jitter", "recompute", "offload")
        quantile = quantile_from(self.quantile, self.jitter)
        return {**{name: getattr(self, name) for name in names}, "quantile": quantile}


@dataclass(frozen=True)
class PlanOutput:
    """What to print and write."""

    explained: Annotated[
        bool, typer.Option("--explain", help="Explain why the best plan wins, and what would improve it.")
    ] = False
    top: Annotated[int, typer.Option(min=1, help="Number of rows to print.")] = 10
    picture: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Plot memory against time: .svg, .png or .html."),
    ] = None
    folder: Annotated[
        Path | None,
        typer.Option("--write", metavar="DIR", help="Write schedule, costs and layout of the best plan."),
    ] = None
    as_json: AsJson = False


# `penstock plan config.json`: the options of a whole job, checked, and its plan.


_PANEL = "With a model config"
_CONFIG_KEYS = {"hidden_size", "num_hidden_layers", "n_embd", "n_layer"}
"""By which a config is known that lacks its model_type."""


def _of_config(option: str, text: str, metavar: str | None = None) -> Any:  # noqa: ANN401 -- as typer.Option
    """Return an option for a model config."""
    return typer.Option(option, help=text, metavar=metavar, rich_help_panel=_PANEL)


@dataclass(frozen=True)
class JobArguments:
    """The options for a model config; None is not given."""

    devices: Annotated[int | None, _of_config("--devices", "Number of devices of the job.")] = None
    device: Annotated[
        str | None,
        _of_config(
            "--device", f"Device: {', '.join(devices())}, or a .toml file; h100 unless given.", "NAME|FILE"
        ),
    ] = None
    sequence: Annotated[int | None, _of_config("--seq", "Tokens of a sample; 4096 unless given.", "TOKENS")] = (
        None
    )
    tensor: Annotated[int | None, _of_config("--tp", "Fix the tensor parallel ranks.")] = None
    context: Annotated[int | None, _of_config("--cp", "Fix the context parallel ranks.")] = None
    expert: Annotated[int | None, _of_config("--ep", "Fix the expert parallel ranks.")] = None
    microbatch_size: Annotated[
        int | None, _of_config("--microbatch-size", "Fix the samples of a microbatch.")
    ] = None
    precision: Annotated[str | None, choice("--precision", PRECISIONS, "Of matrix products.", panel=_PANEL)] = (
        None
    )
    zero: Annotated[int | None, _of_config("--zero", "ZeRO stage, 0 to 3; 1 unless given.")] = None
    recompute_granularity: Annotated[
        str | None,
        choice("--recompute-granularity", RECOMPUTATION, "Fix what each layer recomputes.", panel=_PANEL),
    ] = None
    schedules: Annotated[
        str | None,
        _of_config(
            "--schedules", "Only these families, e.g. 1f1b,interleaved-1f1b, which Megatron runs.", "LIST"
        ),
    ] = None
    budget: Annotated[
        float | None,
        _of_config("--budget", "Simulate this many times more candidates, and search orders for longer."),
    ] = None

    @property
    def given(self) -> dict[str, Any]:
        """The values that were given."""
        return {name: value for name, value in vars(self).items() if value is not None}


def is_job(source: str, arguments: JobArguments) -> bool:
    """Whether a source is a model config, or the name of a model; if not, options for one are a usage error."""
    if is_model_name(source):
        return True
    if Path(source).suffix.lower() == ".json":
        with usage_errors():
            keys = read_keys(source)
        if is_config(keys) or (isinstance(keys, dict) and _CONFIG_KEYS & set(keys)):
            return True
    if arguments.given and Path(source).is_file():
        options = ", ".join(map(option_name, arguments.given))
        raise typer.BadParameter(
            f"{options}: only with a model's config.json, which has a model_type; {source} "
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
    sizes: dict[str, Any] = {"device": "h100", "sequence": 4096} | arguments.given | {"batch": common.batch}
    families = (name.strip() for name in sizes.pop("schedules", "").split(","))
    return JobRequest(
        config,
        device_from(sizes.pop("device")),
        **sizes,
        pipeline=common.ranks,
        memory_limit=common.memory or 0.0,
        families=tuple(filter(None, families)),
        search=common.seconds > 0,
        **common.shared,
    )


# The report: ranking, frontier, memory policies, notes, explanation, picture, files; or JSON.


def report(request: PlanRequest | JobRequest, output: PlanOutput) -> None:
    """Make a plan, with progress on a terminal, and print and write it."""
    with search_progress(request.units) as on_progress:
        made = make_plan(request, on_progress=on_progress)
        why = explain(made, on_progress) if output.explained else None
    written = []
    if output.picture is not None:
        write_bytes(render_frontier(made, output.picture), output.picture)
        written.append(output.picture)
    if output.folder is not None:
        written += made.write(output.folder)
    if output.as_json:
        reasons = {"why": None, "what_ifs": None} if why is None else asdict(why)
        print_json({**made.to_record(), **reasons})
    else:
        print_plan(made, why, output.top)
    say_written(*written, as_json=output.as_json)
    if isinstance(made.request, JobRequest) and output.folder is not None and not output.as_json:
        sizes = f"--layout '{made.layout}' --microbatch-size {made.best.layout.parallel.microbatch_size}"
        typer.echo(f"flags for a trainer: penstock export torchtitan {output.folder}/schedule.json {sizes}")


def render_frontier(made: LayerPlan | JobPlan, output: Path) -> bytes:
    """Return the plot of memory against time, .svg, .png or .html."""
    suffix = output.suffix.lower()
    if suffix == ".html":
        return frontier_html(made).encode()
    picture = frontier_picture(made)
    return png_of(picture) if suffix == ".png" else svg_of(picture).encode()


def print_plan(made: LayerPlan | JobPlan, why: Explanation | None, top: int) -> None:
    """Print the ranking, the frontier and what was left out."""
    console = report_console()
    if isinstance(made.request, JobRequest):
        console.print(f"{made.request.title} of {plural(made.request.sequence, 'token')}")
        notes = _job_notes(made, top, explained=why is not None)
    else:
        notes = _layer_notes(made)
    print_table(plan_table(made, top))
    if len(made.options) > top:
        console.print(f"and {len(made.options) - top} more: --top {len(made.options)}")
    console.print()
    console.print(frontier_text(made, console.width))
    console.print()
    if made.request.recompute or made.request.offload:
        print_table(_policy_table(made))
        console.print()
    for line in notes:
        console.print(line)
    if made.interrupted:
        console.print("interrupted: this is the best plan found so far")
    if why is not None:
        _print_explanation(console, why, made.units)


def _print_explanation(console: Console, why: Explanation, units: Units) -> None:
    console.print("\nwhy it wins:")
    for line in why.why:
        console.print(f"  {line}")
    console.print("\nwhat would help, largest gain first:")
    for each in why.what_ifs:
        change = f"{each.gain:.1%} faster" if each.gain >= 0 else f"{-each.gain:.1%} slower"
        console.print(f"  {change:>13}  {each.change}: {units.time(each.seconds, 4)} by {each.best}")


def _policy_table(made: LayerPlan | JobPlan) -> Table:
    """Return for each memory policy the fastest plan and the one with the least memory."""
    units, columns = made.units, ("memory policy", "fastest", "memory", "least memory", "time")
    table = empty_table(*columns, left=1)
    for name, options in made.by_memory_policy.items():
        first, last = options[0], options[-1]
        cells = (units.time(first.seconds, 4), units.memory(first.memory), units.memory(last.memory))
        table.add_row(name, *cells, units.time(last.seconds, 4))
    return table


def _policy_notes(made: LayerPlan | JobPlan) -> Iterator[str]:
    best = made.best
    if best.memory_policy:
        only = "with" if "none" in made.by_memory_policy else "fits only with"
        words = best.memory_policy.replace("recompute ", "recomputation of ").replace("offload ", "offload of ")
        yield f"{only} {words}: {made.policy_price:.1%} more time than the same order without it"


def _layer_notes(made: LayerPlan) -> Iterator[str]:
    """Yield the best plan in full, and what was left out."""
    best, request, units = made.best, made.request, made.units
    left_out = made.evaluation
    counts = list(best.configuration.counts)
    cut = f"layers per stage {counts}" if made.layout is None else f"layout {made.layout}"
    extra = best.configuration.costs.optimizer_step
    with_step = f" plus {units.time(extra, 4)} of optimizer step" if extra else ""
    yield f"time: {request.objective}{with_step}"
    yield f"best: {best}, {cut}"
    yield from _policy_notes(made)
    if best.found_by:
        yield f"found by: {best.found_by}"
    bound = f"lower bound over all combinations: {units.time(made.bound, 4)}; gap <= {made.gap:.1%}"
    yield bound if request.jitter is None else f"{bound}, without jitter"
    if too_large := left_out.too_large:
        limit = "" if request.memory_limit is None else f" of {units.memory(request.memory_limit)}"
        some = "; ".join(f"{each} needs {units.memory(each.memory)}" for each in too_large[:3])
        rest = "; ..." if len(too_large) > 3 else ""
        yield f"over the memory limit{limit}: {len(too_large)} ({some}{rest})"
    if left_out.pruned:
        names = ", ".join(dict.fromkeys(each.name for each in left_out.pruned))
        yield f"pruned by their lower bounds: {len(left_out.pruned)} ({names})"
    if left_out.not_evaluated:
        combinations = plural(left_out.not_evaluated, "combination")
        yield f"too large to evaluate: {combinations} of stages and microbatches"
    if left_out.missing:
        yield f"not installed, so not used by the search: {', '.join(sorted(left_out.missing))}"


def _job_notes(made: JobPlan, top: int, *, explained: bool) -> Iterator[str]:
    """Yield the best option in full, and what was left out; an explanation has the excluded sizes itself.

    The table has the first `top` options.
    """
    request, left_out = made.request, made.evaluation
    counts = left_out.counts
    yield "tokens/s: of each device; m: microbatches of a pipeline; v: stages per rank; time: of a whole step"
    if request.jitter is not None:
        slowest = "of the slowest data parallel replica"
        quantile = f"the {request.quantile:g} quantile {slowest}, steps vary by {request.jitter:.0%}"
        steady = seconds_text(made.best.seconds_without_jitter)
        yield f"time: {quantile}; {made.best} takes {steady} without"
    if not all(each.is_exact for each in made.options[:top]):
        yield "*: extended from fewer microbatches, without queues of messages"
    yield f"best: {made.best}, layout {made.layout}"
    yield from _policy_notes(made)
    limit = f"{bytes_text(request.memory_limit)} ({request.limit_share})"
    over = f"{counts['too large']} over the memory limit of {limit}"
    simulated = f"{counts['evaluated']} simulated, {counts['pruned']} pruned by their lower bounds"
    yield f"{plural(counts['layouts'], 'layout')}; candidates: {simulated}, {over}"
    if not explained and (excluded := str(data_sizes(request))):
        yield excluded
    if counts["not evaluated"]:
        least = f"the next has a lower bound of {seconds_text(left_out.next_bound)}"
        yield f"not evaluated: {counts['not evaluated']}; {least}: --budget 4 evaluates more"


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="FILE|MODEL",
            help="Costs of layers or of profiled stages (.toml or .json), a model's config.json, or its name.",
            autocompletion=completing(known_models),
        ),
    ],
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
      penstock plan config.json --devices 64 --batch 256 --offload --jitter 0.05 -o frontier.html
      penstock plan examples/models/llama-70b.toml --memory 28GB --recompute --offload
    """
    require_suffix(output.picture, (".svg", ".png", ".html"), advice="; --write DIR writes the schedule")
    require_folder(output.folder)
    if arguments.memory is not None and not arguments.memory > 0:
        raise typer.BadParameter(f"--memory must be more than 0 (given {arguments.memory:g})")
    if not arguments.seconds >= 0:
        raise typer.BadParameter(f"--seconds must be 0 or more (given {arguments.seconds:g})")
    is_for_job = is_job(model, job)
    report(job_request(model, job, arguments) if is_for_job else _layer_request(model, arguments), output)


def _layer_request(source: str, arguments: PlanArguments) -> PlanRequest:
    """Return what to plan for costs of layers or stages."""
    with usage_errors():
        model = read_model(source)
    stages = arguments.stages_per_rank
    return PlanRequest.of(
        model,
        ranks=arguments.ranks,
        memory_limit=arguments.memory,
        samples=arguments.batch,
        stages_per_rank=None if stages is None else parse_stages(stages),
        objective=arguments.objective,
        seconds=arguments.seconds,
        **arguments.shared,
    )
