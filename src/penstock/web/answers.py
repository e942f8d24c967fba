"""Requests of the page and their answers: pure functions from a JSON document to a JSON document."""

from __future__ import annotations

import json
import signal
import threading
import time
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from io import BytesIO
from itertools import islice, pairwise, product
from math import isfinite
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from penstock.arguments import plural, printable, whole_number
from penstock.cost.costs import Costs
from penstock.cost.memory import exceeds
from penstock.cost.presets import preset, presets
from penstock.cost.prices import edge_prices, step_seconds
from penstock.errors import FormatError, PenstockError
from penstock.families import Family, families, find
from penstock.formats import dumps, reads
from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.encoding import Bools
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import PASS_KINDS, Kind, StageRelation
from penstock.ir.messages import VALUES
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planning.layout import even_layout
from penstock.search import Progress, SearchResult
from penstock.search import search as run_search
from penstock.service import (
    TIMELINE_FORMATS,
    Source,
    check_record,
    command_line,
    comparison_record,
    costs_file,
    costs_of_model,
    family_records,
    jitter_quantiles,
    order_of,
    prepare,
    python_lines,
    render,
    run_record,
    search_record,
)
from penstock.simulation.simulator import message_waits, simulate
from penstock.simulation.timeline import Timeline
from penstock.traces.read.measured_run import read_trace
from penstock.trainers import export_torchtitan
from penstock.validation import SendModel, validate
from penstock.view.html import page_data
from penstock.web.lessons import judge, lesson_catalogue

REQUEST = "request"
MAX_SCHEDULES = 8
"""In one request."""
MAX_WORK = 1 << 15
"""Stages times microbatches of a schedule: 32 ranks with 2 stages each and 512 microbatches."""
MAX_STEPS = 8 * MAX_WORK
"""Of a schedule, messages and collectives included."""
_TEXT_KEYS: dict[str, tuple[type, ...]] = dict.fromkeys(("csv", "json", "name", "recompute", "offload"), (str,))
_FAMILY_KEYS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("family", "recompute", "offload", "name"), (str,)),
    **dict.fromkeys(("ranks", "microbatches", "group"), (int,)),
    "stages_per_rank": (int, list),
}


