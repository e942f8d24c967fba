"""The options that several commands share, each declared once, and the schedules and costs they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from penstock.arguments import printable
from penstock.bounds import OBJECTIVES
from penstock.cli.usage_errors import ValueNameError, error_message, option_name
from penstock.cost.costs import Costs
from penstock.cost.presets import presets
from penstock.errors import FormatError, PlacementError
from penstock.families import families, find
from penstock.formats import format_of, read
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import SEND_WAITS
from penstock.ir.placement import most_stages
from penstock.ir.schedule import Schedule
from penstock.lowering import TORCH_PASSES, SendBudget, lower
from penstock.service import FIT, Source, add_memory_actions, is_file, place_sharding, read_costs
from penstock.validation import SendModel


def completing(known: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return the shell completion of known names; where none begins so, the shell falls back to files."""

    def complete(prefix: str) -> list[str]:
        return [name for name in known() if name.startswith(prefix)]

    return complete


def one_of(name: str, known: Iterable[object], convert: Callable[[str], Any] = str) -> dict[str, Any]:
    """Return the parser and the completion of an option, or argument, whose value is one of these names."""
    names = list(map(str, known))

    def parse(given: object) -> Any:  # noqa: ANN401 -- what `convert` returns
        text = str(given)
        if text not in names:
            raise ValueNameError(name, names, text)
        return convert(text)

    return {"parser": parse, "autocompletion": completing(lambda: names)}


def choice(option: str, known: Sequence[str], text: str, short: str = "", panel: str | None = None) -> Any:  # noqa: ANN401
    """Return an option of typer whose value is one of these names."""
    names = [option, short] if short else [option]
    values = one_of(option, known)
    return typer.Option(*names, metavar="|".join(known), help=text, rich_help_panel=panel, **values)


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for end, base in (("B", 1000), ("iB", 1024))
}


class MemorySize(float):
    """A memory limit: bytes, or activations where costs are relative; `unit` is what was typed, or empty."""

    unit = ""


def parse_bytes(text: str) -> MemorySize:
    """A number of bytes, with or without a unit."""
    number = text.strip().rstrip("BGKMTi")
    unit = text.strip()[len(number) :]
    try:
        size = MemorySize(float(number) * float(_UNITS[unit]))
    except (ValueError, KeyError):
        size = MemorySize(-1.0)
    if not 0 <= size < float("inf"):
        raise typer.BadParameter(f"--memory is a number of bytes, e.g. 80e9, 80GB or 74.5GiB (given {text})")
    size.unit = unit
    return size


def parse_stages(text: str) -> int | list[int]:
    """One number for all ranks, or one for each, separated by commas."""
    try:
        return [int(part) for part in text.split(",")] if "," in text else int(text)
    except ValueError:
        raise typer.BadParameter(
            f"--stages-per-rank is a number, or one for each rank such as 1,2,2,1 (given {text})"
        ) from None


def quantile_from(quantile: float | None, jitter: float | None) -> float:
    """The value of --quantile, which needs --jitter."""
    if quantile is not None and jitter is None:
        raise typer.BadParameter("--quantile needs --jitter: without it no step varies")
    return 0.95 if quantile is None else quantile


