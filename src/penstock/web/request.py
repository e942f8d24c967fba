"""A request of the page, parsed: schedules, costs and options, with every problem at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from penstock.arguments import plural, printable, whole_number
from penstock.cost.costs import Costs
from penstock.cost.presets import preset
from penstock.errors import FormatError
from penstock.families import build
from penstock.formats import reads
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.lowering import AddCommunication, Offload, Recompute, lower, parse_policy
from penstock.validation import SendModel
from penstock.web.limits import MAX_SCHEDULES, MAX_STEPS, MAX_WORK

SOURCE = "request"
_FAMILY_KEYS = {"family", "ranks", "microbatches", "stages_per_rank", "group", "recompute", "offload", "name"}
_TEXT_KEYS = {"csv", "json", "name", "recompute", "offload"}


def expect(document: object, keys: Mapping[str, tuple[type, ...]], required: Sequence[str] = ()) -> Any:  # noqa: ANN401
    """The document, an object with these keys only, each of one of these types."""
    if not isinstance(document, dict):
        raise FormatError(SOURCE, [f"expected an object with the keys {', '.join(keys)}"])
    problems = [
        f"{printable(str(key))}: unknown key; use {', '.join(keys)}" for key in document if key not in keys
    ]
    problems += [f"{key}: missing" for key in required if document.get(key) is None]
    for key, types in keys.items():
        value = document.get(key)
        if value is not None and (
            not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        ):
            names = " or ".join(sorted({each.__name__ for each in types}))
            problems.append(f"{key}: expected {names} (given {printable(repr(value))})")
    if problems:
        raise FormatError(SOURCE, problems)
    return document


@dataclass(frozen=True)
class DrawRequest:
    """Schedules to draw at one set of costs, and the options of the drawing."""

    schedules: Sequence[Mapping[str, Any]]
    costs: Costs
    weights: tuple[float, ...] = ()
    """Relative work of equal parts of the model, first to last; empty if all are alike."""
    same_model: bool = False
    """Whether `costs` are those of a rank's whole share, to be divided over its stages."""
    send_model: SendModel = SendModel.BUFFERED
    lowered: bool = False
    memory_limit: float | None = None
    jitter: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def schedule(self, index: int) -> Schedule:
        """One of the schedules, lowered on demand and as the send model needs."""
        built = build_schedule(self.schedules[index])
        if self.lowered:
            return lower(built)
        if self.send_model.is_buffered or built.table.has_communication or built.num_ranks == 1:
            return built
        return lower(built, [AddCommunication()])

    def costs_for(self, schedule: Schedule) -> Costs:
        """The costs of this schedule's stages."""
        if not self.same_model and not self.weights:
            return self.costs
        sizes = (schedule.num_ranks, schedule.num_stages)
        return costs_of_model(self.costs, *sizes, self.weights, divide=self.same_model)


_REQUEST_KEYS: dict[str, tuple[type, ...]] = {
    "schedules": (list,),
    "costs": (dict,),
    "weights": (list,),
    "same_model": (bool,),
    "send_model": (str,),
    "lowered": (bool,),
    "memory_limit": (int, float),
    "jitter": (int, float),
}


def parse_request(document: object, extra: Mapping[str, tuple[type, ...]] | None = None) -> DrawRequest:
    """Parse the body of a request; `extra` are the keys of one kind of request."""
    more = extra or {}
    given = expect(document, _REQUEST_KEYS | dict(more), ["schedules"])
    schedules = given["schedules"]
    if not schedules or len(schedules) > MAX_SCHEDULES or not all(isinstance(each, dict) for each in schedules):
        raise FormatError(
            SOURCE, [f"schedules: expected 1 to {MAX_SCHEDULES} objects (given {len(schedules)})"]
        )
    limit, jitter = given.get("memory_limit"), given.get("jitter")
    problems = []
    if limit is not None and not 0 <= limit <= 1e18:
        problems.append(f"memory_limit: it must be from 0 to 1e18 bytes (given {limit})")
    if jitter is not None and not 0 <= jitter <= 1:
        problems.append(f"jitter: it must be a share from 0 to 1 (given {jitter})")
    if problems:
        raise FormatError(SOURCE, problems)
    return DrawRequest(
        schedules,
        parse_costs(given.get("costs") or {}),
        parse_weights(given.get("weights") or []),
        bool(given.get("same_model")),
        SendModel.of(given.get("send_model") or "buffered"),
        lowered=bool(given.get("lowered")),
        memory_limit=None if limit is None else float(limit),
        jitter=None if jitter is None else float(jitter),
        extra={key: given.get(key) for key in more},
    )


def parse_costs(document: Mapping[str, Any]) -> Costs:
    """Costs by the name of a preset, or by the keys of a cost file."""
    if set(document) == {"preset"}:
        return preset(str(document["preset"]))
    return Costs.from_keys(dict(document), source="costs")


