"""`penstock demo`: train a small GPT in a pipeline, profile it, search for a better schedule, and run that."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, TextColumn
from rich.table import Table

from penstock.arguments import plural
from penstock.cli.rendering import (
    empty_table,
    print_table,
    progress_bar,
    report_console,
    require_suffix,
    spinner,
)
from penstock.cost.costs import Costs
from penstock.families import build
from penstock.formats import write_bytes
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.processes import usable_cores
from penstock.simulation.calibration import calibrate, errors_by_kind
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.view.html import ascii_html, html
from penstock.view.terminal import terminal

if TYPE_CHECKING:
    from penstock.runtime.demo import Step
    from penstock.runtime.local_ranks import LocalRanks


_Z = 1.96  # 95 % of a normal distribution


@dataclass(frozen=True)
class Gain:
    """How much faster the schedule found is than the first one, as shares of the first one's step time."""

    measured: float
    noise: float
    """Half of the 95 % confidence interval of `measured`; `inf` for a single pair of steps."""
    predicted: float
    steps: int
    same_order: bool = False
    """Whether the search gave back the order of the first schedule."""

    @property
    def headline(self) -> str:
        """The result in one sentence, for someone who does not know schedules."""
        if self.same_order:
            return "1f1b is already the best schedule that the search finds for this machine and its memory."
        if abs(self.measured) <= self.noise:
            return "The schedule found and 1f1b are equally fast, as far as this run can tell."
        return (
            f"The schedule found trains {_change(self.measured)} than 1f1b, with the same memory and the same "
            f"results.{'' if self.measured > 0 else ' Keep 1f1b on this machine.'}"
        )

    @property
    def reason(self) -> str:
        """The gain, the noise, and what was predicted."""
        chance = f"with {self.steps} steps of each, up to {self.noise:.1%} is chance"
        if self.noise == inf:
            chance = "one step of each is too few to tell a gain from chance"
        if self.same_order:
            return f"There was nothing else to measure; {chance}."
        within = "within" if abs(self.measured) <= self.noise else "more than"
        busy = (
            " Other programs seem to use this machine: repeat it when they do not." if self.noise > 0.1 else ""
        )
        return (
            f"Measured: {_change(self.measured)} per step, which is {within} the noise of this run: {chance}. "
            f"The simulator predicted {_change(self.predicted)}.{busy}"
        )


def measured_gain(
    first: Sequence[float], found: Sequence[float], predicted: float, *, same_order: bool
) -> Gain:
    """The gain over pairs of steps, each measured one after the other, so that load changes both."""
    differences = [before - after for before, after in zip(first, found, strict=True)]
    whole, count = fmean(first), len(differences)
    noise = inf if count < 2 else _quantile(count - 1) * stdev(differences) / sqrt(count) / whole
    return Gain(fmean(differences) / whole, noise, predicted, count, same_order)


def _quantile(freedom: int) -> float:
    """Student's t for 95 %, by the expansion of Cornish and Fisher: 2.26 for 9 degrees of freedom."""
    first = (_Z**3 + _Z) / (4 * freedom)
    return _Z + first + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)


def _change(gain: float) -> str:
    if abs(gain) < 0.0005:
        return "0.0% faster"
    return f"{abs(gain):.1%} {'faster' if gain > 0 else 'slower'}"