def refuse(*problems: str) -> None:
    """Raise what is wrong with a request, if anything is."""
    if problems:
        raise FormatError(REQUEST, problems)


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
    refuse(*problems)
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

    def timeline(self, schedule: Schedule, costs: Costs | None = None, *, with_period: bool = True) -> Timeline:
        """Return a schedule simulated at these costs, or at its own."""
        own = costs or self.costs_for(schedule)
        return simulate(schedule, own, send_model=self.send_model, with_period=with_period)


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
    if not 1 <= len(schedules) <= MAX_SCHEDULES or not all(isinstance(each, dict) for each in schedules):
        refuse(f"schedules: expected 1 to {MAX_SCHEDULES} objects (given {len(schedules)})")
    limits = {"memory_limit": (1e18, "from 0 to 1e18 bytes"), "jitter": (1, "a share from 0 to 1")}
    numbers = {key: None if given.get(key) is None else float(given[key]) for key in limits}
    refuse(
        *(
            f"{key}: it must be {limits[key][1]} (given {given[key]})"
            for key, value in numbers.items()
            if value is not None and not 0 <= value <= limits[key][0]
        )
    )
    return DrawRequest(
        schedules,
        parse_costs(given.get("costs") or {}),
        parse_weights(given.get("weights") or []),
        bool(given.get("same_model")),
        SendModel.of(given.get("send_model") or "buffered"),
        lowered=bool(given.get("lowered")),
        extra={key: given.get(key) for key in more},
        **numbers,
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
        refuse(f"weights: at most {MAX_WORK:,} (given {len(values):,})")
    if wrong:
        refuse(f"weights: expected numbers above 0 and at most 1e6 (given {printable(repr(wrong[0]))})")
    return tuple(map(float, values))


# --- schedules -------------------------------------------------------------------------------------


def build_schedule(source: Mapping[str, Any]) -> Schedule:
    """Return a family of these sizes, the text of a file, or lists of steps, without what `prepare` adds."""
    if "family" in source:
        built = _within_limits(_family(source).schedule())
        return built.renamed(source["name"]) if source.get("name") else built
    if "steps" in source:
        return _from_steps(source)
    given = expect(source, _TEXT_KEYS)
    text_format = next((key for key in ("csv", "json") if given.get(key) is not None), None)
    if text_format is None:
        raise FormatError(REQUEST, ["a schedule has a family, the text of a csv or json file, or steps"])
    name = str(given.get("name") or "custom")
    return _within_limits(reads(given[text_format], text_format, source=printable(name), name=name))


def _family(source: Mapping[str, Any]) -> Source:
    given = expect(source, _FAMILY_KEYS, ["family", "ranks", "microbatches"])
    stages = given.get("stages_per_rank")
    counts = stages if isinstance(stages, list) else [given["ranks"] * (stages or 1)]
    _check_work(sum(whole_number(count) or 0 for count in counts), given["microbatches"])
    return Source(find(given["family"]).name, given["ranks"], given["microbatches"], stages, given.get("group"))


def _from_steps(source: Mapping[str, Any]) -> Schedule:
    types = {"steps": (list,), "stage_to_rank": (list,), "microbatches": (int,), "name": (str,)}
    given = expect(source, types, ["steps", "stage_to_rank", "microbatches"])
    rows, stages = given["steps"], given["stage_to_rank"]
    problems = []
    if not all(isinstance(row, list) and all(isinstance(step, str) for step in row) for row in rows):
        problems.append("steps: expected a list of texts for each rank")
    if not all(type(rank) is int for rank in stages):
        problems.append("stage_to_rank: expected the rank of each stage")
    refuse(*problems)
    _check_work(len(stages), given["microbatches"])
    _check_steps(sum(map(len, rows)))
    placement = Placement(tuple(stages))
    return Schedule(rows, placement, given["microbatches"], str(given.get("name") or "edited"))


def _check_work(stages: int, microbatches: int) -> None:
    if stages * microbatches > MAX_WORK:
        given = f"given {plural(stages, 'stage')}, {plural(microbatches, 'microbatch')}"
        problem = f"stages times microbatches can be at most {MAX_WORK:,} on this page ({given})"
        refuse(f"{problem}; the command line has no such limit")


def _check_steps(count: int) -> None:
    if count > MAX_STEPS:
        refuse(f"a schedule can have at most {MAX_STEPS:,} actions on this page (given {count:,})")


def _within_limits(schedule: Schedule) -> Schedule:
    _check_work(schedule.num_stages, schedule.microbatches)
    _check_steps(schedule.num_steps)
    return schedule


def row_of(timeline: Timeline, memory_limit: float | None) -> dict[str, Any]:
    """Return the row of `compare`, the reason for its bound, and whether it fits."""
    return comparison_record(timeline) | {
        "bound_reason": timeline.bound.because,
        "peak_memory_by_rank": timeline.peak_memory,
        "fits": _fits(timeline, memory_limit),
    }


def _fits(timeline: Timeline, memory_limit: float | None) -> bool:
    return memory_limit is None or not exceeds(max(timeline.peak_memory), memory_limit)


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
    return {
        "schedules": entries,
        "data": page_data(timelines),
        "memory_limit": request.memory_limit if change is None else change.memory(request.memory_limit),
        "what_if": None if change is None else str(change),
    }


def units(document: object) -> dict[str, Any]:
    """The units of times and sizes at these costs, as in a row."""
    given = parse_costs(expect(document, {"costs": (dict,)}).get("costs") or {}).units
    return {"row": {"time_unit": given.time_name, "memory_unit": given.memory_name}}


def _entry(request: DrawRequest, index: int, change: WhatIf | None) -> tuple[dict[str, Any], Timeline]:
    timeline, limit, before = request.timeline(request.schedule(index)), request.memory_limit, None
    if change is not None:
        before = row_of(timeline, limit)
        changed = change.schedule(request, index, timeline.schedule)
        units = timeline.costs.units
        named: Any = {"time_unit": units.time_name, "memory_unit": units.memory_name}
        costs = replace(change.costs(request.costs_for(changed), changed), **named)
        timeline, limit = request.timeline(changed, costs), change.memory(limit)
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
    found: list[dict[str, float] | None] = [None] * len(request.schedules)
    for index in range(len(found)):
        with suppress(PenstockError):  # `compare` says why
            schedule = request.schedule(index)
            costs = request.costs_for(schedule)
            found[index] = jitter_quantiles(schedule, costs, request.jitter or 0.0, request.send_model)
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
        refuse(*problems)
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
            refuse(f"what_if: it has {what}s 0 to {known - 1} (given {what} {self.index})")
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
        with suppress(PenstockError):  # a family that does not exist at these sizes
            points.append(_point(request, source))
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
    ratios = [(other[key], point[key]) for key in ("makespan", "peak_memory")]
    return all(b <= a * (1 + 1e-12) for b, a in ratios) and any(b < a * (1 - 1e-12) for b, a in ratios)


def _sources(ranks: int, microbatches: int) -> list[dict[str, Any]]:
    """All families as they are, then with recomputation, then in other groups."""
    trained = [family for family in families().values() if family.trains]
    found = [source for family in trained for source in _sources_of(family, ranks, microbatches)]
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
    timeline = one.timeline(schedule, with_period=False)
    return {
        "schedule": source,
        "name": f"{schedule.name}, recompute" if "recompute" in source else schedule.name,
        "makespan": timeline.makespan,
        "peak_memory": max(timeline.peak_memory),
        "bubble": timeline.bubble_rate,
        "fits": _fits(timeline, request.memory_limit),
    }


# Traces that are dropped onto the page: the measured step over the predicted one, and the costs it gives.

_MAX_FILES = 64


class _NamedBytes(BytesIO):
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
    if not 1 <= len(entries) <= _MAX_FILES:
        refuse(f"files: from 1 to {_MAX_FILES} (given {len(entries)})")
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


_TYPES = {
    "csv": "text/csv",
    "json": "application/json",
    "svg": "image/svg+xml",
    "png": "image/png",
    "html": "text/html",
    "trace": "application/json",
}


def export(document: object) -> dict[str, Any]:
    """Return one format: a file of the schedules, or `lines`, the commands that reproduce the page."""
    request = parse_request(document, {"format": (str,), "layers": (int,)})
    wanted = request.extra["format"]
    if wanted == "lines":
        return _lines(request, request.extra["layers"])
    if wanted not in _TYPES:
        refuse(f"format: one of {', '.join((*_TYPES, 'lines'))} (given {wanted})")
    schedule = request.schedule(0)
    if wanted in TIMELINE_FORMATS:
        others = map(request.schedule, range(1, len(request.schedules)))
        content = render(wanted, [request.timeline(each) for each in (schedule, *others)])
    else:
        content = dumps(schedule, wanted).encode()
    name = _file_name(schedule, "trace.json" if wanted == "trace" else wanted)
    return {"file": name, "type": _TYPES[wanted], "base64": b64encode(content).decode()}


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
    try:
        made = export_torchtitan(schedule, even_layout(layers, schedule.num_stages))
    except PenstockError as error:
        return {"error": str(error)}
    return {"flags": list(made.flags), "notes": list(made.notes), "files": dict(made.files)}


# Times of a schedule that cannot run to its end: what could run, and the rest as if its waits were met.
#
# The editor draws every schedule, also one with a deadlock or with missing steps. A step that waits for
# something that never comes is `blocked`; to place it and what follows, it starts as soon as its rank reaches
# it.


@dataclass(frozen=True, eq=False)
class Unfinished:
    """A timeline of an invalid schedule, and what cannot really run."""

    timeline: Timeline
    blocked: tuple[int, ...]
    """The slots that wait for ever, in the order in which ranks get stuck."""
    reached: Bools
    """Per slot: whether it really runs."""


def lay_out(schedule: Schedule, costs: Costs) -> Unfinished:
    """Run the schedule; whenever all ranks are stuck, drop the waits of the steps they are stuck at."""
    table = schedule.table
    durations = step_seconds(table, costs).tolist()
    producer, consumer, lag = message_waits(schedule, costs)
    starts = [0.0] * schedule.num_ranks
    blocked: list[int] = []
    reached: Bools | None = None
    while True:
        inputs = Inputs.of(schedule.num_steps, producer, consumer, lag)
        run = run_dataflow(table, inputs, durations, starts)
        reached = run.ends >= 0 if reached is None else reached
        if not run.stuck:
            break
        stuck = np.array(sorted(run.stuck.values()), dtype=np.int64)
        blocked += stuck.tolist()
        kept = ~(np.isin(consumer, stuck) & (run.ends[producer] < 0))
        producer, consumer, lag = producer[kept], consumer[kept], lag[kept]
    begun = run.ends - np.array(durations, dtype=np.float64)
    return Unfinished(Timeline(schedule, costs, begun, run.ends), tuple(blocked), reached)


# Ready steps: of the work that is not in a schedule yet, what each rank could run after its last step.

_MAX_READY = 4000


def ready_steps(schedule: Schedule, costs: Costs, *, split: bool | None = None) -> list[dict[str, Any]]:
    """The next step of each stage and kind whose inputs are in the schedule, with its earliest start.

    Backwards are I and W, or B, as in the schedule or as `split` says; both are offered if it has neither yet.
    """
    if schedule.num_steps > _MAX_READY:
        return []
    used = [kind.value for kind in (Kind.B, Kind.I) if schedule.table.has(kind)] or ["B", "I"]
    backwards = used if split is None else ["I" if split else "B"]
    timeline = lay_out(schedule, costs).timeline
    ends = {
        (part.kind.value, part.stage, part.microbatch or 0): event.end
        for event in timeline.events
        for part in event.step.parts
    }
    whole = [(stage, k, end) for (kind, stage, k), end in ends.items() if kind == "B"]
    ends |= {(half, stage, k): end for stage, k, end in whole for half in "IW"}
    bounds = schedule.table.slot_bounds.tolist()
    free = [float(timeline.end[a:b].max(initial=0)) for a, b in pairwise(bounds)]
    seconds = _message_seconds(schedule, costs)
    found = []
    for kind, stage, k, inputs in _next_steps(schedule, ends, backwards):
        rank = schedule.placement.stage_to_rank[stage]
        arrivals = [ends[need] + seconds.get((need[1], stage), 0.0) for need in inputs]
        found.append({"rank": rank, "text": f"{stage}{kind}{k}", "start": max([free[rank], *arrivals])})
    return found


def _message_seconds(schedule: Schedule, costs: Costs) -> dict[tuple[int, int], float]:
    """By the stages that make and use a value: seconds of the message, if they are on different ranks."""
    found = {}
    for value in VALUES:
        prices = edge_prices(costs, schedule.graph, value).total.tolist()
        for number in np.flatnonzero(schedule.table.crosses_ranks).tolist():
            source, target = schedule.graph.edges[number]
            found[(source, target) if value == "activation" else (target, source)] = prices[number]
    return found


def _next_steps(
    schedule: Schedule, ends: Mapping[tuple[str, int, int], float], backwards: Sequence[str]
) -> Iterator[tuple[str, int, int, list[tuple[str, int, int]]]]:
    """Of each stage and kind, the first microbatch that is missing, if what it needs is there."""
    kinds = ["F", *backwards, *("W" * ("I" in backwards))]
    for stage, kind in product(range(schedule.num_stages), kinds):
        done = "I" if kind == "B" else kind
        missing = (k for k in range(schedule.microbatches) if (done, stage, k) not in ends)
        for k in islice(missing, 1):
            wanted = [(name, other, k) for name, other in _needs(schedule.graph, Kind(kind), stage)]
            if all(need in ends for need in wanted):
                yield kind, stage, k, wanted


def _needs(graph: StageGraph, kind: Kind, stage: int) -> list[tuple[str, int]]:
    """The passes that an action of this kind needs, and their stages; I stands for B too."""
    stages = {
        StageRelation.SAME: (stage,),
        StageRelation.INPUTS: graph.inputs(stage),
        StageRelation.OUTPUTS: graph.outputs(stage),
    }
    passes = [need for need in kind.spec.needs if Kind(need.kinds[0]) in PASS_KINDS]
    return [(need.kinds[0], other) for need in passes for other in stages[need.stages]]


_SHOWN_VIOLATIONS = 8


def edit(document: object) -> dict[str, Any]:
    """The verdict on one schedule, and what to draw of it, valid or not."""
    request = parse_request(document, {"split": (bool,)})
    schedule = request.schedule(0)
    costs = request.costs_for(schedule)
    costs.check_lengths(schedule.graph, schedule.num_ranks)
    violations = validate(schedule, max(request.send_model, SendModel.RENDEZVOUS))
    verdict, shown = check_record(schedule, violations), violations[:_SHOWN_VIOLATIONS]
    return {
        "verdict": verdict | {"violations": verdict["violations"][: len(shown)], "count": len(violations)},
        "text": [str(violation) for violation in shown],
        "stage_to_rank": schedule.placement.stage_to_rank,
        "microbatches": schedule.microbatches,
        "steps": steps_of(schedule),
        "ready": ready_steps(schedule, costs, split=request.extra["split"]),
        "costs": costs.to_keys(),
        **_drawing(request, schedule, costs, valid=not violations),
    }


def _drawing(request: DrawRequest, schedule: Schedule, costs: Costs, *, valid: bool) -> dict[str, Any]:
    if valid:
        timeline = request.timeline(schedule, costs)
        return {"data": page_data([timeline]), "row": row_of(timeline, request.memory_limit), "blocked": []}
    found = lay_out(schedule, costs)
    return {
        "data": page_data([found.timeline], explained=False),
        "row": None,
        "blocked": list(found.blocked),
        "unreached": np.flatnonzero(~found.reached).tolist(),
    }


def stamp(document: object) -> dict[str, Any]:
    """Repeat the steps of one microbatch for all microbatches, `interval` seconds apart.

    The steps of that microbatch, at their times, are the building block; each rank does what is stamped in
    order of time.
    """
    request = parse_request(document, {"microbatch": (int,), "interval": (int, float)})
    timeline = request.timeline(request.schedule(0))
    chosen, interval = request.extra["microbatch"] or 0, request.extra["interval"] or 0
    schedule = timeline.schedule
    if not 0 <= chosen < schedule.microbatches or not 0 < interval <= 1e18:
        rule = f"microbatch: from 0 to {schedule.microbatches - 1}; interval: above 0 and at most 1e18"
        refuse(f"{rule} (given {printable(str(chosen))}, {printable(str(interval))})")
    if schedule.level != "compute" or schedule.table.has_pairs:
        refuse("stamp: a building block has F, B, I and W only")
    rows: list[list[str]] = []
    for rank, steps in enumerate(schedule.ranks):
        first = int(schedule.table.slot_bounds[rank])
        block = [
            (float(timeline.start[first + i]), part)
            for i, step in enumerate(steps)
            for part in step.parts
            if part.microbatch == chosen
        ]
        stamped = [
            (start + copy * interval, copy, f"{part.stage}{part.kind.value}{copy}")
            for copy in range(schedule.microbatches)
            for start, part in block
        ]
        rows.append([text for _, _, text in sorted(stamped, key=lambda each: each[:2])])
    return {
        "steps": rows,
        "stage_to_rank": schedule.placement.stage_to_rank,
        "microbatches": schedule.microbatches,
    }


# The search: it sends its progress, and ends with the best so far when a message stops it.

_MAX_SEARCH_SECONDS = 120.0
_MAX_SEARCH_WORK = 4096
"""Stages times microbatches."""
_NUMBERS = (int, float)
_SEARCH_KEYS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("ranks", "microbatches", "stages_per_rank", "live_limit", "moves", "seed"), (int,)),
    **dict.fromkeys(("memory_limit", "seconds"), _NUMBERS),
    **dict.fromkeys(("placement", "objective"), (str,)),
    **dict.fromkeys(("same_model", "fused", "recompute", "offload"), (bool,)),
    "costs": (dict,),
    "weights": (list,),
}


