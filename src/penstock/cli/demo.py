"""`penstock demo`: train a small GPT in pipelines here, measure, search a better schedule, and run that."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from penstock.cli.show import draw
from penstock.cost.costs import Costs
from penstock.families import build
from penstock.formats import write_bytes
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.simulation.calibration import calibrated, errors_by_kind
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.view.terminal import terminal

if TYPE_CHECKING:
    from penstock.runtime.demo.training import Step
    from penstock.runtime.local_ranks import LocalRanks

__all__ = ["demo"]

_COMPARED, _TRAINED, _PROFILED, _MEASURED = 3, 10, 8, 10  # steps
_SEARCHED = 10.0  # seconds
_MOST_RANKS = 4


def demo(
    *,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-p", min=2, max=8, help="How many; as many as processors, 2 to 4."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the picture goes, an .html file.")
    ] = Path("report.html"),
) -> None:
    """Show all of it: train a small GPT with 1F1B on processes of this machine, compare with one process,
    profile, predict, search a better schedule for the measured costs under the same memory, and run it.

    Examples:
      penstock demo
      penstock demo --ranks 4 -o demo.html
    """
    if output.suffix.lower() != ".html":
        raise typer.BadParameter(f"{output} does not end in .html")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {output.parent} for {output.name}")
    count = ranks or min(_MOST_RANKS, max(2, _processors()))
    from penstock.runtime.local_ranks import LocalRanks  # noqa: PLC0415 -- torch, which is an extra

    begun = time.monotonic()
    log = output.with_suffix(".jsonl")
    log.unlink(missing_ok=True)
    with LocalRanks(count) as started:
        run = _Run(
            started, Console(highlight=False, markup=False, width=max(shutil.get_terminal_size().columns, 80))
        )
        run.check(count)
        measured = run.train_and_search(count, log)
    write_bytes(draw("html", [picture for each in measured for picture in each.pictures]), output)
    for each in measured:
        for picture in each.pictures:
            run.say(f"{picture.schedule.name}: {picture.makespan * 1e3:.0f} ms")
            run.say(terminal(picture, run.console.width))
            run.say("")
    run.say(_errors(measured))
    run.say("")
    run.say(_table(measured))
    run.say(
        f"\n{output} has the timelines, predicted and measured; {log} has the training, step by step. "
        f"All of it took {time.monotonic() - begun:.0f} s."
    )


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2


@dataclass(frozen=True)
class _Measured:
    """One schedule: what was predicted, and the steps that were run."""

    predicted: Timeline
    steps: list[list[Step]]
    """By step and rank."""

    @property
    def timelines(self) -> list[Timeline]:
        return [ranks[0].timeline for ranks in self.steps]

    @property
    def seconds(self) -> float:
        return fmean(timeline.makespan for timeline in self.timelines)

    @property
    def pictures(self) -> Iterator[Timeline]:
        """What was predicted, and the measured step in the middle by length."""
        middle = sorted(self.timelines, key=lambda timeline: timeline.makespan)[len(self.steps) // 2]
        for what, timeline in (("predicted", self.predicted), ("measured", middle)):
            named = timeline.schedule.renamed(f"{timeline.schedule.name}, {what}")
            yield replace(timeline, schedule=named)

    @property
    def bubble(self) -> float:
        return fmean(timeline.bubble_rate for timeline in self.timelines)

    @property
    def live(self) -> int:
        return max(step.live for ranks in self.steps for step in ranks)


class _Run:
    """The demonstration as it goes along."""

    def __init__(self, ranks: LocalRanks, console: Console) -> None:
        self.ranks, self.console = ranks, console

    def say(self, text: str | Text | Table) -> None:
        self.console.print(text, soft_wrap=not isinstance(text, Table))

    def check(self, count: int) -> None:
        """The first steps against one process."""
        from penstock.runtime.verification import verdicts  # noqa: PLC0415 -- torch, which is an extra

        schedule = build("1f1b", ranks=count, microbatches=2 * count)
        self.say(
            f"A GPT of 8 layers learns a page of text, with {schedule.name} on {count} processes, "
            f"{schedule.microbatches} microbatches a step.\n"
        )
        with _waiting("comparing the first steps with one process"):
            (verdict,) = verdicts(
                "penstock.runtime.demo.gpt:model_and_batch", [schedule], steps=_COMPARED, ranks=self.ranks
            )
        worst = "" if verdict.gradient is None else f", worst gradient off by {verdict.gradient.error:.1e}"
        said = "the same as" if verdict.equal else "NOT the same as"
        self.say(f"Loss, gradients and weights of the first {_COMPARED} steps are {said} one process's{worst}.")
        if not verdict.equal:
            self.say(verdict.refused or verdict.cause)
            raise typer.Exit(1)

    def train_and_search(self, count: int, log: Path) -> list[_Measured]:
        """Train and profile, predict, search, and run what was found."""
        from penstock.runtime.demo.training import begin, end  # noqa: PLC0415 -- torch, which is an extra

        first, split = (build(name, ranks=count, microbatches=2 * count) for name in ("1f1b", "zb-h1"))
        self.ranks.run(begin, count, log.absolute())
        warm = self._steps("training with 1f1b", [first] * _TRAINED + [split])
        self.say(
            f"Training: loss {warm[0][0].loss:.3f} at first, {warm[-1][0].loss:.3f} after {len(warm)} steps."
        )
        # in turns, so that both see the same machine
        profiled = self._steps("profiling", [first, split] * _PROFILED)
        costs = calibrated([ranks[0].timeline for ranks in profiled])
        before = _Measured(simulate(profiled[0][0].timeline.schedule, costs), profiled[::2])
        with _waiting("searching for a better schedule"):
            found, by = _better(count, costs, memory=max(before.predicted.peak_memory))
        same = ", the very order of 1f1b" if found.ranks == first.ranks else ""
        self.say(f"Found for what that took, within the memory of 1f1b{same}: {by}.")
        self._steps("warming up", [found])
        steps = self._steps("running it in turns with 1f1b", [first, found] * _MEASURED)
        self.say(f"Loss after all steps: {steps[-1][0].loss:.3f}.")
        self.ranks.run(end)
        # a machine that others use too is not as fast now as it was before the search
        now = _Measured(before.predicted, steps[::2]).seconds / before.seconds
        self.say(
            f"1f1b now takes {now:.1%} of what it took when it was profiled; predictions are scaled by that.\n"
        )
        return [
            _Measured(simulate(taken[0][0].timeline.schedule, costs.scaled(now)), taken)
            for taken in (steps[::2], steps[1::2])
        ]

    def _steps(self, what: str, schedules: list[Schedule]) -> list[list[Step]]:
        """One step with each, with a bar where somebody watches."""
        from penstock.runtime.demo.training import train  # noqa: PLC0415 -- torch, which is an extra

        errors = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("step {task.completed} of {task.total}"),
            TextColumn("{task.fields[now]}"),
        )
        found = []
        with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
            task = bar.add_task(what, total=len(schedules), now="")
            for schedule in schedules:
                step = self.ranks.run(train, schedule)
                now = f"loss {step[0].loss:.3f}  {step[0].tokens / step[0].seconds:,.0f} tokens/s"
                bar.update(task, advance=1, now=now)
                found.append(step)
        return found


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    errors = Console(stderr=True)
    if errors.is_terminal:
        with errors.status(what):
            yield
    else:
        yield


def _better(count: int, costs: Costs, *, memory: float) -> tuple[Schedule, str]:
    """The best schedule for these costs that holds no more, and how it was found."""
    from penstock.search import search  # noqa: PLC0415 -- compiled code takes a second to load

    found = search(
        ranks=count,
        microbatches=2 * count,
        costs=costs,
        placement=Placement.loop(count),
        memory_limit=memory,
        seconds=_SEARCHED,
    )
    if found.interrupted:
        raise KeyboardInterrupt
    return found.schedule.renamed("found"), f"{found.found_by}, at most {found.gap:.1%} from the best possible"


# --- tables ----------------------------------------------------------------------------------------


def _errors(measured: list[_Measured]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    for name in ("kind", "predicted ms", "measured ms", "error"):
        table.add_column(name, justify="right")
    for each in measured:
        for row in errors_by_kind(each.predicted, each.timelines):
            times = (f"{seconds * 1e3:.2f}" for seconds in (row.predicted, row.measured))
            table.add_row(each.predicted.schedule.name, row.kind, *times, f"{row.error:+.1%}")
    return table


def _table(measured: list[_Measured]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    for name in ("predicted step", "measured step", "bubble", "peak live activations"):
        table.add_column(name, justify="right")
    for each in measured:
        times = (f"{seconds * 1e3:.1f} ms" for seconds in (each.predicted.makespan, each.seconds))
        table.add_row(each.predicted.schedule.name, *times, f"{each.bubble:.1%}", str(each.live))
    return table
