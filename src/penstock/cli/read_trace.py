"""`penstock read-trace`: the schedule, the bubbles and the costs of a run that was traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.cli.inputs import graph_from
from penstock.cli.options import AsJson, GraphOption
from penstock.cli.progress import file_progress, search_progress
from penstock.cli.read_timers import show_timers
from penstock.cli.read_trace_report import pictures, print_run
from penstock.cli.rendering import TIMELINE_FORMATS, render, require_suffix, say_written
from penstock.formats import dumps, write_bytes
from penstock.records import run_record
from penstock.search import SearchResult
from penstock.traces.measured_run import MeasuredRun
from penstock.traces.megatron_timers import is_megatron_log
from penstock.traces.read_trace import read_trace as read_run
from penstock.traces.trace_files import open_chunks, size_of

__all__ = ["read_trace"]

_SUFFIXES = (".html", ".svg", ".png", ".toml", ".csv", ".json")


TraceFiles: TypeAlias = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILES", help="One .json or .json.gz file per rank, or one file that penstock trace wrote."
    ),
]
StepNumber: TypeAlias = Annotated[
    int | None,
    typer.Option("--step", help="Number of the complete step, from 0; by default the one of median makespan."),
]
ReplicaNumber: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--replica", help="Number of the pipeline in files of several, from 0; by default the slowest."
    ),
]
SearchSeconds: TypeAlias = Annotated[
    float, typer.Option("--search", metavar="SECONDS", help="Time limit of the search; 0 for none.")
]
PipelineSize: TypeAlias = Annotated[
    int | None, typer.Option("--ranks", "-p", min=1, help="Of a Megatron log: pipeline-model-parallel size.")
]
LoggedMicrobatches: TypeAlias = Annotated[
    int | None, typer.Option("--microbatches", "-m", min=1, help="Of a Megatron log: microbatches of a step.")
]
VirtualStages: TypeAlias = Annotated[
    int | None, typer.Option("--stages-per-rank", "-v", min=1, help="Of a Megatron log: model chunks per rank.")
]
Outputs: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Measured over predicted: .html, .svg or .png. Costs: .toml. Schedule: .csv or .json. Repeatable.",
    ),
]


def read_trace(
    files: TraceFiles,
    *,
    step: StepNumber = None,
    replica: ReplicaNumber = None,
    ranks: PipelineSize = None,
    microbatches: LoggedMicrobatches = None,
    stages_per_rank: VirtualStages = None,
    graph: GraphOption = None,
    search: SearchSeconds = 3.0,
    output: Outputs = None,
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
    if len(files) == 1 and _is_log(files[0]):
        sizes = (ranks, microbatches, stages_per_rank)
        show_timers(files[0], sizes, outputs, as_json=as_json)
        return
    if (ranks, microbatches, stages_per_rank) != (None, None, None):
        raise typer.BadParameter(
            "traces have their own sizes; remove --ranks, --microbatches and --stages-per-rank"
        )
    with file_progress("reading", sum(map(size_of, files))) as on_read:
        run = read_run(files, step=step, replica=replica, graph=graph_from(graph), on_read=on_read)
    found = _search(run, search)
    if as_json:
        typer.echo(json.dumps(run_record(run, found), indent=2))
    else:
        print_run(run, found)
    for path in outputs:
        write_bytes(_content(run, found, path), path)
    say_written(*outputs, as_json=as_json)


def _is_log(path: Path) -> bool:
    """Whether a file is text that is not JSON."""
    with open_chunks(path) as chunks:
        return is_megatron_log(next(chunks, ""))


def _search(run: MeasuredRun, seconds: float) -> SearchResult | None:
    """The best order at the measured costs, or none."""
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
