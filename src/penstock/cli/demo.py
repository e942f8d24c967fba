"""`penstock demo`: train a small GPT in a pipeline, profile it, search for a better schedule, and run that."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from penstock.cli.demo_page import DemoFacts, demo_page_head, machine_text
from penstock.cli.demo_report import MeasuredSchedule, kind_table, schedule_rows, schedule_table
from penstock.cli.demo_verdict import Gain, measured_gain
from penstock.cli.progress import spinner
from penstock.cli.rendering import print_table, require_suffix
from penstock.cost.costs import Costs
from penstock.families import build
from penstock.formats import write_bytes
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.processes import usable_cores
from penstock.simulation.calibration import calibrate
from penstock.simulation.simulator import simulate
from penstock.view.html import html
from penstock.view.terminal import terminal

if TYPE_CHECKING:
    from penstock.runtime.demo.training import Step
    from penstock.runtime.local_ranks import LocalRanks

__all__ = ["demo"]

_COMPARED, _TRAINED, _PROFILED, _MEASURED = 3, 10, 8, 20  # steps
_SEARCH_SECONDS = 10.0
_MAX_DEFAULT_RANKS = 4


DemoRanks: TypeAlias = Annotated[
    int | None,
    typer.Option("--ranks", "-p", min=2, max=8, help="Number of ranks; by default one per CPU, 2 to 4."),
]
ReportFile: TypeAlias = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="The report, an .html file.")
]


def demo(
    *,
    ranks: DemoRanks = None,
    output: ReportFile = Path("report.html"),
) -> None:
    """Train a small GPT with 1F1B, compare it with one process, profile it, predict its step time, search for a
    better schedule at the measured costs and the same memory, and run that schedule.

    Examples:
      penstock demo
      penstock demo --ranks 4 -o demo.html
    """
    require_suffix(output, (".html",))
    count = ranks or min(_MAX_DEFAULT_RANKS, max(2, usable_cores()))
    from penstock.runtime.local_ranks import LocalRanks  # noqa: PLC0415 -- torch, which is an extra

    started_at = time.monotonic()
    log = output.with_suffix(".jsonl")
    log.unlink(missing_ok=True)
    with LocalRanks(count) as started:
        run = _Demo(started, count)
        run.compare_with_one_process()
        measured = run.train_and_search(log)
    write_bytes(run.page(measured).encode(), output)
    run.report(measured)
    run.print(
        f"\n{output} shows this with predicted and measured timelines, {log} the log of every training step. "
        f"Total time: {time.monotonic() - started_at:.0f} s.\n"
    )
    gain = run.gain(measured)
    run.print(f"{gain.headline}\n{gain.reason}")


class _Demo:
    """The parts of the demonstration, in their order."""

    def __init__(self, ranks: LocalRanks, count: int) -> None:
        self.ranks, self.count = ranks, count
        self.check, self.losses = "", list[float]()
        width = max(shutil.get_terminal_size().columns, 80)
        self.console = Console(highlight=False, markup=False, width=width)

    def print(self, text: str | Text | Table) -> None:
        if isinstance(text, Table):
            print_table(text, self.console)
        else:
            self.console.print(text, soft_wrap=True)

    def compare_with_one_process(self) -> None:
        """Train the first steps in one process too, and compare."""
        from penstock.runtime.verification import verdicts  # noqa: PLC0415 -- torch, which is an extra

        schedule = build("1f1b", ranks=self.count, microbatches=self.count)
        self.print(
            f"Training a GPT with 8 layers on a short text: {schedule.name}, {self.count} processes, "
            f"{schedule.microbatches} microbatches per step.\n"
        )
        with spinner("comparing the first steps with one process"):
            (verdict,) = verdicts(
                "penstock.runtime.demo.gpt:model_and_batch", [schedule], steps=_COMPARED, ranks=self.ranks
            )
        worst = "" if verdict.gradient is None else f" (largest gradient error {verdict.gradient.error:.1e})"
        outcome = "match" if verdict.equal else "DO NOT match"
        self.check = (
            f"Loss, gradients and weights of the first {_COMPARED} steps {outcome} those of one process{worst}."
        )
        self.print(self.check)
        if not verdict.equal:
            self.print(verdict.rejected or verdict.cause)
            raise typer.Exit(1)

    def train_and_search(self, log: Path) -> list[MeasuredSchedule]:
        """Train and profile, predict, search, and run the schedule found beside 1F1B."""
        from penstock.runtime.demo.training import begin, end  # noqa: PLC0415 -- torch, which is an extra

        first, split = (build(name, ranks=self.count, microbatches=self.count) for name in ("1f1b", "zb-h1"))
        self.ranks.run(begin, self.count, log.absolute(), first.microbatches)
        trained = self._train("training with 1f1b", [first] * _TRAINED + [split])
        losses = f"loss {trained[0][0].loss:.3f} at the first step, {trained[-1][0].loss:.3f}"
        self.print(f"Training: {losses} after {len(trained)} steps.")
        # alternating, so that both run under the same load of the machine
        profiled = self._train("profiling", [first, split] * _PROFILED)
        costs = calibrate([ranks[0].timeline for ranks in profiled])
        before = MeasuredSchedule(simulate(profiled[0][0].timeline.schedule, costs), profiled[::2])
        # activations count 1 each here; receive buffers are real bytes
        live = max(float(memory.activations.max()) for memory in before.predicted.memory)
        found = self._search(first, costs, memory=live)
        self._train("warming up", [found])
        steps = self._train("running it, alternating with 1f1b", [first, found] * _MEASURED)
        self.print(f"Final loss: {steps[-1][0].loss:.3f}.")
        self.ranks.run(end)
        # the load of the machine may have changed since the profile
        scale = MeasuredSchedule(before.predicted, steps[::2]).seconds / before.seconds
        self.print(
            f"1f1b now takes {scale:.1%} of its profiled step time; predictions are scaled accordingly.\n"
        )
        return [
            MeasuredSchedule(simulate(taken[0][0].timeline.schedule, costs.scaled(scale)), taken)
            for taken in (steps[::2], steps[1::2])
        ]

    def report(self, measured: list[MeasuredSchedule]) -> None:
        """Print the timelines, and the tables of predictions and measurements."""
        for each in measured:
            for picture in each.pictures:
                self.print(f"{picture.schedule.name}: {picture.makespan * 1e3:.0f} ms")
                self.print(terminal(picture, self.console.width))
                self.print("")
        self.print(kind_table(measured))
        self.print("")
        self.print(schedule_table(measured))

    def gain(self, measured: list[MeasuredSchedule]) -> Gain:
        """The gain of the second schedule over the first, and the noise of both."""
        first, found = measured
        before, after = ([timeline.makespan for timeline in each.timelines] for each in measured)
        predicted = 1 - found.predicted.makespan / first.predicted.makespan
        same = first.predicted.schedule.ranks == found.predicted.schedule.ranks
        return measured_gain(before, after, predicted, same_order=same)

    def page(self, measured: list[MeasuredSchedule]) -> str:
        """The report as an HTML page."""
        gain = self.gain(measured)
        facts = DemoFacts(
            gain.headline, gain.reason, self.check, self.losses, schedule_rows(measured), machine_text()
        )
        pictures = [picture for each in measured for picture in each.pictures]
        return html(pictures, "penstock demo: a small GPT, trained in a pipeline", demo_page_head(facts))

    def _search(self, first: Schedule, costs: Costs, *, memory: float) -> Schedule:
        """The best schedule found at these costs within this memory."""
        from penstock.search import search  # noqa: PLC0415 -- compiled code takes a second to load

        with spinner("searching for a better schedule"):
            result = search(
                ranks=self.count,
                microbatches=first.microbatches,
                costs=costs,
                placement=Placement.loop(self.count),
                memory_limit=memory,
                seconds=_SEARCH_SECONDS,
            )
        if result.interrupted:
            raise KeyboardInterrupt
        same = ", the same order as 1f1b" if result.schedule.ranks == first.ranks else ""
        self.print(
            f"Schedule found for the measured costs within the memory of 1f1b{same}: "
            f"{result.found_by}, gap <= {result.gap:.1%}."
        )
        return result.schedule.renamed("found")

    def _train(self, description: str, schedules: list[Schedule]) -> list[list[Step]]:
        """One step with each schedule, with a progress bar on a terminal."""
        from penstock.runtime.demo.training import train  # noqa: PLC0415 -- torch, which is an extra

        stderr = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("step {task.completed} of {task.total}"),
            TextColumn("{task.fields[now]}"),
        )
        steps = []
        with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
            task = bar.add_task(description, total=len(schedules), now="")
            for schedule in schedules:
                step = self.ranks.run(train, schedule)
                now = f"loss {step[0].loss:.3f}  {step[0].tokens / step[0].seconds:,.0f} tokens/s"
                bar.update(task, advance=1, now=now)
                steps.append(step)
                self.losses.append(step[0].loss)
        return steps
