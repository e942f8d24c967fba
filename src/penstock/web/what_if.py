"""What-if changes: a slow rank, a slow link, a larger microbatch, more memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from penstock.cost.costs import Costs
from penstock.errors import FormatError
from penstock.ir.schedule import Schedule
from penstock.web.request import SOURCE, DrawRequest, build_schedule, expect

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
            raise FormatError(SOURCE, problems)
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
        return (
            replace(request, schedules=[changed]).schedule(0) if changed != source else build_schedule(changed)
        )

    def costs(self, costs: Costs, schedule: Schedule) -> Costs:
        """The costs after the change."""
        known = {"slow-rank": schedule.num_ranks, "slow-link": len(schedule.graph.edges)}.get(self.kind)
        if known is not None and self.index >= known:
            what = self.kind.removeprefix("slow-")
            raise FormatError(SOURCE, [f"what_if: it has {what}s 0 to {known - 1} (given {what} {self.index})"])
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
