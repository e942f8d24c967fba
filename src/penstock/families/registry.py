"""The registry of families: find a family by name, build its schedule, register a new one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from penstock.arguments import did_you_mean, plural, printable, whole_number
from penstock.errors import BuildError, Message, Parameter, PenstockError
from penstock.families.depth_order import topological_placement
from penstock.families.rank_order import keep_stages
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement, StagesPerRank, most_stages, problems_of_counts
from penstock.ir.schedule import Schedule

# Unequal numbers of stages per rank: the order for equally many, without the stages that a rank does not have.
#
#     penstock show interleaved-1f1b -p 3 -m 3 -v 1,2,1
#
#     time    0                   5                   10                  15                  20
#     rank 0  0F0 0F1 0F2 ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   0B0──── 0B1──── 0B2────
#     rank 1  ·   1F0 1F1 1F2 2F0 2F1 2F2 ·   2B0──── ·   2B1──── ·   2B2──── 1B0──── 1B1──── 1B2──── ·   ·
#     rank 2  ·   ·   ·   ·   ·   3F0 3B0──── 3F1 3B1──── 3F2 3B2──── ·   ·   ·   ·   ·   ·   ·   ·   ·   ·
#
# A microbatch passes the ranks v times, v the largest number, and skips the ranks that have no stage there: the
# first ranks keep their first stages, the last ranks their last. Leaving out stages removes work and waits and
# adds none, so the order is valid, and takes no more time or memory than with v stages on every rank.


def leave_out_stages(schedule: Schedule, stages_per_rank: StagesPerRank) -> Schedule:
    """The schedule without the stages that its ranks do not have."""
    whole = schedule.placement
    placement = whole.with_stages_per_rank(stages_per_rank)
    if placement == whole or isinstance(stages_per_rank, int):
        return schedule
    kept = whole.kept_stages(stages_per_rank)
    rows = [keep_stages(row, kept) for row in schedule.table.rows]
    return Schedule.from_codes(rows, placement, schedule.microbatches, schedule.name)


MAX_WORK = 1 << 24
"""The largest product of stages and microbatches that `build` accepts."""
_MOST_MICROBATCHES = 1_000_000
"""Fewer than an action can name: some families build for a few more, and drop them."""
_ALMOST = 0.85
"""Similarity from which on one of torch's names is meant, which messages do not list."""

Builder = Callable[..., Schedule]
"""Takes ranks, microbatches and stages_per_rank, and in families with groups the keyword `group`."""
GraphBuilder = Callable[[StageGraph, Placement, int], Schedule]


