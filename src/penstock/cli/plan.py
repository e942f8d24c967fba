"""`penstock plan`: which partition, placement, microbatches and schedule for this model on these devices?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.arguments import printable
from penstock.cli.search import Objective, shown_progress
from penstock.cli.source import Memory, Ranks, StagesPerRank, bytes_from
from penstock.cost.costs import size_text
from penstock.errors import FormatError
from penstock.formats import write_bytes
from penstock.planning import Model, Plan, Rejected, read_model
from penstock.planning import plan as make_plan
from penstock.planning.explanation import Explanation, explain
from penstock.view.frontier import frontier_picture, frontier_text

__all__ = ["plan"]


def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="FILE", help="Costs of layers, or of the stages of a profile: .toml or .json."),
    ],
    *,
    ranks: Ranks = None,
    memory: Memory = None,
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="SAMPLES", help="Samples of one step of this pipeline.")
    ] = None,
    stages_per_rank: StagesPerRank = None,
    objective: Annotated[
        Objective, typer.Option("--objective", help="What is to be as short as can be.")
    ] = Objective.makespan,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Time for searching; 0 takes families only.")
    ] = 10.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the search, and of the jitter.")] = 0,
    noise: Annotated[
        float | None,
        typer.Option("--jitter", metavar="SHARE", help="Rank by a quantile when steps vary by this share."),
    ] = None,
    quantile: Annotated[float, typer.Option("--quantile", help="Which quantile that is.")] = 0.95,
    explained: Annotated[
        bool, typer.Option("--explain", help="Say why the winner wins, and what would help most.")
    ] = False,
    top: Annotated[int, typer.Option("--top", min=1, help="How many rows to print.")] = 10,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Draw memory against time: .svg or .png."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--write", metavar="DIR", help="Write the winner: its schedule, costs and layout."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Plan a run: cut layers into stages, place them, choose microbatches and a schedule, rank by time.

    Ctrl-C ends the search and keeps the best so far.

    Examples:
      penstock plan examples/models/llama-8b.toml
      penstock plan model.toml -p 16 --memory 80GB --batch 128 --explain
      penstock plan model.toml --jitter 0.05 --quantile 0.95 --json
      penstock plan model.toml -o frontier.svg --write best/
    """
    if output is not None and output.suffix.lower() not in (".svg", ".png"):
        raise typer.BadParameter(f"{output} does not end in .svg or .png; --write DIR writes the schedule")
    known = _model_from(model)
    with shown_progress() as told:
        made = make_plan(
            known,
            ranks=ranks,
            memory_limit=bytes_from(memory),
            samples=batch,
            stages_per_rank=stages_per_rank,
            objective=objective.value,
            seconds=seconds,
            seed=seed,
            jitter=noise,
            quantile=quantile,
            on_progress=told,
        )
        why = explain(made, told) if explained else None
    if output is not None:
        write_bytes(_drawn(made, output), output)
    written = made.write(folder) if folder is not None else []
    if as_json:
        typer.echo(json.dumps(_answer(made, why), indent=2))
    else:
        _print(made, why, top, written)


def _model_from(source: str) -> Model:
    try:
        return read_model(source)
    except FormatError as error:
        raise typer.BadParameter(str(error)) from None


def _drawn(made: Plan, output: Path) -> bytes:
    drawn = frontier_picture(made)
    if output.suffix.lower() == ".svg":
        from penstock.view.svg import svg_of  # noqa: PLC0415 -- most plans draw nothing

        return svg_of(drawn).encode()
    from penstock.view.png import png_of  # noqa: PLC0415 -- most plans draw nothing

    return png_of(drawn)


# --- what is printed -------------------------------------------------------------------------------


def _answer(made: Plan, why: Explanation | None) -> dict[str, Any]:
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
        "ranked": [made.to_keys(option) for option in made.options],
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
        "placement": configuration.placement.style,
        "microbatches": configuration.microbatches,
        "peak_memory": each.memory,
        "bound": each.bound,
    }


def _print(made: Plan, why: Explanation | None, top: int, written: list[Path]) -> None:
    width = shutil.get_terminal_size().columns
    console = Console(highlight=False, markup=False, width=max(width, 100))
    console.print(_table(made, top))
    if len(made.options) > top:
        console.print(f"and {len(made.options) - top} more: --top {len(made.options)}")
    console.print()
    console.print(frontier_text(made, width), soft_wrap=True)
    console.print()
    for line in _notes(made):
        console.print(line, soft_wrap=True)
    if why is not None:
        console.print("\nwhy it wins:")
        for line in why.why:
            console.print(f"  {line}", soft_wrap=True)
        console.print("\nwhat would help, most helpful first:")
        for each in why.what_ifs:
            change = f"{each.gain:.1%} faster" if each.gain >= 0 else f"{-each.gain:.1%} slower"
            console.print(f"  {change:>13}  {each.change}: {each.seconds:.4g} s by {each.best}", soft_wrap=True)
    if written:
        console.print(f"\nwritten: {', '.join(map(str, written))}", soft_wrap=True)


def _table(made: Plan, top: int) -> Table:
    table = Table(box=None, pad_edge=False)
    jitter = made.request.jitter
    time = "time" if jitter is None else f"p{made.request.quantile * 100:g}"
    table.add_column("", justify="right")
    table.add_column("schedule")
    for name in ("v", "placed", "m", "size", time, "samples/s", "bubble", "memory", "gap"):
        table.add_column(name, justify="right")
    for place, option in enumerate(made.options[:top], 1):
        configuration = option.configuration
        table.add_row(
            str(place),
            Text(printable(option.name)),
            str(configuration.stages_per_rank),
            configuration.placement.style,
            str(configuration.microbatches),
            str(configuration.samples),
            f"{option.seconds:.4g} s",
            f"{option.samples_per_second:.4g}",
            f"{option.timeline.bubble(made.request.objective):.1%}",
            size_text(option.memory),
            f"{option.gap:.1%}",
        )
    return table


def _notes(made: Plan) -> list[str]:
    """What the winner is in full, and what was left out."""
    best, request = made.best, made.request
    layout = request.model.layout(best.configuration.counts)
    cut = f"layers per stage {list(best.configuration.counts)}" if layout is None else f"layout {layout}"
    extra = best.configuration.costs.optimizer_step
    with_step = f", with {extra:g} s of optimizer step" if extra else ""
    found = [f"time is the {request.objective}{with_step}"]
    found.append(f"best: {best}, {cut}")
    if best.found_by:
        found.append(f"found by: {best.found_by}")
    bound = f"no order of any of these takes less than {made.bound:.4g} s; the best is {made.gap:.1%} above"
    found.append(bound if request.jitter is None else f"{bound} without jitter")
    if made.too_large:
        limit = "" if request.memory_limit is None else f" for {size_text(request.memory_limit)}"
        some = "; ".join(f"{each} holds {size_text(each.memory)}" for each in made.too_large[:3])
        rest = "; ..." if len(made.too_large) > 3 else ""
        found.append(f"too large{limit}: {len(made.too_large)} ({some}{rest})")
    if made.pruned:
        names = ", ".join(dict.fromkeys(each.name for each in made.pruned))
        found.append(f"not simulated, because their bounds show something better: {len(made.pruned)} ({names})")
    if made.not_evaluated:
        found.append(f"not evaluated, because of too many stages and microbatches: {made.not_evaluated}")
    if made.missing:
        found.append(f"not installed, so not used for searching: {', '.join(made.missing)}")
    if made.interrupted:
        found.append("interrupted: this is the best so far")
    return found
