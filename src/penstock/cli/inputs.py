"""Turns the values of shared options into schedules and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import typer

from penstock.arguments import did_you_mean, printable
from penstock.cli.options import (
    CostsSource,
    FamilyStages,
    GraphOption,
    Group,
    Lowered,
    MemoryLimit,
    MemorySize,
    Microbatches,
    OffloadOption,
    Ranks,
    RecomputeOption,
    Sharding,
    ShardingOption,
    parse_stages,
)
from penstock.cost.costs import Costs
from penstock.cost.presets import preset, presets
from penstock.errors import BuildError, FormatError, PlacementError, ScheduleError
from penstock.families import build, find
from penstock.formats import format_of, read
from penstock.ir.graph import StageGraph
from penstock.ir.placement import most_stages
from penstock.ir.schedule import Schedule
from penstock.lowering import AddCommunication, Offload, Pass, Policy, Recompute, lower, parse_policy
from penstock.search import FitMemory, PlaceSharding
from penstock.validation import SendModel

_FIT = "fit"
"""In place of a policy: what the memory limit needs."""


@dataclass(frozen=True)
class Sizes:
    """The options that a family is built with."""

    ranks: Ranks = None
    microbatches: Microbatches = None
    stages_per_rank: FamilyStages = None
    group: Group = None

    @property
    def given(self) -> list[str]:
        """The names of the options that are given."""
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]


@dataclass(frozen=True)
class GraphSizes(Sizes):
    """The options that a family is built with, also over a stage graph that is not a chain."""

    graph: GraphOption = None


@dataclass(frozen=True)
class Lowering:
    """The options that say how a schedule is lowered, and its costs, by which some of it is chosen."""

    lowered: Lowered = False
    sharding: ShardingOption = Sharding.look_ahead
    memory: MemoryLimit = None
    recompute: RecomputeOption = None
    offload: OffloadOption = None
    costs: CostsSource = None

    def __call__(self, schedule: Schedule, send_model: SendModel = SendModel.BUFFERED) -> Schedule:
        """The schedule with memory actions, and lowered, on demand."""
        given = {"--recompute": self.recompute, "--offload": self.offload}
        makers: dict[str, Callable[..., Pass]] = {"--recompute": Recompute, "--offload": Offload}
        passes = [
            makers[option](*_policy_from(option, text, schedule.num_stages))
            for option, text in given.items()
            if text not in (None, _FIT)
        ]
        if self._fits_memory:
            if self.memory is None:
                options = " and ".join(option for option, text in given.items() if text == _FIT)
                raise typer.BadParameter(f"{options} {_FIT} needs --memory, the limit to fit")
            wanted = (self.recompute == _FIT, self.offload == _FIT)
            passes.append(FitMemory(self.memory, costs_from(self.costs, self.memory), *wanted, send_model))
        if passes:
            with _about(" and ".join(option for option, text in given.items() if text is not None)):
                schedule = lower(schedule, passes)
        return self._lowered(schedule, send_model)

    @property
    def _fits_memory(self) -> bool:
        return _FIT in (self.recompute, self.offload)

    def _lowered(self, schedule: Schedule, send_model: SendModel) -> Schedule:
        by_cost = self.sharding is Sharding.cost
        if by_cost and not self.lowered:
            raise typer.BadParameter("--sharding cost places actions that --lowered adds; give both")
        if self.memory is not None and not by_cost and not self._fits_memory:
            raise typer.BadParameter(
                f"--memory needs one of --sharding cost, --recompute {_FIT} and --offload {_FIT}; give one too"
            )
        if not self.lowered:
            return schedule
        with _about("--lowered"):
            if not by_cost:
                return lower(schedule)
            place = PlaceSharding(costs_from(self.costs, self.memory), self.memory, send_model)
            return lower(schedule, [place] if schedule.table.has_communication else [AddCommunication(), place])


@contextmanager
def _about(options: str) -> Iterator[None]:
    """A pass that does not match a valid schedule is a usage error of these options."""
    try:
        yield
    except ScheduleError as error:
        if not error.argument:
            raise
        raise typer.BadParameter(f"{options}: {error}") from None


def _policy_from(option: str, text: str | None, stages: int) -> tuple[tuple[int, ...] | None, Policy]:
    try:
        return parse_policy(text or "", stages)
    except ScheduleError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def read_schedule(path: Path) -> Schedule:
    """Read a file; a suffix that no schedule format has is a usage error, not an invalid schedule."""
    try:
        format_of(path)
    except FormatError as error:
        raise typer.BadParameter(str(error)) from None
    return read(path)


def is_file(source: str) -> bool:
    """Whether it names a file rather than a family; what exists and is no family is taken for one."""
    if Path(source).suffix or "/" in source:
        return True
    try:
        find(source)
    except BuildError:
        return Path(source).exists()
    return False


def schedule_from(
    source: str,
    sizes: Sizes,
    lowering: Lowering | None = None,
    send_model: SendModel = SendModel.BUFFERED,
) -> Schedule:
    """Read a file, which has its own sizes, or build a family, which needs them; lower it on demand."""
    if is_file(source):
        if sizes.given:
            raise typer.BadParameter(
                f"{source} is a file with its own sizes; remove {' and '.join(sizes.given)}"
            )
        schedule = read_schedule(Path(source))
    else:
        find(source)  # an unknown name is the first error
        if sizes.ranks is None or sizes.microbatches is None:
            missing = [option for option in ("--ranks", "--microbatches") if option not in sizes.given]
            example = f"{source} --ranks 4 --microbatches 8"
            raise typer.BadParameter(f"{source} needs {' and '.join(missing)}, e.g. {example}")
        schedule = build(
            source,
            ranks=sizes.ranks,
            microbatches=sizes.microbatches,
            stages_per_rank=None if sizes.stages_per_rank is None else parse_stages(sizes.stages_per_rank),
            graph=graph_from(sizes.graph) if isinstance(sizes, GraphSizes) else None,
            group=sizes.group,
        )
    return schedule if lowering is None else lowering(schedule, send_model)


def given_schedule_from(source: str | None, sizes: Sizes) -> Schedule | None:
    """The schedule of the option --schedule; None without it, which leaves no use for sizes."""
    if source is None and sizes.given:
        raise typer.BadParameter(f"{' and '.join(sizes.given)}: only with --schedule; give it too")
    return None if source is None else schedule_from(source, sizes)


def graph_from(source: str | None) -> StageGraph | None:
    """The stage graph of these edges, or of the schedule in a file."""
    if source is None:
        return None
    if is_file(source):
        return read_schedule(Path(source)).graph
    try:
        return StageGraph.parse(source)
    except PlacementError as error:
        raise typer.BadParameter(f"--graph: {error}") from None


def for_send_model(schedule: Schedule, send_model: SendModel, *, blocking_receives: bool = False) -> Schedule:
    """The schedule with SEND and RECV where the send model, or blocking receives, are about them."""
    needed = blocking_receives or not send_model.is_buffered
    if not needed or schedule.table.has_communication or schedule.num_ranks == 1:
        return schedule
    return lower(schedule, [AddCommunication()])


def schedules_from(
    sources: Sequence[str], sizes: Sizes, microbatches: Sequence[int] = (), groups: Sequence[int] = ()
) -> Iterator[Schedule]:
    """Files and families mixed, each family once per microbatch count and group, if several are given.

    With several sources, stages per rank and groups apply only to families that leave them open.
    """
    several = [Sizes(microbatches=m) for m in microbatches[:1]] + [Sizes(group=g) for g in groups[:1]]
    if all(map(is_file, sources)) and (given := [name for each in (sizes, *several) for name in each.given]):
        raise typer.BadParameter(f"files have their own sizes; remove {', '.join(given)}")
    for source in sources:
        if is_file(source):
            yield schedule_from(source, Sizes())
            continue
        own, family = sizes, find(source)
        counts: Sequence[int | None] = microbatches or [sizes.microbatches]
        own_groups: Sequence[int | None] = groups or [sizes.group]
        stages = sizes.stages_per_rank and most_stages(parse_stages(sizes.stages_per_rank))
        if len(sources) > 1 and family.stages_per_rank not in (None, stages):
            own = replace(own, stages_per_rank=None)
        if len(sources) > 1 and family.smallest_group is None:
            own_groups = [None]
        for m, group in product(counts, own_groups):
            yield schedule_from(source, replace(own, microbatches=m, group=group))


def costs_from(source: str | None, memory: MemorySize | None = None) -> Costs:
    """Costs from a file or a preset, unit costs by default; bytes can limit only costs in bytes."""
    costs = _read_costs(source)
    if memory is not None and memory.unit and not costs.units.bytes:
        given = "without --costs" if source is None else f"in {printable(source)}"
        raise typer.BadParameter(
            f"--memory has the unit {memory.unit}, but memory is counted in activations {given}: give --memory "
            "as a number of activations, or costs in bytes"
        )
    return costs


def _read_costs(source: str | None) -> Costs:
    if source is None:
        return Costs()
    if Path(source).suffix.lower() in (".json", ".toml"):
        try:
            return Costs.read(source)
        except FormatError as error:
            raise typer.BadParameter(str(error)) from None
    if source not in presets():
        known = presets()
        if files := [path for suffix in (".toml", ".json") if (path := Path(source + suffix)).exists()]:
            raise typer.BadParameter(
                f"--costs: there is no preset {printable(source)}; did you mean {files[0]}?"
            )
        raise typer.BadParameter(
            f"--costs is a .json or .toml file, or a preset (given {printable(source)})"
            f"{did_you_mean(source, known)} (presets: {', '.join(known)})"
        )
    return preset(source)