ScheduleSource: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        help="A schedule family (see penstock list), or a .csv or .json file.",
        autocompletion=completing(families),
    ),
]
ScheduleSources: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME|FILE...",
        help="Families, or .csv or .json files.",
        autocompletion=completing(families),
    ),
]
Ranks: TypeAlias = Annotated[int | None, typer.Option("--ranks", "-p", help="Number of pipeline ranks.")]
Microbatches: TypeAlias = Annotated[
    int | None, typer.Option("--microbatches", "-m", help="Number of microbatches.")
]
FamilyStages: TypeAlias = Annotated[
    str | None,
    typer.Option(
        *("--stages-per-rank", "-v"),
        metavar="NUMBER|LIST",
        help="Number of stages per rank, or one for each rank: 1,2,2,1.",
    ),
]
Group: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--group",
        help="Microbatch group size of interleaved families, p to m (Megatron: "
        "microbatch-group-size-per-vp-stage).",
    ),
]
GraphOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--graph",
        metavar="EDGES|FILE",
        help="Stage graph: edges such as '0>1,1>2,0>2', or a schedule file that has one.",
    ),
]
GivenSchedule: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME|FILE",
        help="The schedule of the run: a file, or a family with -p and -m.",
        autocompletion=completing(families),
    ),
]
Lowered: TypeAlias = Annotated[
    bool, typer.Option("--lowered", help="Add communication, sharding and gradient reduction.")
]
TorchVersion: TypeAlias = Annotated[
    str | None,
    choice("--torch", tuple(TORCH_PASSES), "With --lowered: the lists that this version of torch makes."),
]
SendBudgetOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--send-budget",
        metavar="NUMBER",
        help="Wait for sends earlier: so many of a rank may be pending. Needs waits, as of --torch 2.15.",
    ),
]
CostsSource: TypeAlias = Annotated[
    str | None,
    typer.Option(
        *("--costs", "-c"),
        metavar="FILE|PRESET",
        help="Cost model: a .json or .toml file, or a preset.",
        autocompletion=completing(presets),
    ),
]
MemoryLimit: TypeAlias = Annotated[
    MemorySize | None,
    typer.Option(
        "--memory",
        metavar="BYTES",
        help="Memory limit per rank, e.g. 80e9, 80GB or 74.5GiB; at unit costs a number of activations.",
        parser=parse_bytes,
    ),
]
SEND_MODELS = ", ".join(map(str, SendModel))
PARSE_SEND_MODEL = one_of("--send-model", SendModel, SendModel)
SendModelOption: TypeAlias = Annotated[
    SendModel,
    typer.Option(
        "--send-model",
        metavar="MODEL",
        help=f"Send model: {SEND_MODELS}. All but buffered add SEND and RECV where the schedule has none.",
        **PARSE_SEND_MODEL,
    ),
]
ObjectiveOption: TypeAlias = Annotated[str, choice("--objective", OBJECTIVES, "Objective to minimize.")]
JitterShare: TypeAlias = Annotated[
    float | None,
    typer.Option("--jitter", metavar="SHARE", help="Vary the time of every action by this share, e.g. 0.05."),
]
Quantile: TypeAlias = Annotated[
    float | None,
    typer.Option("--quantile", help="With --jitter: rank by this quantile; 0.95 unless given."),
]
Seed: TypeAlias = Annotated[int, typer.Option("--seed", help="Random seed.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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
        return [option_name(name) for name, value in vars(self).items() if value is not None]


@dataclass(frozen=True)
class GraphSizes(Sizes):
    """The options that a family is built with, also over a stage graph that is not a chain."""

    graph: GraphOption = None


@dataclass(frozen=True)
class Lowering:
    """The options that say how a schedule is lowered, and its costs, by which some of it is chosen."""

    lowered: Lowered = False
    torch: TorchVersion = None
    send_budget: SendBudgetOption = None
    sharding: Annotated[
        str,
        choice(
            "--sharding",
            ("look-ahead", "cost"),
            "With --lowered: unshard the next 3 stages, or as simulation says is fastest within --memory.",
        ),
    ] = "look-ahead"
    memory: MemoryLimit = None
    recompute: Annotated[
        str | None,
        typer.Option(
            "--recompute",
            metavar="[STAGES:]POLICY",
            help="Recompute forwards: all, every=N, longer=N actions, stages such as 0-2 or 0,3:every=2, or "
            "fit: what --memory needs.",
        ),
    ] = None
    offload: Annotated[
        str | None,
        typer.Option(
            "--offload", metavar="[STAGES:]POLICY", help="Offload activations to the host: as --recompute."
        ),
    ] = None
    costs: CostsSource = None

    def __call__(self, schedule: Schedule, send_model: SendModel = SendModel.BUFFERED) -> Schedule:
        """Return the schedule with memory actions, and lowered, on demand."""
        fitted = [option_name(name) for name in ("recompute", "offload") if getattr(self, name) == FIT]
        if fitted and self.memory is None:
            raise typer.BadParameter(f"{' and '.join(fitted)} {FIT} needs --memory, the limit to fit")
        by_cost = self.sharding == "cost"
        if by_cost and not self.lowered:
            raise typer.BadParameter("--sharding cost places actions that --lowered adds; give both")
        if self.torch is not None and not self.lowered:
            raise typer.BadParameter("--torch names whose actions --lowered adds; give both")
        if self.torch is not None and by_cost:
            raise typer.BadParameter("--torch and --sharding cost: give one of the two")
        if self.memory is not None and not by_cost and not fitted:
            raise typer.BadParameter(
                f"--memory needs one of --sharding cost, --recompute {FIT} and --offload {FIT}; give one too"
            )
        costs = costs_from(self.costs, self.memory) if fitted or by_cost else Costs()
        limited = self.memory, send_model
        schedule = add_memory_actions(schedule, costs, self.recompute, self.offload, *limited)
        if by_cost:
            schedule = place_sharding(schedule, costs, *limited)
        elif self.lowered:
            schedule = lower(schedule, torch=self.torch)
        if self.send_budget is None:
            return schedule
        if not schedule.table.has(*SEND_WAITS):
            raise typer.BadParameter("--send-budget needs waits for sends: add --lowered --torch 2.15")
        return lower(schedule, [SendBudget(self.send_budget)])


@contextmanager
def usage_errors() -> Iterator[None]:
    """Raise what is wrong with a file as wrong usage: the command is about another file."""
    try:
        yield
    except FormatError as error:
        raise typer.BadParameter(error_message(error)) from None


def read_schedule(path: Path) -> Schedule:
    """Read a file; a suffix that no schedule format has is a usage error, not an invalid schedule."""
    with usage_errors():
        format_of(path)
    return read(path)


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
        stages = None if sizes.stages_per_rank is None else parse_stages(sizes.stages_per_rank)
        graph = graph_from(sizes.graph) if isinstance(sizes, GraphSizes) else None
        schedule = Source(source, sizes.ranks, sizes.microbatches, stages, sizes.group, graph).schedule()
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
    with usage_errors():
        costs = read_costs(source)
    if memory is not None and memory.unit and not costs.units.bytes:
        given = "without --costs" if source is None else f"in {printable(source)}"
        raise typer.BadParameter(
            f"--memory has the unit {memory.unit}, but memory is counted in activations {given}: give --memory "
            "as a number of activations, or costs in bytes"
        )
    return costs
