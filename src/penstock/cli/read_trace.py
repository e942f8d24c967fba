"""`penstock read-trace`: the schedule, the bubbles and the costs of a run that was traced."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from penstock.arguments import plural
from penstock.cli.options import AsJson, GraphOption, graph_from
from penstock.cli.rendering import (
    empty_table,
    file_progress,
    print_json,
    print_table,
    report_console,
    require_suffix,
    say_written,
    search_progress,
)
from penstock.formats import dumps, write_bytes
from penstock.search import SearchResult
from penstock.service import TIMELINE_FORMATS, idle_by_reason, order_of, render, run_record, timers_record
from penstock.simulation.calibration import errors_by_kind
from penstock.simulation.gaps import gaps
from penstock.simulation.timeline import Timeline
from penstock.traces.read.clocks import ClockAlignment
from penstock.traces.read.files import size_of
from penstock.traces.read.measured_run import MeasuredRun
from penstock.traces.read.measured_run import read_trace as read_run
from penstock.traces.read.megatron_timers import MegatronTimers, is_megatron_log, read_megatron_timers
from penstock.view.terminal import terminal

_LONGEST_GAPS = 3


def pictures(run: MeasuredRun, found: SearchResult | None) -> list[Timeline]:
    """The measured timeline, the predicted one, and that of the order found."""
    shown = [(f"measured: {order_of(run.schedule)}", run.timeline), ("predicted", run.predicted)]
    if found is not None:
        shown.append(("found by search", found.timeline))
    return [replace(timeline, schedule=timeline.schedule.renamed(name)) for name, timeline in shown]


def print_run(run: MeasuredRun, found: SearchResult | None) -> None:
    """Print the report."""
    console = report_console()
    timeline = run.timeline
    how = "of median makespan" if run.step == run.median_step else "as given"
    steps = plural(len(run.timelines), "complete step")
    console.print(f"order     {order_of(run.schedule)}")
    console.print(f"steps     {steps}; step {run.step}, {how}, is shown")
    if run.replicas:
        console.print(f"replicas  {_replicas(run)}")
    console.print(f"clocks    {_clocks(run.clocks)}\n")
    console.print(terminal(timeline, console.width))
    period = "" if timeline.period is None else f"; a step every {_ms(timeline.period)} ms"
    console.print(f"\nmakespan  {_ms(timeline.makespan)} ms, {timeline.bubble_rate:.1%} idle{period}")
    idle = gaps(timeline)
    whole = timeline.makespan * run.schedule.num_ranks
    reasons = (f"{reason} {seconds / whole:.1%}" for reason, seconds in idle_by_reason(idle).items())
    console.print(f"idle      {', '.join(reasons)}")
    scale = run.costs.units.time_scale(timeline.makespan)
    for gap in sorted(idle, key=lambda gap: -gap.length)[:_LONGEST_GAPS]:
        console.print(f"          {gap.text(scale)}")
    console.print(f"search    {_search_text(run, found)}\n")
    print_table(_predictions(run), console)
    console.print()
    print_table(_stages(run), console)


def _replicas(run: MeasuredRun) -> str:
    """All pipelines of the job, and which one is shown."""
    each = ", ".join(_ms(seconds) for seconds in run.replicas)
    how = "the slowest" if run.replicas[run.replica] == max(run.replicas) else "as given"
    return f"{len(run.replicas)}, of {each} ms; replica {run.replica}, {how}, is shown"


def _clocks(clocks: ClockAlignment) -> str:
    if clocks.shared_clock:
        return "all ranks on one host, one clock"
    offsets = ", ".join(f"{each * 1e3:+.3g}" for each in clocks.offsets)
    finite = [each for each in clocks.uncertainty if math.isfinite(each)]
    text = f"ahead of rank 0 by {offsets} ms, each to within {max(finite) * 1e3:.3g} ms"
    if len(finite) < len(clocks.uncertainty):
        text += "; some ranks have no messages in both directions"
    if any(clocks.drift):
        drift = ", ".join(f"{each * 1e6:+.3g}" for each in clocks.drift)
        text += f"; they drift by {drift} microseconds per second"
    if clocks.residual:
        text += f"; some message still arrives {clocks.residual * 1e3:.3g} ms before it was sent"
    return text


def _search_text(run: MeasuredRun, found: SearchResult | None) -> str:
    if found is None:
        return "not run"
    saved = 1 - found.value / run.predicted.makespan
    live = f"with at most {run.live} live activations per rank, as now"
    if saved < 0.001:
        return f"no better order found {live} ({found.found_by})"
    better = f"{_ms(found.value)} ms, {saved:.1%} less than predicted for this order"
    return f"{better}, {live}: {found.found_by}, gap <= {found.gap:.1%}"


def _predictions(run: MeasuredRun) -> Table:
    table = empty_table("kind", "predicted ms", "measured ms", "error", left=1)
    for row in errors_by_kind(run.predicted, run.alike):
        times = (_ms(seconds) for seconds in (row.predicted, row.measured))
        table.add_row(row.kind, *times, f"{row.error:+.1%}")
    return table


def _stages(run: MeasuredRun) -> Table:
    costs, count = run.costs, run.schedule.num_stages
    edges = costs.per_edge("latency", len(run.schedule.graph.edges))
    table = empty_table("stage", "F ms", "I ms", "W ms", "B ms", "message to the next, ms")
    columns = [
        costs.per_stage("forward", count),
        costs.per_stage("backward_input", count),
        costs.per_stage("backward_weight", count),
        costs.full_backward(count),
    ]
    chain = run.schedule.graph.is_chain
    for stage, seconds in enumerate(zip(*columns)):
        latency = _ms(edges[stage]) if chain and stage < len(edges) else ""
        table.add_row(str(stage), *map(_ms, seconds), latency)
    return table


def _ms(seconds: float) -> str:
    """Milliseconds with four digits."""
    return f"{seconds * 1e3:.4g}" if seconds < 10 else f"{seconds * 1e3:,.0f}"


def show_timers(
    path: Path, sizes: tuple[int | None, int | None, int | None], outputs: list[Path], *, as_json: bool
) -> None:
    """Print the timers of a log, and write the costs."""
    ranks, microbatches, stages = sizes
    if ranks is None or microbatches is None:
        raise typer.BadParameter(
            f"{path} is not JSON, so it is read as a log of Megatron-LM: give its --ranks and --microbatches"
        )
    if wrong := [str(each) for each in outputs if each.suffix.lower() not in (".toml", ".json")]:
        raise typer.BadParameter(
            f"timers have no order and no timeline, only costs: {', '.join(wrong)} must be .toml or .json"
        )
    with file_progress(size_of(path)) as on_read:
        timers = read_megatron_timers(
            path, ranks=ranks, microbatches=microbatches, stages_per_rank=stages or 1, on_read=on_read
        )
    if as_json:
        print_json(timers_record(timers))
    else:
        _print(timers)
    for output in outputs:
        write_bytes(timers.costs.dumps(output.suffix.lower()).encode(), output)
    say_written(*outputs, as_json=as_json)


def _print(timers: MegatronTimers) -> None:
    console = report_console()
    schedule, measured = timers.schedule, timers.step_seconds
    sizes = f"p={schedule.num_ranks}, v={schedule.num_stages // schedule.num_ranks}, m={schedule.microbatches}"
    console.print(f"order     {schedule.name} ({sizes}), as given; timers have none")
    console.print(f"logged    {plural(timers.steps, 'time')}; means per step\n")
    table = empty_table("rank", "forward ms", "backward ms", "neither ms", "F ms", "B ms")
    count = schedule.num_stages
    costs = list(zip(timers.costs.per_stage("forward", count), timers.costs.full_backward(count)))
    for rank, own in enumerate(schedule.placement.stages_of_rank):
        sums = (timers.seconds["forward-compute"][rank], timers.seconds["backward-compute"][rank])
        cells = (*sums, timers.idle[rank], *costs[own[0]])
        table.add_row(str(rank), *(f"{seconds * 1e3:.2f}" for seconds in cells))
    print_table(table, console)
    predicted = timers.predicted.makespan
    console.print(
        f"\nstep      measured {measured * 1e3:.2f} ms, predicted {predicted * 1e3:.2f} ms with free messages "
        f"({predicted / measured - 1:+.1%})"
    )


_SUFFIXES = (".html", ".svg", ".png", ".toml", ".csv", ".json")


def read_trace(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES", help="One .json or .json.gz file per rank, or one file that penstock trace wrote."
        ),
    ],
    *,
    step: Annotated[
        int | None,
        typer.Option(
            "--step", help="Number of the complete step, from 0; by default the one of median makespan."
        ),
    ] = None,
    replica: Annotated[
        int | None,
        typer.Option(
            "--replica", help="Number of the pipeline in files of several, from 0; by default the slowest."
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-p", min=1, help="Of a Megatron log: pipeline-model-parallel size."),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option("--microbatches", "-m", min=1, help="Of a Megatron log: microbatches of a step."),
    ] = None,
    stages_per_rank: Annotated[
        int | None,
        typer.Option("--stages-per-rank", "-v", min=1, help="Of a Megatron log: model chunks per rank."),
    ] = None,
    graph: GraphOption = None,
    search: Annotated[
        float, typer.Option("--search", metavar="SECONDS", help="Time limit of the search; 0 for none.")
    ] = 3.0,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            *("--output", "-o"),
            metavar="FILE",
            help="Measured over predicted: .html, .svg or .png. Costs: .toml. Schedule: .csv or .json. "
            "Repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Traces are of torch.profiler, one per rank, of torch.distributed.pipelining or of Penstock's runtime, or
    what penstock trace wrote. Of a log of Megatron-LM with timers, which need the sizes, costs are derived.

    Examples:
      penstock read-trace rank0.json rank1.json
      penstock read-trace rank0.json rank1.json -o report.html -o costs.toml -o order.csv
      penstock read-trace rank0.json rank1.json --step 0 --search 0 --json
      penstock read-trace megatron.log --ranks 2 --microbatches 8 -o costs.toml
    """
    outputs = output or []
    for path in outputs:
        require_suffix(path, _SUFFIXES)
    if search < 0:
        raise typer.BadParameter(f"--search is a number of seconds, from 0 (given {search:g})")
    if len(files) == 1 and is_megatron_log(files[0]):
        sizes = (ranks, microbatches, stages_per_rank)
        show_timers(files[0], sizes, outputs, as_json=as_json)
        return
    if (ranks, microbatches, stages_per_rank) != (None, None, None):
        raise typer.BadParameter(
            "traces have their own sizes; remove --ranks, --microbatches and --stages-per-rank"
        )
    with file_progress(sum(map(size_of, files))) as on_read:
        run = read_run(files, step=step, replica=replica, graph=graph_from(graph), on_read=on_read)
    found = _search(run, search)
    if as_json:
        print_json(run_record(run, found))
    else:
        print_run(run, found)
    for path in outputs:
        write_bytes(_content(run, found, path), path)
    say_written(*outputs, as_json=as_json)


def _search(run: MeasuredRun, seconds: float) -> SearchResult | None:
    if not seconds or run.schedule.num_ranks == 1:
        return None
    with search_progress(run.costs.units) as on_progress:
        return run.search(seconds, on_progress)


def _content(run: MeasuredRun, found: SearchResult | None, path: Path) -> bytes:
    suffix = path.suffix.lower()[1:]
    if suffix in TIMELINE_FORMATS:
        return render(suffix, pictures(run, found))
    if suffix == "toml":
        return run.costs.dumps(".toml").encode()
    return dumps(run.schedule, suffix).encode()