def live_search(document: object, connection: Connection, report: Callable[[str], None]) -> dict[str, Any]:
    """Return the result of `penstock.search`, its timeline to draw, and its certificate in words."""
    known = expect(document, _SEARCH_KEYS, ["ranks", "microbatches"])
    given = {key: value for key, value in known.items() if value not in (None, "")}
    options = {"stages_per_rank": 1} | given | {"seconds": float(given.get("seconds") or 10.0)}
    fused, same_model = (options.pop(key, False) for key in ("fused", "same_model"))
    costs, weights = parse_costs(options.pop("costs", {})), parse_weights(options.pop("weights", []))
    ranks, stages = options["ranks"], options["ranks"] * options["stages_per_rank"]
    _check_search(options["seconds"], stages * options["microbatches"])
    if ranks >= 1 and (weights or same_model):  # else the search says what is wrong with the ranks
        costs = costs_of_model(costs, ranks, stages, weights, divide=same_model)
    with _interrupted_by(connection) as reported:

        def send(now: Progress) -> None:
            report(json.dumps({key: v for key, v in asdict(now).items() if key == "phase" or isfinite(v)}))
            reported.set()

        result = run_search(costs=costs, split=not fused, on_progress=send, **options)
    return search_record(result) | {
        "data": page_data([result.timeline]),
        "certificate": certificate(result),
        "stage_to_rank": result.schedule.placement.stage_to_rank,
        "costs": result.timeline.costs.to_keys(),
        "row": None if result.timeline.period is None else row_of(result.timeline, given.get("memory_limit")),
    }


