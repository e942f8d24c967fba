"""What every front end needs: sources to schedules and costs, and results to JSON records.

    family, file or text --> Schedule --prepare--> schedule that is simulated --> Timeline --> record

The command line, the playground and its Python snippets call the same functions, so they get the same numbers.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.arguments import did_you_mean, printable
from penstock.cost.costs import Costs
from penstock.cost.estimate import Estimate, active_parameters, parameters
from penstock.cost.presets import preset, presets
from penstock.errors import BuildError, CostsError, Parameter, ScheduleError
from penstock.families import build, families, find
from penstock.formats import read
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.lowering import AddCommunication, Offload, Pass, Recompute, lower, parse_policy
from penstock.recognition import Recognition, recognize
from penstock.search import FitMemory, PlaceSharding, SearchResult
from penstock.simulation.calibration import errors_by_kind
from penstock.simulation.comparison import comparison_of
from penstock.simulation.gaps import REASONS, Gaps, critical_path, gaps
from penstock.simulation.jitter import simulate_with_jitter
from penstock.simulation.timeline import Timeline
from penstock.traces.diagnose.diagnosis import Diagnosis
from penstock.traces.read.measured_run import MeasuredRun
from penstock.traces.read.megatron_timers import MegatronTimers
from penstock.validation import SendModel, Violations

if TYPE_CHECKING:
    from penstock.runtime.verification import Verdict

QUANTILES = (5, 50, 95)
"""Percentiles of the makespan under jitter."""
TIMELINE_FORMATS = {"svg": "svg", "png": "png", "html": "html", "trace": "perfetto"}
"""The module of `penstock.view` for each format with a time axis; its function has the format's name."""
FIT = "fit"
"""In place of a memory policy: what the memory limit needs."""
_MAX_RECOGNIZED = 100_000
"""Actions; families with a search of their own take seconds to build beyond it."""


# --- sources ---------------------------------------------------------------------------------------


def is_file(source: str) -> bool:
    """Return whether a source has a suffix or a slash, or exists and is no family."""
    if Path(source).suffix or "/" in source:
        return True
    try:
        find(source)
    except BuildError:
        return Path(source).exists()
    return False


@dataclass(frozen=True)
class Source:
    """A schedule as a user names it: a family with its sizes, or a file, which has its own."""

    name: str
    ranks: int | None = None
    microbatches: int | None = None
    stages_per_rank: int | Sequence[int] | None = None
    group: int | None = None
    graph: StageGraph | None = None

    def schedule(self) -> Schedule:
        """Build the family, or read the file."""
        return read(self.name) if is_file(self.name) else build(self.name, **self._sizes)

    @property
    def _sizes(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "name" and value is not None}

    def words(self) -> list[str]:
        """Return the words of the source on the command line."""
        flags = {"ranks": "-p", "microbatches": "-m", "stages_per_rank": "-v", "group": "--group"}
        texts = {
            key: ",".join(map(str, v)) if isinstance(v, list) else str(v) for key, v in self._sizes.items()
        }
        return [self.name, *(word for key, text in texts.items() for word in (flags[key], text))]

    def python(self) -> str:
        """Return the Python expression of the schedule."""
        if is_file(self.name):
            return f"penstock.read({self.name!r})"
        sizes = (f"{key}={value!r}" for key, value in self._sizes.items())
        return f"penstock.build({', '.join([repr(self.name), *sizes])})"


def read_costs(source: str | None) -> Costs:
    """Return the costs of a .toml or .json file, or of a preset; unit costs without a source."""
    if source is None:
        return Costs()
    if Path(source).suffix.lower() in (".json", ".toml"):
        return Costs.read(source)
    known = presets()
    if source in known:
        return preset(source)
    if files := [path for suffix in (".toml", ".json") if (path := Path(source + suffix)).exists()]:
        raise CostsError(
            Parameter("costs"), f": there is no preset {printable(source)}; did you mean {files[0]}?"
        )
    raise CostsError(
        Parameter("costs"),
        f" is a .json or .toml file, or a preset (given {printable(source)})"
        f"{did_you_mean(source, known)} (presets: {', '.join(known)})",
    )


