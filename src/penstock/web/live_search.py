"""A search that sends its progress, and ends with the best so far when a message stops it."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from penstock.cost.costs import Costs
from penstock.cost.units import Units
from penstock.errors import FormatError
from penstock.search import Progress
from penstock.search import search as run_search
from penstock.service import costs_of_model, search_record
from penstock.view.html import page_data
from penstock.web.answers import REQUEST, expect, parse_costs, parse_weights, row_of

_MAX_SECONDS = 120.0
_MAX_WORK = 4096
"""Stages times microbatches."""
_KEYS: dict[str, tuple[type, ...]] = {
    "ranks": (int,),
    "microbatches": (int,),
    "stages_per_rank": (int,),
    "placement": (str,),
    "costs": (dict,),
    "weights": (list,),
    "same_model": (bool,),
    "memory_limit": (int, float),
    "live_limit": (int,),
    "objective": (str,),
    "fused": (bool,),
    "seconds": (int, float),
    "moves": (int,),
    "seed": (int,),
    "recompute": (bool,),
    "offload": (bool,),
}


def live_search(
    document: object, connection: Connection | None = None, report: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """The result of `penstock.search`, its timeline to draw, and its certificate in words."""
    given = expect(document, _KEYS, ["ranks", "microbatches"])
    seconds, stages = float(given.get("seconds") or 10.0), given.get("stages_per_rank") or 1
    _check_limits(seconds, given["ranks"] * stages * given["microbatches"])
    with _Interrupts(connection, report) as on_progress:
        result = run_search(
            ranks=given["ranks"],
            microbatches=given["microbatches"],
            costs=_costs(given, given["ranks"], given["ranks"] * stages),
            stages_per_rank=stages,
            placement=given.get("placement") or "any",
            memory_limit=given.get("memory_limit"),
            live_limit=given.get("live_limit"),
            objective=given.get("objective") or "makespan",
            split=not given.get("fused"),
            seconds=seconds,
            moves=given.get("moves"),
            seed=given.get("seed") or 0,
            recompute=bool(given.get("recompute")),
            offload=bool(given.get("offload")),
            on_progress=on_progress,
        )
    record = search_record(result)
    return record | {
        "data": page_data([result.timeline]),
        "certificate": certificate(record),
        "stage_to_rank": result.schedule.placement.stage_to_rank,
        "costs": result.timeline.costs.to_keys(),
        "row": None if result.timeline.period is None else row_of(result.timeline, given.get("memory_limit")),
    }


def _check_limits(seconds: float, work: int) -> None:
    problems = []
    if not 0 < seconds <= _MAX_SECONDS:
        problems.append(f"seconds: from 0 to {_MAX_SECONDS:g} on this page (given {seconds:g})")
    if work > _MAX_WORK:
        problems.append(
            f"stages times microbatches: at most {_MAX_WORK} in a search on this page (given {work})"
        )
    if problems:
        raise FormatError(REQUEST, problems)


def _costs(given: dict[str, Any], ranks: int, stages: int) -> Costs:
    costs, weights = parse_costs(given.get("costs") or {}), parse_weights(given.get("weights") or [])
    if ranks < 1 or not (weights or given.get("same_model")):
        return costs  # the search says what is wrong with the ranks
    return costs_of_model(costs, ranks, stages, weights, divide=bool(given.get("same_model")))


def certificate(record: dict[str, Any]) -> str:
    """What the search proved, in a sentence."""
    units = Units(record["time_unit"] == "seconds")
    bound = f"no schedule of this work has a {record['objective']} below {units.time(record['bound'])}"
    bound += f" ({record['bound_reason']})"
    if record["proved"]:
        return f"Proved optimal: {bound}, and this one takes exactly that."
    gap = "unknown" if record["gap"] is None else f"at most {record['gap']:.2%}"
    return f"Not proved: {bound}; this one takes {units.time(record['value'])}, so a better one can gain {gap}."


class _Interrupts:
    """Turns a message on the pipe into the interrupt that ends a search; gives the callback of its progress.

    The interrupt waits for the first report of progress: before it, the search has no order to end with.
    """

    def __init__(self, connection: Connection | None, report: Callable[[str], None]) -> None:
        self.connection, self.report = connection, report
        self.reported, self.ended = threading.Event(), threading.Event()

    def __enter__(self) -> Any:  # noqa: ANN401 -- a callback
        if self.connection is None:
            return None
        self._before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self._send

    def _watch(self) -> None:
        assert self.connection is not None
        while not self.ended.is_set():
            if self.connection.poll(0.05):
                self.connection.recv_bytes()
                while not (self.ended.is_set() or self.reported.wait(0.05)):
                    pass
                if not self.ended.is_set():
                    signal.raise_signal(signal.SIGINT)
                return

    def _send(self, now: Progress) -> None:
        record = {
            "phase": now.phase,
            "best": now.best,
            "bound": now.bound,
            "seconds": now.seconds,
            "fraction": now.fraction,
        }
        finite = {key: value for key, value in record.items() if value not in (float("inf"), float("-inf"))}
        self.report(json.dumps(finite))
        self.reported.set()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.connection is not None:
            with suppress(KeyboardInterrupt):  # of a search that has ended
                self._thread.join()
            signal.signal(signal.SIGINT, self._before)
