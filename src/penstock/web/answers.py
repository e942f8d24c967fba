"""Requests of the page about schedules, and their answers: JSON documents in and out."""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from io import BytesIO
from typing import Any

from penstock.arguments import plural, printable, whole_number
from penstock.cost.costs import Costs
from penstock.cost.memory import exceeds
from penstock.cost.presets import preset
from penstock.errors import FormatError, PenstockError
from penstock.families import Family, families, find
from penstock.formats import dumps, reads
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planning.layout import even_layout
from penstock.service import (
    Source,
    command_line,
    costs_file,
    costs_of_model,
    jitter_quantiles,
    order_of,
    prepare,
    python_lines,
    render,
    run_record,
)
from penstock.simulation.comparison import comparison_of
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.traces.read_trace import read_trace
from penstock.trainers import export_torchtitan
from penstock.validation import SendModel
from penstock.view.html import page_data

# A request of the page, parsed: schedules, costs and options, with every problem at once.

REQUEST = "request"
MAX_SCHEDULES = 8
"""In one request."""
MAX_WORK = 1 << 15
"""Stages times microbatches of a schedule: 32 ranks with 2 stages each and 512 microbatches."""
MAX_STEPS = 8 * MAX_WORK
"""Of a schedule, messages and collectives included."""
_FAMILY_KEYS = {"family", "ranks", "microbatches", "stages_per_rank", "group", "recompute", "offload", "name"}
_TEXT_KEYS = {"csv", "json", "name", "recompute", "offload"}