def costs_of_model(costs: Costs, ranks: int, stages: int, weights: Sequence[float], *, divide: bool) -> Costs:
    """Return the costs of each stage when the same model is cut into more stages.

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


# --- lowering --------------------------------------------------------------------------------------


def prepare(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    recompute: str | None = None,
    offload: str | None = None,
    lowered: bool = False,
    send_model: SendModel | str = SendModel.BUFFERED,
) -> Schedule:
    """Return the schedule as it is simulated: with memory policies, lowered, with messages.

    `recompute` and `offload` are policies such as `all` or `0-2:every=2`. `lowered` adds sharding, gradient
    reduction and messages. A send model other than buffered adds messages where the schedule has none.
    """
    model = SendModel.of(send_model)
    schedule = add_memory_actions(schedule, costs or Costs(), recompute, offload, send_model=model)
    return add_messages(lower(schedule) if lowered else schedule, model)


def add_memory_actions(
    schedule: Schedule,
    costs: Costs,
    recompute: str | None,
    offload: str | None,
    memory_limit: float | None = None,
    send_model: SendModel = SendModel.BUFFERED,
) -> Schedule:
    """Return the schedule with these memory policies; `fit` chooses what `memory_limit` needs."""
    makers: dict[str, Callable[..., Pass]] = {"recompute": Recompute, "offload": Offload}
    policies = {"recompute": recompute, "offload": offload}
    for name, text in policies.items():
        if text not in (None, FIT):
            with _about(name):
                schedule = lower(schedule, [makers[name](*parse_policy(text, schedule.num_stages))])
    if fitted := [name for name, text in policies.items() if text == FIT]:
        if memory_limit is None:
            raise ScheduleError(f"the policy {FIT} needs a memory limit", parameter="memory_limit")
        with _about(fitted[0]):
            fit = FitMemory(memory_limit, costs, recompute == FIT, offload == FIT, send_model)
            schedule = lower(schedule, [fit])
    return schedule


@contextmanager
def _about(parameter: str) -> Iterator[None]:
    """Name this parameter in errors about an option of a pass."""
    try:
        yield
    except ScheduleError as error:
        raise ScheduleError(error.message, parameter=error.parameter and parameter) from None


def place_sharding(
    schedule: Schedule, costs: Costs, memory_limit: float | None, send_model: SendModel
) -> Schedule:
    """Return the schedule lowered, with sharding where simulation says that it is fastest within the limit."""
    place = PlaceSharding(costs, memory_limit, send_model)
    return lower(schedule, [place] if schedule.table.has_communication else [AddCommunication(), place])


def add_messages(schedule: Schedule, send_model: SendModel, *, blocking_receives: bool = False) -> Schedule:
    """Return the schedule with SEND and RECV where the send model, or blocking receives, are about them."""
    needed = blocking_receives or not send_model.is_buffered
    if not needed or schedule.table.has_communication or schedule.num_ranks == 1:
        return schedule
    return lower(schedule, [AddCommunication()])


# --- lines that reproduce a result -----------------------------------------------------------------


def command_line(source: Source, costs: Costs, *, jitter: float | None = None, **options: Any) -> str:  # noqa: ANN401
    """Return the command that simulates a source prepared with these options; costs are in costs.toml."""
    words = ["penstock", "simulate", *source.words()]
    for key, value in _given(options).items():
        words += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    words += ["--costs", "costs.toml"] if costs.to_keys() else []
    words += ["--jitter", f"{jitter:g}"] if jitter else []
    return shlex.join(words)


def python_lines(source: Source, costs: Costs, **options: Any) -> str:  # noqa: ANN401 -- those of `prepare`
    """Return a Python program that simulates a source prepared with these options."""
    given = _given(options)
    words = "".join(f", {key}={value if value is True else str(value)!r}" for key, value in given.items())
    model = f", send_model={str(given['send_model'])!r}" if "send_model" in given else ""
    lines = [
        "import penstock",
        *(["from penstock.service import prepare"] if given else []),
        "",
        f"schedule = {source.python()}",
        f"costs = penstock.{costs!r}",
        *([f"schedule = prepare(schedule, costs{words})"] if given else []),
        f"timeline = penstock.simulate(schedule, costs{model})",
        "print(timeline.makespan, timeline.bubble_rate, max(timeline.peak_memory))",
    ]
    return "\n".join(lines) + "\n"


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not at their defaults."""
    return {key: value for key, value in options.items() if value and value is not SendModel.BUFFERED}