def _check_search(seconds: float, work: int) -> None:
    problems = []
    if not 0 < seconds <= _MAX_SEARCH_SECONDS:
        problems.append(f"seconds: from 0 to {_MAX_SEARCH_SECONDS:g} on this page (given {seconds:g})")
    if work > _MAX_SEARCH_WORK:
        problems.append(
            f"stages times microbatches: at most {_MAX_SEARCH_WORK} in a search on this page (given {work})"
        )
    refuse(*problems)


def certificate(result: SearchResult) -> str:
    """Return what the search proved, in a sentence."""
    units = result.timeline.costs.units
    bound = f"no schedule of this work has a {result.objective} below {units.time(result.bound.seconds)}"
    bound += f" ({result.bound.because})"
    if result.proved:
        return f"Proved optimal: {bound}, and this one takes exactly that."
    gap = f"at most {result.gap:.2%}" if isfinite(result.gap) else "unknown"
    return f"Not proved: {bound}; this one takes {units.time(result.value)}, so a better one can gain {gap}."


@contextmanager
def _interrupted_by(connection: Connection) -> Iterator[threading.Event]:
    """Turn a message on the pipe into the interrupt that ends a search.

    The interrupt waits for the event, which the first report of progress sets: before it, the search has no
    order to end with.
    """
    reported, ended = threading.Event(), threading.Event()

    def listen() -> None:
        while not ended.is_set():
            if connection.poll(0.05):
                connection.recv_bytes()
                while not (ended.is_set() or reported.wait(0.05)):
                    pass
                if not ended.is_set():
                    signal.raise_signal(signal.SIGINT)
                return

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield reported
    finally:
        ended.set()
        with suppress(KeyboardInterrupt):  # of a search that has ended
            listener.join()
        signal.signal(signal.SIGINT, before)


REQUESTS: dict[str, Callable[[object], dict[str, Any]]] = {
    "compare": compare,
    "edit": edit,
    "stamp": stamp,
    "robustness": robustness,
    "units": units,
    "pareto": pareto,
    "export": export,
    "trace": measured,
    "lessons": lesson_catalogue,
    "lesson": judge,
}
"""Each raises a `PenstockError` for a request that it cannot answer."""


def catalogue() -> dict[str, Any]:
    """Return what the page offers: families, presets of costs, send models."""
    return {
        "families": family_records(),
        "presets": {name: costs.to_keys() for name, costs in presets().items()},
        "send_models": [str(model) for model in SendModel],
    }