@dataclass(frozen=True)
class MeasuredSchedule:
    """One schedule: the predicted timeline, and the measured steps."""

    predicted: Timeline
    steps: list[list[Step]]
    """By step and rank."""

    @property
    def timelines(self) -> list[Timeline]:
        """The measured timelines, one per step."""
        return [ranks[0].timeline for ranks in self.steps]

    @property
    def seconds(self) -> float:
        """The mean measured makespan."""
        return fmean(timeline.makespan for timeline in self.timelines)

    @property
    def pictures(self) -> Iterator[Timeline]:
        """The predicted timeline, and the measured one of median makespan; memory is in activations."""
        median = sorted(self.timelines, key=lambda timeline: timeline.makespan)[len(self.steps) // 2]
        for label, timeline in (("predicted", self.predicted), ("measured", median)):
            named = timeline.schedule.renamed(f"{timeline.schedule.name}, {label}")
            costs = replace(timeline.costs, activation_message=0, gradient_message=0)  # these are bytes
            yield replace(timeline, schedule=named, costs=costs)

    @property
    def row(self) -> list[str]:
        """Name, predicted and measured step time, measured bubble, and peak live activations of any rank."""
        times = (f"{seconds * 1e3:.1f} ms" for seconds in (self.predicted.makespan, self.seconds))
        bubble = fmean(timeline.bubble_rate for timeline in self.timelines)
        live = max(step.live for ranks in self.steps for step in ranks)
        return [self.predicted.schedule.name, *times, f"{bubble:.1%}", str(live)]


_COLUMNS = ("schedule", "predicted step", "measured step", "bubble", "peak live activations")


def _tables(measured: Sequence[MeasuredSchedule]) -> Iterator[Table]:
    """Mean times by kind of action, and the steps of each schedule; predicted and measured."""
    kinds = empty_table("schedule", "kind", "predicted ms", "measured ms", "error", left=1)
    steps = empty_table(*_COLUMNS, left=1)
    for each in measured:
        for row in errors_by_kind(each.predicted, each.timelines):
            times = (f"{seconds * 1e3:.2f}" for seconds in (row.predicted, row.measured))
            kinds.add_row(each.predicted.schedule.name, row.kind, *times, f"{row.error:+.1%}")
        steps.add_row(*each.row)
    yield from (kinds, steps)


_EXPLANATION = (
    "1f1b is the usual schedule; found is the order of the same work that the search found at the measured "
    "costs, within the memory of 1f1b. The bubble is the share of a step in which a process idles; live "
    "activations are the microbatches that a process holds in memory at once."
)
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 170, 46, 24


def demo_page_head(
    texts: Sequence[str], rows: Sequence[Sequence[str]], losses: Sequence[float], machine: str
) -> str:
    """Return an HTML fragment for above the timelines, without scripts.

    `texts` begin with the headline; the first of `rows` has the names of the columns.
    """
    headline, *others = map(ascii_html, texts)
    return "\n".join(
        [
            '<section class="report" aria-label="Result">',
            f"<h2>{headline}</h2>",
            *(f"<p>{text}</p>" for text in others),
            *_html_table(rows),
            f"<p>{_EXPLANATION}</p>",
            *_loss_curve(losses),
            f"<p>Machine: {ascii_html(machine)}</p>",
            "<p>Below, on one time axis: both schedules, as predicted and as measured; a row is a process.</p>",
            "</section>",
        ]
    )


def _machine() -> str:
    parts = [
        f"{_processor()}, {plural(usable_cores(), 'usable core')}",
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    ]
    if hasattr(os, "getloadavg"):
        parts.append(f"load average {os.getloadavg()[0]:.1f} at the end, processes of the demo included")
    return "; ".join(parts) + "."


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or "unknown processor"


def _html_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "<table>"
    for tag, row in zip(("th", *["td"] * len(rows)), rows):
        yield "<tr>" + "".join(f"<{tag}>{ascii_html(cell)}</{tag}>" for cell in row) + "</tr>"
    yield "</table>"


def _loss_curve(losses: Sequence[float]) -> Iterator[str]:
    """The loss of every step as a line, with its first and last value in words."""
    low, high, base = min(losses), max(losses), _HEIGHT - _BOTTOM
    across = (_WIDTH - _LEFT - 8) / max(len(losses) - 1, 1)
    up = (base - 12) / ((high - low) or 1.0)
    points = " ".join(
        f"{_LEFT + place * across:.1f},{12 + (high - loss) * up:.1f}" for place, loss in enumerate(losses)
    )
    name = f"Loss: {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}"
    yield f"<p>{name}.</p>"
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    yield f'<svg {size} role="img" aria-label="{name}">'
    yield f'<path d="M{_LEFT} 8V{base}H{_WIDTH - 8}" fill="none" stroke="currentColor" stroke-opacity=".4"/>'
    yield f'<polyline points="{points}" fill="none" stroke="#0072b2" stroke-width="2"/>'
    for x, y, anchor, text in (
        (_LEFT - 6, 16, "end", f"{high:.2f}"),
        (_LEFT - 6, base, "end", f"{low:.2f}"),
        (_LEFT, _HEIGHT - 6, "start", "step 1"),
        (_WIDTH - 8, _HEIGHT - 6, "end", f"step {len(losses)}"),
    ):
        yield f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="12" fill="currentColor">{text}</text>'
    yield "</svg>"


_COMPARED, _TRAINED, _PROFILED, _MEASURED = 3, 10, 8, 20  # steps
_SEARCH_SECONDS = 10.0
_MAX_DEFAULT_RANKS = 4


def demo(
    *,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-p", min=2, max=8, help="Number of ranks; by default one per CPU, 2 to 4."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The report, an .html file.")
    ] = Path("report.html"),
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
    gain = run.gain(measured)
    write_bytes(run.page(measured, gain).encode(), output)
    run.report(measured)
    run.print(
        f"{output} shows this with predicted and measured timelines, {log} the log of every training step. "
        f"Total time: {time.monotonic() - started_at:.0f} s.\n"
    )
    run.print(f"{gain.headline}\n{gain.reason}")


class _Demo:
    def __init__(self, ranks: LocalRanks, count: int) -> None:
        self.ranks, self.count = ranks, count
        self.check, self.losses = "", list[float]()
        self.console = report_console(80)
        self.print = self.console.print

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
                "penstock.runtime.demo:model_and_batch", [schedule], steps=_COMPARED, ranks=self.ranks
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
        from penstock.runtime.demo import begin, end  # noqa: PLC0415 -- torch, which is an extra

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
        for table in _tables(measured):
            print_table(table, self.console)
            self.print("")

    def gain(self, measured: list[MeasuredSchedule]) -> Gain:
        """The gain of the second schedule over the first, and the noise of both."""
        first, found = measured
        before, after = ([timeline.makespan for timeline in each.timelines] for each in measured)
        predicted = 1 - found.predicted.makespan / first.predicted.makespan
        same = first.predicted.schedule.ranks == found.predicted.schedule.ranks
        return measured_gain(before, after, predicted, same_order=same)

    def page(self, measured: list[MeasuredSchedule], gain: Gain) -> str:
        """The report as an HTML page."""
        rows = [_COLUMNS, *(each.row for each in measured)]
        head = demo_page_head([gain.headline, gain.reason, self.check], rows, self.losses, _machine())
        pictures = [picture for each in measured for picture in each.pictures]
        return html(pictures, "penstock demo: a small GPT, trained in a pipeline", head)

    def _search(self, first: Schedule, costs: Costs, *, memory: float) -> Schedule:
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
        from penstock.runtime.demo import train  # noqa: PLC0415 -- torch, which is an extra

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("step {task.completed} of {task.total}"),
            TextColumn("{task.fields[now]}"),
        )
        steps = []
        with progress_bar(*columns) as bar:
            task = bar.add_task(description, total=len(schedules), now="")
            for schedule in schedules:
                step = self.ranks.run(train, schedule)
                now = f"loss {step[0].loss:.3f}  {step[0].tokens / step[0].seconds:,.0f} tokens/s"
                bar.update(task, advance=1, now=now)
                steps.append(step)
                self.losses.append(step[0].loss)
        return steps