def expect(document: object, keys: Mapping[str, tuple[type, ...]], required: Sequence[str] = ()) -> Any:  # noqa: ANN401
    """The document, an object with these keys only, each of one of these types."""
    if not isinstance(document, dict):
        raise FormatError(REQUEST, [f"expected an object with the keys {', '.join(keys)}"])
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
        raise FormatError(REQUEST, problems)
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
        """Return one of the schedules, lowered on demand and as the send model needs."""
        source = self.schedules[index]
        return prepare(build_schedule(source), self.costs, **self.preparation(source))

    def preparation(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of `prepare` for one of the schedules."""
        policies = {key: source.get(key) or None for key in ("recompute", "offload")}
        return policies | {"lowered": self.lowered, "send_model": self.send_model}

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
            REQUEST, [f"schedules: expected 1 to {MAX_SCHEDULES} objects (given {len(schedules)})"]
        )
    limit, jitter = given.get("memory_limit"), given.get("jitter")
    problems = []
    if limit is not None and not 0 <= limit <= 1e18:
        problems.append(f"memory_limit: it must be from 0 to 1e18 bytes (given {limit})")
    if jitter is not None and not 0 <= jitter <= 1:
        problems.append(f"jitter: it must be a share from 0 to 1 (given {jitter})")
    if problems:
        raise FormatError(REQUEST, problems)
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
        raise FormatError(REQUEST, [f"weights: at most {MAX_WORK:,} (given {len(values):,})"])
    if wrong:
        numbers = "weights: expected numbers above 0 and at most 1e6"
        raise FormatError(REQUEST, [f"{numbers} (given {printable(repr(wrong[0]))})"])
    return tuple(map(float, values))


# --- schedules -------------------------------------------------------------------------------------


def build_schedule(source: Mapping[str, Any]) -> Schedule:
    """Return a family of these sizes, the text of a file, or lists of steps, without what `prepare` adds."""
    if "family" in source:
        built = _within_limits(_family(source).schedule())
        return built.renamed(source["name"]) if source.get("name") else built
    if "steps" in source:
        return _from_steps(source)
    given = expect(dict(source), dict.fromkeys(_TEXT_KEYS, (str,)))
    text_format = next((key for key in ("csv", "json") if given.get(key) is not None), None)
    if text_format is None:
        raise FormatError(REQUEST, ["a schedule has a family, the text of a csv or json file, or steps"])
    name = str(given.get("name") or "custom")
    return _within_limits(reads(given[text_format], text_format, source=printable(name), name=name))


def _family(source: Mapping[str, Any]) -> Source:
    types: dict[str, tuple[type, ...]] = dict.fromkeys(_FAMILY_KEYS, (str,))
    types |= dict.fromkeys(("ranks", "microbatches", "group"), (int,))
    given = expect(dict(source), types | {"stages_per_rank": (int, list)}, ["family", "ranks", "microbatches"])
    stages = given.get("stages_per_rank")
    counts = stages if isinstance(stages, list) else [given["ranks"] * (stages or 1)]
    _check_work(sum(whole_number(count) or 0 for count in counts), given["microbatches"])
    return Source(find(given["family"]).name, given["ranks"], given["microbatches"], stages, given.get("group"))


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
        raise FormatError(REQUEST, problems)
    _check_work(len(stages), given["microbatches"])
    _check_steps(sum(map(len, rows)))
    placement = Placement(tuple(stages))
    return Schedule(rows, placement, given["microbatches"], str(given.get("name") or "edited"))


def _check_work(stages: int, microbatches: int) -> None:
    if stages * microbatches > MAX_WORK:
        given = f"given {plural(stages, 'stage')}, {plural(microbatches, 'microbatch')}"
        problem = f"stages times microbatches can be at most {MAX_WORK:,} on this page ({given})"
        raise FormatError(REQUEST, [f"{problem}; the command line has no such limit"])


def _check_steps(count: int) -> None:
    if count > MAX_STEPS:
        raise FormatError(
            REQUEST, [f"a schedule can have at most {MAX_STEPS:,} steps on this page (given {count:,})"]
        )


def _within_limits(schedule: Schedule) -> Schedule:
    _check_work(schedule.num_stages, schedule.microbatches)
    _check_steps(schedule.num_steps)
    return schedule


# Answers about schedules under one cost model: the timelines to draw, and the row of each in the table.


def timeline_of(request: DrawRequest, index: int) -> Timeline:
    """One simulated schedule of a request, with its period."""
    schedule = request.schedule(index)
    costs = request.costs_for(schedule)
    return simulate(schedule, costs, send_model=request.send_model, with_period=True)


def row_of(timeline: Timeline, memory_limit: float | None) -> dict[str, Any]:
    """Return the row of `compare`, the reason for its bound, and whether it fits."""
    peak = max(timeline.peak_memory)
    return asdict(comparison_of(timeline)) | {
        "bound_reason": timeline.bound.because,
        "peak_memory_by_rank": timeline.peak_memory,
        "fits": memory_limit is None or not exceeds(peak, memory_limit),
    }


def compare(document: object) -> dict[str, Any]:
    """Draw several schedules on one time axis; one that cannot be built has an error instead of a row."""
    request = parse_request(document, {"what_if": (dict,)})
    change = WhatIf.parse(request.extra["what_if"])
    timelines: list[Timeline] = []
    entries: list[dict[str, Any]] = []
    for index in range(len(request.schedules)):
        try:
            entry, timeline = _entry(request, index, change)
        except PenstockError as error:
            entries.append({"error": str(error)})
            continue
        entries.append({"panel": len(timelines), **entry})
        timelines.append(timeline)
    limit = request.memory_limit if change is None else change.memory(request.memory_limit)
    return {
        "schedules": entries,
        "data": page_data(timelines),
        "memory_limit": limit,
        "what_if": None if change is None else str(change),
    }


def units(document: object) -> dict[str, Any]:
    """The units of times and sizes at these costs, as in a row."""
    given = parse_costs(expect(document, {"costs": (dict,)}).get("costs") or {}).units
    return {"row": {"time_unit": given.time_name, "memory_unit": given.memory_name}}


def _entry(request: DrawRequest, index: int, change: WhatIf | None) -> tuple[dict[str, Any], Timeline]:
    timeline = timeline_of(request, index)
    before = None
    if change is not None:
        before = row_of(timeline, request.memory_limit)
        changed = change.schedule(request, index, timeline.schedule)
        units = timeline.costs.units
        costs = replace(
            change.costs(request.costs_for(changed), changed),
            time_unit=units.time_name,
            memory_unit=units.memory_name,
        )
        timeline = simulate(changed, costs, send_model=request.send_model, with_period=True)
    limit = request.memory_limit if change is None else change.memory(request.memory_limit)
    entry = {
        "row": row_of(timeline, limit),
        "before": before,
        "costs": timeline.costs.to_keys(),
        "level": timeline.schedule.level,
        "stage_to_rank": timeline.schedule.placement.stage_to_rank,
        "steps": steps_of(timeline.schedule),
    }
    return entry, timeline


_MAX_EDITED = 4000
"""Steps of a schedule that is sent as texts too, to be edited."""


def steps_of(schedule: Schedule) -> list[list[str]] | None:
    """The texts of all steps, unless there are too many to edit."""
    if schedule.num_steps > _MAX_EDITED:
        return None
    return [schedule.texts(rank) for rank in range(schedule.num_ranks)]


def robustness(document: object) -> dict[str, Any]:
    """Quantiles of the makespan of each schedule when every step varies by `jitter`."""
    request = parse_request(document)
    found: list[dict[str, float] | None] = []
    for index in range(len(request.schedules)):
        try:
            schedule = request.schedule(index)
            costs = request.costs_for(schedule)
            quantiles = jitter_quantiles(schedule, costs, request.jitter or 0.0, request.send_model)
        except PenstockError:
            found.append(None)  # `compare` says why
            continue
        found.append(quantiles)
    return {"quantiles": found}


# What-if changes: a slow rank, a slow link, a larger microbatch, more memory.

_KINDS = ("slow-rank", "slow-link", "larger-microbatch", "memory")


@dataclass(frozen=True)
class WhatIf:
    """One change, by a factor."""

    kind: str
    factor: float
    index: int = 0
    """The rank, or the link (edge of the stage graph: from stage `index` to the next)."""

    @classmethod
    def parse(cls, document: Mapping[str, Any] | None) -> WhatIf | None:
        """From a request; None without a change."""
        if document is None:
            return None
        types: dict[str, tuple[type, ...]] = {"kind": (str,), "factor": (int, float), "index": (int,)}
        given = expect(document, types, ["kind", "factor"])
        problems = []
        if given["kind"] not in _KINDS:
            problems.append(f"what_if: kind is one of {', '.join(_KINDS)} (given {given['kind']})")
        if not 0 < given["factor"] <= 1000:
            problems.append(f"what_if: factor must be above 0 and at most 1000 (given {given['factor']})")
        if (given.get("index") or 0) < 0:
            problems.append(f"what_if: index must be at least 0 (given {given['index']})")
        if problems:
            raise FormatError(REQUEST, problems)
        return cls(given["kind"], float(given["factor"]), given.get("index") or 0)

    def __str__(self) -> str:
        return {
            "slow-rank": f"rank {self.index} takes {self.factor:g} times as long",
            "slow-link": f"the link from stage {self.index} to the next takes {self.factor:g} times as long",
            "larger-microbatch": f"microbatches are {self.factor:g} times as large, and so many fewer",
            "memory": f"{self.factor:g} times the memory",
        }[self.kind]

    def schedule(self, request: DrawRequest, index: int, given: Schedule) -> Schedule:
        """The schedule after the change: larger microbatches are fewer."""
        source = request.schedules[index]
        if self.kind != "larger-microbatch" or "family" not in source:
            return given
        fewer = max(1, round(given.microbatches / self.factor))
        group = source.get("group")
        changed = {**source, "microbatches": fewer, "group": None if group is None else min(group, fewer)}
        return replace(request, schedules=[changed]).schedule(0)

    def costs(self, costs: Costs, schedule: Schedule) -> Costs:
        """The costs after the change."""
        known = {"slow-rank": schedule.num_ranks, "slow-link": len(schedule.graph.edges)}.get(self.kind)
        if known is not None and self.index >= known:
            what = self.kind.removeprefix("slow-")
            raise FormatError(
                REQUEST, [f"what_if: it has {what}s 0 to {known - 1} (given {what} {self.index})"]
            )
        if self.kind == "slow-rank":
            stages = [self.factor if rank == self.index else 1.0 for rank in schedule.placement.stage_to_rank]
            return _multiplied(costs, {"stage": stages}, unit="seconds")
        if self.kind == "slow-link":
            edges = [self.factor if e == self.index else 1.0 for e in range(len(schedule.graph.edges))]
            slow = _multiplied(costs, {"edge": edges}, unit="seconds")
            return _multiplied(slow, {"edge": [1 / f for f in edges]}, unit="bytes_per_second")
        if self.kind == "larger-microbatch":
            return costs.with_larger_microbatches(self.factor)
        return costs

    def memory(self, limit: float | None) -> float | None:
        """The memory limit after the change."""
        return limit * self.factor if limit is not None and self.kind == "memory" else limit


def _multiplied(costs: Costs, factors: Mapping[str, list[float]], *, unit: str) -> Costs:
    """The costs of this unit, each entry times its factor."""
    changed: dict[str, Any] = {}
    for entry in fields(costs):
        own, value = factors.get(entry.metadata["per"]), getattr(costs, entry.name)
        if own and entry.metadata["unit"] == unit and value is not None:
            values = value if isinstance(value, tuple) else (value,) * len(own)
            changed[entry.name] = tuple(v * f for v, f in zip(values, own))
    return replace(costs, **changed)


# The Pareto chart: every family at these sizes by peak memory and time, with and without recomputation.

_MAX_SECONDS = 8.0
_REPORT_SECONDS = 0.3

OnPoints = Callable[[dict[str, Any]], None]


def pareto(
    document: object, on_points: OnPoints | None = None, seconds: float = _MAX_SECONDS
) -> dict[str, Any]:
    """One point for each family, group and technique that can be built at the sizes of the first schedule.

    `on_points` is called now and then with the answer so far. After so many seconds the rest is left out; plain
    families come first.
    """
    request = parse_request(document)
    first = request.schedule(0)
    sources = _sources(first.num_ranks, first.microbatches)
    points: list[dict[str, Any]] = []
    began = reported = time.monotonic()
    for number, source in enumerate(sources):
        now = time.monotonic()
        if points and now - began > seconds:
            return _frontier(points, number, sources)
        if on_points is not None and points and now - reported > _REPORT_SECONDS:
            on_points(_frontier(points, number, sources))
            reported = now
        try:
            points.append(_point(request, source))
        except PenstockError:  # a family that does not exist at these sizes
            continue
    return _frontier(points, len(sources), sources)


def _frontier(points: list[dict[str, Any]], tried: int, sources: list[dict[str, Any]]) -> dict[str, Any]:
    for point in points:
        point["optimal"] = not any(_dominates(other, point) for other in points)
    return {
        "points": sorted(points, key=lambda point: (point["makespan"], point["peak_memory"])),
        "tried": tried,
        "of": len(sources),
        "left_out": [_name(source) for source in sources[tried:]],
    }


def _name(source: dict[str, Any]) -> str:
    extras = [f"{key} {source[key]}" for key in ("group", "recompute") if key in source]
    return ", ".join([source["family"], *extras])


def _dominates(other: dict[str, Any], point: dict[str, Any]) -> bool:
    here, there = ((each["makespan"], each["peak_memory"]) for each in (point, other))
    return all(b <= a * (1 + 1e-12) for a, b in zip(here, there)) and any(
        b < a * (1 - 1e-12) for a, b in zip(here, there)
    )


def _sources(ranks: int, microbatches: int) -> list[dict[str, Any]]:
    """All families as they are, then with recomputation, then in other groups."""
    found = [
        source
        for family in families().values()
        if family.trains
        for source in _sources_of(family, ranks, microbatches)
    ]
    return sorted(found, key=lambda source: ("group" in source, "recompute" in source))


def _sources_of(family: Family, ranks: int, microbatches: int) -> Iterator[dict[str, Any]]:
    sizes = {"family": family.name, "ranks": ranks, "microbatches": microbatches}
    groups = family.typical_groups(ranks, microbatches) if family.smallest_group else []
    yield sizes
    for group in dict.fromkeys(groups[1:]):
        yield sizes | {"group": group}
    if not groups:
        yield sizes | {"recompute": "all"}


def _point(request: DrawRequest, source: dict[str, Any]) -> dict[str, Any]:
    one = replace(request, schedules=[source])
    schedule = one.schedule(0)
    timeline = simulate(schedule, one.costs_for(schedule), send_model=one.send_model)
    extras = ["recompute"] if "recompute" in source else []
    return {
        "schedule": source,
        "name": ", ".join([schedule.name, *extras]),
        "makespan": timeline.makespan,
        "peak_memory": max(timeline.peak_memory),
        "bubble": timeline.bubble_rate,
        "fits": request.memory_limit is None or not exceeds(max(timeline.peak_memory), request.memory_limit),
    }


# Traces that are dropped onto the page: the measured step over the predicted one, and the costs it gives.

_MAX_FILES = 64


class _NamedBytes(BytesIO):
    """An uploaded file."""

    def __init__(self, name: str, content: bytes) -> None:
        super().__init__(content)
        self.name = name


def measured(document: object) -> dict[str, Any]:
    """The record of `penstock read-trace --json --search 0`, and both timelines to draw."""
    given = expect(document, {"files": (list,), "step": (int,)}, ["files"])
    run = read_trace(_files(given["files"]), step=given.get("step"))
    shown = (("measured", run.timeline), ("predicted", run.predicted))
    named = [replace(timeline, schedule=timeline.schedule.renamed(name)) for name, timeline in shown]
    compute = run.schedule.only(kind for kind in Kind if kind.is_compute)
    return run_record(run, None) | {
        "data": page_data(named),
        "order_text": str(order_of(run.schedule)),
        "predicted_makespan": run.predicted.makespan,
        "stage_to_rank": compute.placement.stage_to_rank,
        "schedule": steps_of(compute),
    }


def _files(entries: Sequence[Any]) -> list[_NamedBytes]:
    """The uploaded files: names, and contents in base64."""
    if not 1 <= len(entries) <= _MAX_FILES:
        raise FormatError(REQUEST, [f"files: from 1 to {_MAX_FILES} (given {len(entries)})"])
    found = []
    for entry in entries:
        given = expect(entry, {"name": (str,), "base64": (str,)}, ["name", "base64"])
        try:
            content = b64decode(given["base64"], validate=True)
        except (Base64Error, ValueError):
            raise FormatError(REQUEST, [f"{printable(given['name'])}: the content is not base64"]) from None
        found.append(_NamedBytes(printable(given["name"]), content))
    return found


# --- downloads, and lines that reproduce the page --------------------------------------------------


_PICTURES = {"svg": "image/svg+xml", "png": "image/png", "html": "text/html", "trace": "application/json"}
_FILES = {"csv": "text/csv", "json": "application/json"}


def export(document: object) -> dict[str, Any]:
    """Return one format: a file of the schedules, or `lines`, the commands that reproduce the page."""
    request = parse_request(document, {"format": (str,), "layers": (int,)})
    wanted = request.extra["format"]
    if wanted == "lines":
        return _lines(request, request.extra["layers"])
    if wanted in _PICTURES:
        timelines = [timeline_of(request, index) for index in range(len(request.schedules))]
        name = _file_name(timelines[0].schedule, "trace.json" if wanted == "trace" else wanted)
        return {"file": name, "type": _PICTURES[wanted], "base64": _base64(render(wanted, timelines))}
    if wanted in _FILES:
        schedule = request.schedule(0)
        content = _base64(dumps(schedule, wanted).encode())
        return {"file": _file_name(schedule, wanted), "type": _FILES[wanted], "base64": content}
    raise FormatError(REQUEST, [f"format: one of {', '.join((*_FILES, *_PICTURES, 'lines'))} (given {wanted})"])


def _base64(content: bytes) -> str:
    return b64encode(content).decode()


def _file_name(schedule: Schedule, suffix: str) -> str:
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in schedule.name).strip("-")
    return f"{plain or 'schedule'}-p{schedule.num_ranks}-m{schedule.microbatches}.{suffix}"


def _lines(request: DrawRequest, layers: int | None) -> dict[str, Any]:
    """Return the command, the Python and the torchtitan flags of the first schedule, and the files they need.

    The file of a schedule that is no family has all that `prepare` adds.
    """
    schedule, given = request.schedule(0), request.schedules[0]
    costs = request.costs_for(schedule)
    options = request.preparation(given)
    if "family" in given:
        source = _family(given)
    else:
        source = Source(_file_name(schedule, "csv" if schedule.graph.is_chain else "json"))
        options = {"send_model": request.send_model}
    return {
        "command": command_line(source, costs, jitter=request.jitter, **options),
        "python": python_lines(source, costs, **options),
        "costs": costs_file(costs),
        "torchtitan": _torchtitan(schedule, layers or schedule.num_stages),
    }


def _torchtitan(schedule: Schedule, layers: int) -> dict[str, Any]:
    """The flags, or why torchtitan cannot run it."""
    try:
        made = export_torchtitan(schedule, even_layout(layers, schedule.num_stages))
    except PenstockError as error:
        return {"error": str(error)}
    return {"flags": list(made.flags), "notes": list(made.notes), "files": dict(made.files)}