def parse_weights(values: Sequence[Any]) -> tuple[float, ...]:
    """The relative work of equal parts of the model."""
    wrong = [v for v in values if isinstance(v, bool) or not isinstance(v, int | float) or not 0 < v <= 1e6]
    if len(values) > MAX_WORK:
        raise FormatError(SOURCE, [f"weights: at most {MAX_WORK:,} (given {len(values):,})"])
    if wrong:
        numbers = "weights: expected numbers above 0 and at most 1e6"
        raise FormatError(SOURCE, [f"{numbers} (given {printable(repr(wrong[0]))})"])
    return tuple(map(float, values))


# --- schedules -------------------------------------------------------------------------------------


def build_schedule(source: Mapping[str, Any]) -> Schedule:
    """A family of these sizes, the text of a file, or lists of steps."""
    if "family" in source:
        return _with_memory_actions(_family(source), source)
    if "steps" in source:
        return _from_steps(source)
    keys = dict.fromkeys(_TEXT_KEYS, (str,))
    given = expect(dict(source), keys)
    text_format = next((key for key in ("csv", "json") if given.get(key) is not None), None)
    if text_format is None:
        raise FormatError(SOURCE, ["a schedule has a family, the text of a csv or json file, or steps"])
    name = str(given.get("name") or "custom")
    read = reads(given[text_format], text_format, source=printable(name), name=name)
    return _with_memory_actions(_within_limits(read), given)


def _family(source: Mapping[str, Any]) -> Schedule:
    types: dict[str, tuple[type, ...]] = dict.fromkeys(_FAMILY_KEYS, (str,))
    types |= dict.fromkeys(("ranks", "microbatches", "group"), (int,))
    given = expect(dict(source), types | {"stages_per_rank": (int, list)}, ["family", "ranks", "microbatches"])
    stages = given.get("stages_per_rank")
    counts = stages if isinstance(stages, list) else [given["ranks"] * (stages or 1)]
    total = sum(whole_number(count) or 0 for count in counts)
    _check_work(total, given["microbatches"])
    built = build(
        given["family"],
        ranks=given["ranks"],
        microbatches=given["microbatches"],
        stages_per_rank=stages,
        group=given.get("group"),
    )
    return _within_limits(built.renamed(given["name"]) if given.get("name") else built)


def _from_steps(source: Mapping[str, Any]) -> Schedule:
    types = {"steps": (list,), "stage_to_rank": (list,), "microbatches": (int,), "name": (str,)}
    given = expect(dict(source), types, ["steps", "stage_to_rank", "microbatches"])
    rows, stages = given["steps"], given["stage_to_rank"]
    problems = []
    if not all(isinstance(row, list) and all(isinstance(step, str) for step in row) for row in rows):
        problems.append("steps: expected a list of texts for each rank")
    if not all(type(rank) is int for rank in stages):
        problems.append("stage_to_rank: expected the rank of each stage")
    if problems:
        raise FormatError(SOURCE, problems)
    _check_work(len(stages), given["microbatches"])
    _check_steps(sum(map(len, rows)))
    placement = Placement(tuple(stages))
    return Schedule(rows, placement, given["microbatches"], str(given.get("name") or "edited"))


def _with_memory_actions(schedule: Schedule, source: Mapping[str, Any]) -> Schedule:
    makers = {"recompute": Recompute, "offload": Offload}
    stages = schedule.num_stages
    passes = [make(*parse_policy(source[key], stages)) for key, make in makers.items() if source.get(key)]
    return lower(schedule, passes) if passes else schedule


def _check_work(stages: int, microbatches: int) -> None:
    if stages * microbatches > MAX_WORK:
        given = f"given {plural(stages, 'stage')}, {plural(microbatches, 'microbatch')}"
        problem = f"stages times microbatches can be at most {MAX_WORK:,} on this page ({given})"
        raise FormatError(SOURCE, [f"{problem}; the command line has no such limit"])


def _check_steps(count: int) -> None:
    if count > MAX_STEPS:
        raise FormatError(
            SOURCE, [f"a schedule can have at most {MAX_STEPS:,} steps on this page (given {count:,})"]
        )


def _within_limits(schedule: Schedule) -> Schedule:
    _check_work(schedule.num_stages, schedule.microbatches)
    _check_steps(schedule.num_steps)
    return schedule


# --- costs of one model ----------------------------------------------------------------------------


def costs_of_model(costs: Costs, ranks: int, stages: int, weights: Sequence[float], *, divide: bool) -> Costs:
    """The costs of each stage when the same model is cut into more stages.

    `weights` are the relative work of equal parts of the model: stage s of n does part s * len(weights) // n.
    With `divide`, `costs` are those of one stage per rank, and a stage gets its share of seconds and bytes.
    Messages stay as they are: a cut has the same size wherever it is.
    """
    share = ranks / stages if divide else 1.0
    part = [weights[s * len(weights) // stages] * share for s in range(stages)] if weights else [share] * stages
    changed: dict[str, Any] = {}
    for entry in fields(costs):
        value = getattr(costs, entry.name)
        if entry.metadata["per"] == "stage" and value and not isinstance(value, tuple):
            scaled = [value * factor for factor in part]
            changed[entry.name] = scaled[0] if len(set(scaled)) == 1 else tuple(scaled)
    return replace(costs, **changed)