def costs_file(costs: Costs) -> str:
    """Return costs as the text of a .toml file."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in costs.to_keys().items())


def render(name: str, timelines: Sequence[Timeline]) -> bytes:
    """Return the timelines in one of `TIMELINE_FORMATS`; its view is imported only here."""
    view = import_module(f"penstock.view.{TIMELINE_FORMATS[name]}")
    content: str | bytes = getattr(view, name)(timelines)
    return content.encode() if isinstance(content, str) else content


# --- records ---------------------------------------------------------------------------------------


def family_records() -> list[dict[str, Any]]:
    """Return the schedule families."""
    return [
        {
            **_fields(family, "name", "summary", "stages_per_rank", "aliases"),
            "default_stages_per_rank": family.stages_per_rank or family.default_stages_per_rank,
            "group": family.smallest_group is not None,
        }
        for family in families().values()
    ]


def jitter_quantiles(
    schedule: Schedule, costs: Costs, jitter: float, send_model: SendModel, *, blocking_receives: bool = False
) -> dict[str, float]:
    """Return percentiles of the makespan when the seconds of every action vary by a share."""
    runs = simulate_with_jitter(
        schedule, costs, jitter=jitter, send_model=send_model, blocking_receives=blocking_receives
    )
    return {f"p{q}": runs.quantile(q / 100) for q in QUANTILES}


def comparison_record(timeline: Timeline) -> dict[str, Any]:
    """Return the row of a simulated timeline with a period in a comparison."""
    return asdict(comparison_of(timeline)) | {"gap": _finite(timeline.gap)}


def simulation_record(
    timeline: Timeline, idle: Gaps, quantiles: dict[str, float] | None, *, streamed: bool = False
) -> dict[str, Any]:
    """Return a simulated timeline with a period: times, memory, causes of idle time.

    With `streamed`, the gaps, of which there can be very many, are an iterator.
    """
    return comparison_record(timeline) | {
        **_fields(timeline, "busy", "idle", "exposed_all_to_all"),
        "peak_memory_by_rank": timeline.peak_memory,
        "collectives": collectives_of(timeline),
        "critical_path": [str(event.step) for event in critical_path(timeline)],
        "gaps": idle.records() if streamed else list(idle.records()),
        "jitter": quantiles,
    }


def collectives_of(timeline: Timeline) -> dict[str, int]:
    """Return the number of each kind of collective; empty without any."""
    table = timeline.schedule.table
    counts = {kind.value: int(table.of_kind(kind).sum()) for kind in Kind if kind.is_collective}
    return {name: count for name, count in counts.items() if count}


def order_of(schedule: Schedule) -> Recognition | str:
    """Return which family's order this is, or why it was not compared."""
    if len(schedule.table.code) > _MAX_RECOGNIZED:
        return f"not compared with families: more than {_MAX_RECOGNIZED:,} actions"
    return recognize(schedule)


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _sizes_and_order(schedule: Schedule, *, ordered: bool = True) -> dict[str, Any]:
    order = order_of(schedule) if ordered else None
    return {
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.microbatches,
        "order": asdict(order) if isinstance(order, Recognition) else None,
    }


def check_record(schedule: Schedule, violations: Violations) -> dict[str, Any]:
    """Return the verdict of the validator."""
    return {
        "valid": not violations,
        **_sizes_and_order(schedule, ordered=not violations),
        "level": schedule.level,
        "violations": violations.to_rows(),
    }


def run_record(run: MeasuredRun, found: SearchResult | None) -> dict[str, Any]:
    """Return a run that was traced: its order, times, causes of idle time, costs, and what a search found."""
    timeline, clocks = run.timeline, run.clocks
    predicted = errors_by_kind(run.predicted, run.alike)
    return {
        "files": list(run.sources),
        **_sizes_and_order(run.schedule),
        "steps": [each.makespan for each in run.timelines],
        **_fields(run, "step", "replica", "replicas"),
        **_fields(timeline, "period", "makespan", "busy"),
        "bubble": timeline.bubble_rate,
        "idle_by_reason": idle_by_reason(gaps(timeline)),
        "clocks": _fields(clocks, "offsets", "residual", "drift", "shared_clock")
        | {"uncertainty": list(map(_finite, clocks.uncertainty))},
        "costs": run.costs.to_keys(),
        "predicted": [_fields(row, "kind", "predicted", "measured", "error") for row in predicted],
        "search": found
        and search_record(found) | {"saved": 1 - found.value / run.predicted.makespan, "live_limit": run.live},
    }


def idle_by_reason(idle: Gaps) -> dict[str, float]:
    """Return the seconds of all ranks together, longest first."""
    seconds = dict(zip(REASONS, idle.seconds_by_rank.sum(axis=0).tolist()))
    return dict(sorted(((name, each) for name, each in seconds.items() if each), key=lambda item: -item[1]))