@dataclass(frozen=True)
class Family:
    """A named schedule generator: `builder(ranks, microbatches, stages_per_rank)` returns a schedule."""

    name: str
    summary: str
    builder: Builder = field(repr=False)
    stages_per_rank: int | None = None
    """The number of stages on every rank; None if the caller chooses it."""
    default_stages_per_rank: int = 2
    """The number of stages per rank if the caller does not choose one."""
    aliases: tuple[str, ...] = ()
    graph_builder: GraphBuilder | None = field(default=None, repr=False)
    """`graph_builder(graph, placement, microbatches)` returns a schedule; None if the family needs a chain."""
    smallest_group: Callable[[int], int] | None = field(default=None, repr=False)
    """The smallest `group` for a number of ranks; None if the family has no groups."""
    trains: bool = True
    """Whether its schedules have backwards."""

    def group_range(self, ranks: int, microbatches: int) -> range:
        """The values that `group` can have: from the smallest to all microbatches; empty without groups."""
        if self.smallest_group is None:
            return range(0)
        return range(min(self.smallest_group(ranks), microbatches), microbatches + 1)

    def typical_groups(self, ranks: int, microbatches: int) -> list[int]:
        """A few values of `group` to choose from: the smallest, 1.5 and 2 times the ranks, all microbatches."""
        allowed = self.group_range(ranks, microbatches)
        few = [*allowed[:1], ranks + ranks // 2, 2 * ranks, *allowed[-1:]]
        return sorted({size for size in few if size in allowed})


_REGISTRY: dict[str, Family] = {}
_BY_KEY: dict[str, Family] = {}


def register(
    name: str,
    summary: str,
    *,
    stages_per_rank: int | None = None,
    default_stages_per_rank: int = 2,
    aliases: Sequence[str] = (),
    graph_builder: GraphBuilder | None = None,
    smallest_group: Callable[[int], int] | None = None,
    trains: bool = True,
) -> Callable[[Builder], Builder]:
    """Register a function that takes ranks, microbatches and stages_per_rank and returns a `Schedule`.

    With `graph_builder`, a function of graph, placement and microbatches, the family accepts any stage graph.
    With `smallest_group`, a function of the number of ranks, it also takes the keyword `group`, an int or None.
    `trains=False` is for schedules without backwards, which are no candidates for training.
    A package registers its families on installation with an entry point in the group `penstock.families` that
    names the module which registers them.
    """

    def decorate(builder: Builder) -> Builder:
        family = Family(
            *(name, summary, builder, stages_per_rank, default_stages_per_rank),
            aliases=tuple(aliases),
            graph_builder=graph_builder,
            smallest_group=smallest_group,
            trains=trains,
        )
        keys = [_key(each) for each in (name, *aliases)]
        if owners := sorted({_BY_KEY[key].name for key in keys if key in _BY_KEY}):
            raise BuildError(f"the name {name!r} or one of its aliases is already used by {', '.join(owners)}")
        _REGISTRY[name] = family
        _BY_KEY.update(dict.fromkeys(keys, family))
        return builder

    return decorate


def register_over_graphs(name: str, summary: str) -> Callable[[GraphBuilder], Builder]:
    """Register a function of graph, placement and microbatches, for a chain of one stage per rank unless given.

    The decorated name becomes the function of ranks, microbatches and stages_per_rank.
    """

    def decorate(graph_builder: GraphBuilder) -> Builder:
        def builder(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
            placement = Placement.loop(ranks, stages_per_rank)
            return graph_builder(StageGraph.chain(ranks), placement, microbatches)

        builder.__name__, builder.__doc__ = graph_builder.__name__, graph_builder.__doc__
        return register(name, summary, stages_per_rank=1, graph_builder=graph_builder)(builder)

    return decorate


def families() -> dict[str, Family]:
    """Return all families by name."""
    _load_plugins()
    return dict(_REGISTRY)


def build(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: StagesPerRank | None = None,
    graph: StageGraph | None = None,
    placement: Placement | None = None,
    group: int | None = None,
) -> Schedule:
    """Build the compute-only schedule of a family.

    Case, dashes and underscores in the name do not matter, and torch's names work: `build("ZBVZeroBubble",
    ranks=4, microbatches=8)`. `stages_per_rank` is for families that accept any number of them; as a list, it
    has a number for each rank, also for V families: `[1, 2, 2, 1]`. `group` is for interleaved families: the
    number of consecutive microbatches of a stage before the rank's next stage, from the number of ranks
    (depth-first) to all microbatches (breadth-first). With `graph`, for families over any stage graph, stages
    are on ranks as in `placement`; without one, in the order of the graph, about equally many on each rank.
    """
    family = find(name)
    group_problems = [] if group is None else _group_problems(family, ranks, microbatches, group)
    if graph is not None and not group_problems:
        return _build_on_graph(family, graph, placement, ranks, microbatches, stages_per_rank)
    if placement is not None and graph is None:
        raise BuildError(f"{family.name}: a placement needs a graph=; without one the family has its own")
    counts = [] if stages_per_rank is None else problems_of_counts(ranks, stages_per_rank)
    most = None if stages_per_rank is None or counts else most_stages(stages_per_rank)
    if problems := counts + _problems(family, ranks, microbatches, most) + group_problems:
        raise BuildError(Message.join("; ", problems))
    per_rank = most or family.stages_per_rank or family.default_stages_per_rank
    per_rank_text = plural(per_rank, "stage per rank", "stages per rank")
    given = f"{plural(ranks, 'rank')}, {per_rank_text}, {plural(microbatches, 'microbatch')}"
    _check_work(ranks * per_rank, microbatches, given)
    built = family.builder(ranks, microbatches, per_rank, **({} if group is None else {"group": group}))
    if not isinstance(built, Schedule):
        raise BuildError(f"{family.name}: its function must return a Schedule (given {printable(repr(built))})")
    return leave_out_stages(built, per_rank if stages_per_rank is None else stages_per_rank)


def _build_on_graph(
    family: Family,
    graph: StageGraph,
    placement: Placement | None,
    ranks: int,
    microbatches: int,
    stages_per_rank: StagesPerRank | None,
) -> Schedule:
    """The schedule of a family over a stage graph."""
    if not isinstance(graph, StageGraph):
        raise BuildError(Parameter("graph"), f" must be a StageGraph (given {printable(repr(graph))})")
    if not isinstance(placement, Placement | None):
        raise BuildError(Parameter("placement"), f" must be a Placement (given {printable(repr(placement))})")
    problems = _problems(family, ranks, microbatches, None)
    if family.graph_builder is None:
        others = ", ".join(f.name for f in families().values() if f.graph_builder is not None)
        problems.append(f"{family.name} needs stages in a chain; any stage graph works with {others}")
    if stages_per_rank is not None:
        problems.append(graph_and_stages(stages_per_rank))
    if placement is not None and (placement.num_stages, placement.num_ranks) != (graph.num_stages, ranks):
        problems.append(
            f"the placement has {plural(placement.num_stages, 'stage')} on "
            f"{plural(placement.num_ranks, 'rank')}, the graph {plural(graph.num_stages, 'stage')} "
            f"(given {plural(ranks, 'rank')})"
        )
    if problems or family.graph_builder is None:
        raise BuildError(Message.join("; ", problems))
    given = f"{plural(graph.num_stages, 'stage')}, {plural(microbatches, 'microbatch')}"
    _check_work(graph.num_stages, microbatches, given)
    return family.graph_builder(graph, placement or topological_placement(graph, ranks), microbatches)


def graph_and_stages(stages_per_rank: object) -> Message:
    """Return the refusal of a graph together with a number of stages per rank."""
    stages = Parameter("stages_per_rank", stages_per_rank)
    return Message("give ", Parameter("graph"), ", which has its stages, or ", stages, ", not both")


def _check_work(stages: int, microbatches: int, given: str) -> None:
    if stages * microbatches > MAX_WORK:
        raise BuildError(f"stages times microbatches must be at most {MAX_WORK} (given {given})")
    if microbatches > _MOST_MICROBATCHES:
        raise BuildError(f"microbatches must be at most {_MOST_MICROBATCHES} (given {given})")


def _problems(
    family: Family, ranks: int, microbatches: int, stages_per_rank: int | None
) -> list[str | Message]:
    """List the arguments that are not positive integers or that the family does not support."""
    problems: list[str | Message] = [
        Message(Parameter(what), f" must be a whole number of at least 1 (given {value!r})")
        for what, value in (
            ("ranks", ranks),
            ("microbatches", microbatches),
            ("stages_per_rank", 1 if stages_per_rank is None else stages_per_rank),
        )
        if (whole_number(value) or 0) < 1
    ]
    fixed = family.stages_per_rank
    if fixed is not None and stages_per_rank not in (None, fixed):
        others = ", ".join(f.name for f in families().values() if f.stages_per_rank is None)
        problems.append(
            f"{family.name} has {plural(fixed, 'stage')} per rank (given {stages_per_rank!r}); "
            f"any number works with {others}"
        )
    return problems


def _group_problems(family: Family, ranks: int, microbatches: int, group: int) -> list[str | Message]:
    """List what is wrong with the group: not an integer, none in this family, or out of range."""
    number = whole_number(group)
    if number is None:
        return [Message(Parameter("group"), f" must be a whole number (given {group!r})")]
    if family.smallest_group is None:
        others = ", ".join(f.name for f in families().values() if f.smallest_group)
        instead = f" (given {group!r}): remove it, or use {others}"
        return [Message(f"{family.name} has no ", Parameter("group"), instead)]
    if (whole_number(ranks) or 0) < 1 or (whole_number(microbatches) or 0) < 1:
        return []  # reported, and the range depends on them
    allowed = family.group_range(ranks, microbatches)
    if number in allowed:
        return []
    given = f"given {number}, with {plural(ranks, 'rank')} and {plural(microbatches, 'microbatch')}"
    text = f" of {family.name} must be from {allowed[0]} to {allowed[-1]}, the microbatches ({given})"
    smaller = [f.name for f in families().values() if number in f.group_range(ranks, microbatches) and f.trains]
    others = f"; {', '.join(smaller)} can have {number}" if smaller else ""
    return [Message(Parameter("group"), text, others)]


def _key(name: str) -> str:
    return "".join(c for c in name.lower() if c not in "-_ ")


def find(name: str) -> Family:
    """Return the family with this name; case, dashes and underscores do not matter."""
    family = _BY_KEY.get(_key(name))
    if family is None:
        _load_plugins()
        family = _BY_KEY.get(_key(name))
    if family is None:
        aliases = [alias for each in _REGISTRY.values() for alias in each.aliases]
        guess = did_you_mean(name, aliases, _ALMOST) or did_you_mean(name, _REGISTRY)
        raise BuildError(f"unknown family {printable(name)!r}{guess} (known: {', '.join(_REGISTRY)})")
    return family


@cache
def _load_plugins() -> None:
    from importlib.metadata import entry_points  # noqa: PLC0415 -- it takes a tenth of the start-up time

    for entry_point in entry_points(group="penstock.families"):
        entry_point.load()


# The schedules of families that have a given placement of a chain of stages.


def training_families(placement: Placement) -> list[Family]:
    """The families with backwards that can have as many stages per rank."""
    most = max(map(len, placement.stages_of_rank))
    return [each for each in families().values() if each.trains and each.stages_per_rank in (None, most)]


def schedule_on(name: str, placement: Placement, microbatches: int) -> Schedule | None:
    """The schedule of a family; None if it has another placement, or does not support these numbers."""
    counts = [len(own) for own in placement.stages_of_rank]
    try:
        schedule = build(name, ranks=placement.num_ranks, microbatches=microbatches, stages_per_rank=counts)
    except PenstockError:
        return None
    return schedule if schedule.placement == placement else None


def offloading_schedules(placement: Placement, microbatches: int) -> Iterator[Schedule]:
    """The schedules of the families that offload activations by themselves."""
    for family in training_families(placement):
        schedule = schedule_on(family.name, placement, microbatches)
        if schedule is not None and schedule.table.has(Kind.OFFLOAD):
            yield schedule
