"""`penstock search`: the best schedule for given costs and memory, with its gap to a lower bound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.arguments import install_command
from penstock.cli.options import (
    AsJson,
    CostsSource,
    FamilyStages,
    GraphOption,
    MemoryLimit,
    ObjectiveOption,
    Quantile,
    Seed,
    costs_from,
    graph_from,
    parse_stages,
    quantile_from,
    usage_errors,
)
from penstock.cli.rendering import (
    print_table,
    report_console,
    require_writable,
    say_written,
    search_progress,
    write_json,
)
from penstock.errors import PlacementError
from penstock.formats import format_of, write
from penstock.ir.placement import Placement
from penstock.search import SearchResult
from penstock.search import search as run_search
from penstock.service import search_record
from penstock.view.tables import family_table, result_lines
from penstock.view.terminal import terminal

_STYLES = ("any", "loop", "v")


def _parse_placement(text: str) -> Placement | str:
    if text in _STYLES:
        return text
    try:
        return Placement(tuple(int(rank) for rank in text.split(",")))
    except PlacementError as error:
        raise typer.BadParameter(f"--placement: {error}") from None
    except ValueError:
        raise typer.BadParameter(
            f"--placement is {', '.join(_STYLES)}, or the rank of each stage such as 0,1,1,0 (given {text})"
        ) from None


def search(
    *,
    ranks: Annotated[int, typer.Option("--ranks", "-p", help="Number of pipeline ranks.")],
    microbatches: Annotated[int, typer.Option("--microbatches", "-m", help="Number of microbatches.")],
    stages_per_rank: FamilyStages = None,
    placement: Annotated[
        str,
        typer.Option(
            "--placement",
            metavar="any|loop|v|RANKS",
            help="Placement of several stages per rank, or the rank of each stage: 0,1,1,0.",
        ),
    ] = "any",
    graph: GraphOption = None,
    costs: CostsSource = None,
    memory: MemoryLimit = None,
    live: Annotated[
        int | None,
        typer.Option("--live", metavar="N", help="Memory limit in live activations per rank, not bytes."),
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Also choose what is recomputed, so that it fits --memory.")
    ] = False,
    offload: Annotated[
        bool, typer.Option("--offload", help="Also choose what waits on the host, so that it fits --memory.")
    ] = False,
    objective: ObjectiveOption = "makespan",
    fused: Annotated[bool, typer.Option("--fused", help="Do not split backward into I and W.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", help="Time limit of the search.")] = 10.0,
    moves: Annotated[
        int | None,
        typer.Option("--moves", help="Limit in search moves, not seconds; reproducible for a given seed."),
    ] = None,
    seed: Seed = 0,
    jitter: Annotated[
        float | None,
        typer.Option(
            "--jitter",
            metavar="SHARE",
            help="Rank the best schedules by a quantile of their time when every action varies, e.g. by 0.05.",
        ),
    ] = None,
    quantile: Quantile = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the schedule: .csv or .json.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """No schedule of the same work is shorter than the bound, so the gap limits what a better one can gain.

    Examples:
      penstock search -p 4 -m 8 --live 4 -o best.csv
      penstock search -p 8 -m 24 --costs zb-h2304-p8-m24 --memory 3219456 --objective span
      penstock search -p 4 -m 8 -v 2 --placement v --live 6 --seconds 5
      penstock search -p 3 -m 6 --graph '0>1,1>2,0>2'
      penstock search -p 4 -m 16 --costs costs.toml --memory 40GiB --jitter 0.05 --json
      penstock search -p 4 -m 16 --costs costs.toml --memory 40GiB --recompute --offload
    """
    if output is not None:
        with usage_errors():
            format_of(output)
    require_writable(output)
    if (recompute or offload) and memory is None:
        raise typer.BadParameter("--recompute and --offload need --memory: without a limit nothing needs them")
    where = _parse_placement(placement)
    if isinstance(where, Placement) and stages_per_rank is not None:
        raise typer.BadParameter("--placement has the rank of each stage; remove --stages-per-rank")
    priced = costs_from(costs, memory)
    with search_progress(priced.units) as on_progress:
        result = run_search(
            ranks=ranks,
            microbatches=microbatches,
            costs=priced,
            stages_per_rank=1 if stages_per_rank is None else parse_stages(stages_per_rank),
            placement=where,
            graph=graph_from(graph),
            memory_limit=memory,
            live_limit=live,
            recompute=recompute,
            offload=offload,
            objective=objective,
            split=not fused,
            seconds=seconds,
            moves=moves,
            seed=seed,
            jitter=jitter,
            quantile=quantile_from(quantile, jitter),
            on_progress=on_progress,
        )
    if as_json:
        write_json(search_record(result))
    else:
        _print(result)
    if output is not None:  # last: if it fails, the result is already printed
        write(result.schedule, output)
        say_written(output, as_json=as_json)


def _print(result: SearchResult) -> None:
    console = report_console()
    console.print(terminal(result.timeline, console.width))
    console.print()
    for name, value, text in result_lines(result):
        console.print(f"{name:<9} {value:<14} {text}")
    console.print(f"found by  {result.origin}")
    console.print()
    print_table(family_table(result), console)
    if result.interrupted:
        console.print("\ninterrupted: this is the best schedule found so far")
    if result.skipped:
        console.print(f"\ntime limit reached, not tried: {', '.join(result.skipped)}")
    for each in result.missing:
        console.print(f"\nnot installed, so not used: {each}; {install_command('search')}")
