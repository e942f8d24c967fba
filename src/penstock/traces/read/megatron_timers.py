"""Megatron-LM's timers: seconds of each rank per training step, from its log.

With `--timing-log-level 2 --timing-log-option all` the last rank prints, every `--log-interval` steps, means
per step and rank (`megatron/core/timers.py`):

    times across ranks (ms):
      forward-backward:
         rank  0: 812.11
         rank  1: 811.97
      forward-compute:
         rank  0: 201.50

These are sums over microbatches and model chunks, without an order. So the sizes must be given, and the result
is costs and a comparison, not a measured timeline. Ranks are numbered in Megatron's default order, in which the
pipeline is outermost: of r ranks in p pipeline ranks, rank n of the job is on pipeline rank n // (r / p).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from penstock.arguments import plural, printable
from penstock.cost.costs import Costs
from penstock.errors import Message, Parameter, TraceError
from penstock.families import build
from penstock.ir.schedule import Schedule
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.traces.read.files import OnRead, TraceSource, name_of, open_chunks

HEADER = "times across ranks (ms):"
_NAME = re.compile(r"  ([a-z][a-z0-9-]*):", re.ASCII)
_RANK = re.compile(r"     rank +([0-9]{1,7}): (\S+)", re.ASCII)
_STEP, _FORWARD, _BACKWARD = "forward-backward", "forward-compute", "backward-compute"
_MAX_PROBLEMS = 1000


@dataclass(frozen=True, eq=False)
class MegatronTimers:
    """Timers of a run, averaged over what was logged, without the first time if there are others."""

    source: str
    schedule: Schedule
    """The order that Megatron runs with these sizes."""
    steps: int
    """How many times the timers were logged."""
    seconds: Mapping[str, tuple[float, ...]]
    """Per timer: seconds per step of each pipeline rank, the mean of its ranks in the job."""

    @property
    def step_seconds(self) -> float:
        """The measured time of forwards and backwards of a step: the longest of all ranks."""
        return max(self.seconds[_STEP])

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank: seconds of a step without forward or backward compute."""
        busy = zip(self.seconds[_FORWARD], self.seconds[_BACKWARD])
        return tuple(max(self.step_seconds - sum(each), 0.0) for each in busy)

    @cached_property
    def costs(self) -> Costs:
        """Seconds of F and B of each stage: the stages of a rank share its time equally, and I = W = B / 2."""
        placement, m = self.schedule.placement, self.schedule.microbatches

        def per_stage(timer: str) -> tuple[float, ...]:
            return tuple(
                self.seconds[timer][rank] / m / len(placement.stages_of_rank[rank])
                for rank in placement.stage_to_rank
            )

        backward = per_stage(_BACKWARD)
        half = tuple(each / 2 for each in backward)
        return Costs(forward=per_stage(_FORWARD), backward_input=half, backward_weight=half, backward=backward)

    @cached_property
    def predicted(self) -> Timeline:
        """The schedule simulated at these costs, with free messages."""
        return simulate(self.schedule, self.costs, with_period=True)


def is_megatron_log(source: TraceSource) -> bool:
    """Return whether a source is a text that is not JSON."""
    with open_chunks(source) as chunks:
        return next(chunks, "").lstrip("\ufeff \t\r\n")[:1] not in ("{", "[", "")


def read_megatron_timers(
    source: TraceSource,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 1,
    on_read: OnRead | None = None,
) -> MegatronTimers:
    """Read the timers in a log of Megatron-LM: `ranks` is the pipeline size, `stages_per_rank` the virtual one.

    The family is 1f1b, or interleaved-1f1b with several stages per rank. Raises `TraceError` with all problems.
    """
    family = "1f1b" if stages_per_rank == 1 else "interleaved-1f1b"
    schedule = build(family, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    name = name_of(source)
    parser = _Parser(name)
    with open_chunks(source, on_read) as chunks:
        for number, line in enumerate(_lines(chunks), start=1):
            parser.add(number, line)
    return MegatronTimers(name, schedule, parser.blocks, parser.means(ranks))


def _lines(chunks: Iterable[str]) -> Iterator[str]:
    rest = ""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split("\n")
        yield from whole
        if len(rest) > 1 << 20:  # no line of a log is so long
            rest = rest[-(1 << 10) :]
    yield rest


class _Parser:
    """Takes lines one by one; timers are those under a header."""

    def __init__(self, name: str) -> None:
        self._name, self._problems = name, list[str | Message]()
        self._inside, self._timer, self._is_first = False, "", True
        self._sums: dict[str, dict[int, float]] = {}
        self.blocks = 0

    def add(self, number: int, line: str) -> None:
        """A line of the log; what is before a header or after its block is not about timers."""
        line = line.rstrip("\r")
        if line.endswith(HEADER):
            self._begin_block()
        elif self._inside and (match := _NAME.fullmatch(line)):
            self._timer = match[1]
        elif self._inside and self._timer and (match := _RANK.fullmatch(line)):
            self._add_time(number, int(match[1]), match[2])
        else:
            self._inside = False

    def _begin_block(self) -> None:
        self._inside, self._timer = True, ""
        if self.blocks == 1 and self._is_first:  # the first steps compile and allocate
            self._sums, self.blocks, self._is_first = {}, 0, False
        self.blocks += 1

    def _add_time(self, number: int, rank: int, text: str) -> None:
        if not re.fullmatch(r"[0-9]{1,15}\.[0-9]+", text, re.ASCII):
            self._problems.append(
                f"{self._name}: line {number}: not a number of milliseconds: {printable(text)}"
            )
            if len(self._problems) >= _MAX_PROBLEMS:
                raise TraceError(self._problems)
            return
        times = self._sums.setdefault(self._timer, {})
        times[rank] = times.get(rank, 0.0) + float(text) / 1e3

    def means(self, ranks: int) -> dict[str, tuple[float, ...]]:
        """Per timer and pipeline rank: seconds of a step."""
        if not self.blocks:
            self._problems.append(
                f"{self._name}: neither a JSON trace nor a log with {HEADER!r}; run Megatron-LM with "
                "--timing-log-level 2 --timing-log-option all"
            )
        else:
            self._problems += [
                f"{self._name}: no timer {timer}: run Megatron-LM with --timing-log-level 2"
                for timer in (_STEP, _FORWARD, _BACKWARD)
                if timer not in self._sums
            ]
        world = max((rank for times in self._sums.values() for rank in times), default=-1) + 1
        if world and world % ranks:
            logged = f"{self._name}: {plural(world, 'rank')} in the log cannot be pipelines with "
            self._problems.append(Message(logged, Parameter("ranks", ranks)))
        if self._problems:
            raise TraceError(self._problems)
        group = world // ranks
        return {
            timer: tuple(
                fmean(times.get(rank, 0.0) for rank in range(first, first + group)) / self.blocks
                for first in range(0, world, group)
            )
            for timer, times in self._sums.items()
        }