def search_record(result: SearchResult) -> dict[str, Any]:
    """Return the best schedule of a search, with its certificate."""
    units = result.timeline.costs.units
    return {
        **_fields(result, "objective", "value"),
        "bound": result.bound.seconds,
        "bound_name": result.bound.name,
        "bound_reason": result.bound.because,
        "gap": _finite(result.gap),
        **_fields(result, "proved", "found_by"),
        "peak_memory": max(result.timeline.peak_memory),
        "placement": result.schedule.placement.style,
        "quantile": result.quantile,
        "time_unit": units.time_name,
        "memory_unit": units.memory_name,
        **_fields(result, "families", "too_large", "skipped", "runs", "seconds", "interrupted", "missing"),
        "schedule": [result.schedule.texts(rank) for rank in range(result.schedule.num_ranks)],
    }


class EstimatedStages(NamedTuple):
    """The stages of an estimate: the number of layers of each and their costs."""

    placement: Placement
    counts: tuple[int, ...]
    costs: Costs


def estimate_record(found: Estimate, stages: EstimatedStages) -> dict[str, Any]:
    """Return an estimate with sizes in bytes and times in seconds."""
    return {
        "model": found.config.name,
        "parameters": parameters(found.config),
        "active_parameters": active_parameters(found.config),
        "model_flops_per_microbatch": found.model_flops,
        "device": found.device.name,
        "parallel_config": vars(found.parallel),
        "factors": list(found.device.attainable.passes),
        "whole_backward_factor": found.device.attainable.whole_backward,
        "layers": [
            {
                "kind": kind,
                "count": found.config.kinds.count(kind),
                "flops": layer.operations.flops._asdict(),
                "seconds": layer.seconds.compute._asdict(),
                "all_to_all_seconds": layer.seconds.all_to_all._asdict(),
                "weight_bytes": vars(layer.weights),
                "activation_bytes": layer.operations.activation,
                "message_bytes": layer.operations.message,
                "collective_bytes": {each.name: each.bytes._asdict() for each in layer.operations.collectives},
            }
            for kind, layer in found.by_kind.items()
        ],
        "layers_per_stage": list(stages.counts),
        "stage_to_rank": list(stages.placement.stage_to_rank),
        "costs": stages.costs.to_keys(),
    }


def diagnosis_record(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return what was found about a run that hung, and where each of its ranks is."""
    return {
        "members": list(diagnosis.members),
        "schedule": str(order_of(diagnosis.schedule)),
        "findings": [
            {"kind": each.kind, "ranks": list(each.ranks), "summary": str(each), "message": each.message}
            for each in diagnosis.findings
        ],
        "ranks": [_rank_record(diagnosis, rank) for rank in range(diagnosis.schedule.num_ranks)],
        "notes": list(map(str, diagnosis.notes)),
    }


def _rank_record(diagnosis: Diagnosis, rank: int) -> dict[str, Any]:
    base = {"rank": rank, "world_rank": diagnosis.members[rank]}
    if (state := diagnosis.states.get(rank)) is None:
        return base | {"state": None}
    wait = diagnosis.waits.get(rank)
    return base | {
        "state": state.mode,
        **_fields(state, "step_number", "position"),
        "action": state.action or None,
        "waits_for": wait
        and {
            "message": str(wait.message),
            "rank": wait.for_rank,
            "counterpart": str(wait.counterpart),
            "peer": wait.peer,
        },
        "waiting_for": None if state.waiting_for is None else asdict(state.waiting_for),
        "error": state.error or None,
        "process": state.process or None,
        "file": state.source,
    }


def timers_record(timers: MegatronTimers) -> dict[str, Any]:
    """Return the timers of a Megatron-LM log, and the costs that follow from them."""
    return {
        "file": timers.source,
        "schedule": timers.schedule.name,
        "logged": timers.steps,
        "timers": {name: list(times) for name, times in timers.seconds.items()},
        "step": timers.step_seconds,
        "idle": list(timers.idle),
        "costs": timers.costs.to_keys(),
        "predicted": timers.predicted.makespan,
    }


def verification_record(found: Sequence[Verdict]) -> dict[str, Any]:
    """Return the comparison of gradients with one process; errors that are not finite are None."""
    return {
        "equal": all(verdict.equal for verdict in found),
        "schedules": [
            {
                **_fields(verdict, "schedule", "ranks", "stages", "microbatches", "equal", "tolerance"),
                "loss_error": _finite(verdict.loss),
                "norm_error": _finite(verdict.norm),
                **{
                    f"worst_{name}": worst and asdict(worst) | {"error": _finite(worst.error)}
                    for name, worst in (("gradient", verdict.gradient), ("parameter", verdict.parameter))
                },
                "rejected": verdict.rejected or None,
                "cause": verdict.cause or None,
            }
            for verdict in found
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
