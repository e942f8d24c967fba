"""Live bytes: what the stages of a rank hold for their backwards after each step of its list, counted in a run.

Counted are the same things as in the simulated memory (`penstock.cost.memory`): what each microbatch holds of
its forward (`StageMemory.held_bytes`), and receive buffers from the posted receive on. The largest bytes of
each stage become costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from penstock.cost.costs import Costs
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints
from penstock.runtime.execution.connection import Connection
from penstock.runtime.execution.program import Program
from penstock.runtime.execution.stage_memory import StageMemory
from penstock.runtime.transport.communicator import Communicator, gather_arrays

__all__ = ["LiveBytes"]

_NAMES = ("activation", "checkpoint", "offloadable", "after_input")


class LiveBytes:
    """Counts the bytes of one rank, step by step."""

    def __init__(self, num_stages: int) -> None:
        self._held: dict[tuple[int, int], int] = {}
        self._levels: list[int] = []
        self._most = np.zeros((num_stages, len(_NAMES)), dtype=np.int64)

    @contextmanager
    def counting(self, connection: Connection, program: Program) -> Iterator[Callable[[int], None]]:
        """Gives what has to be called after each step of the list with its index."""
        self._held.clear()
        self._levels.clear()
        memories = {index: stage.memory for index, stage in connection.stages.items()}
        for memory in memories.values():
            memory.counts_bytes = True
        try:
            yield partial(self._after, memories, connection.receive_buffer_bytes, program)
        finally:
            for memory in memories.values():
                memory.counts_bytes = False

    def _after(
        self,
        memories: Mapping[int, StageMemory],
        receive_buffer_bytes: Callable[[], int],
        program: Program,
        position: int,
    ) -> None:
        """Count again what the step of this index has changed."""
        level = self._levels[-1] if self._levels else 0
        self._levels += [level] * (position - len(self._levels))  # steps without a call change nothing
        for part in program.steps[position].parts:
            if part.microbatch is not None and not part.kind.is_communication:
                self._count(memories[part.stage], part.kind, part.stage, part.microbatch)
        self._levels.append(receive_buffer_bytes() + sum(self._held.values()))

    def _count(self, memory: StageMemory, kind: Kind, stage: int, microbatch: int) -> None:
        before = self._held.get((stage, microbatch), 0)
        held, inputs = memory.held_bytes(microbatch)
        self._held[stage, microbatch] = held
        if kind is Kind.F and memory.is_recomputed(microbatch):
            self._note("checkpoint", stage, held)
        elif kind in (Kind.F, Kind.RECOMPUTE):
            self._note("activation", stage, held)
            self._note("checkpoint", stage, inputs)
        elif kind is Kind.OFFLOAD and not memory.is_recomputed(microbatch):
            self._note("offloadable", stage, before - held)
        elif kind is Kind.I:
            self._note("after_input", stage, held)

    def _note(self, name: str, stage: int, size: int) -> None:
        entry = stage, _NAMES.index(name)
        self._most[entry] = max(self._most[entry], size)

    # --- of all ranks ------------------------------------------------------------------------------

    def gathered(self, communicator: Communicator | None, schedule: Schedule, rank: int) -> list[Ints]:
        """Per rank: the bytes held after each step of its list, the same on every rank."""
        steps = len(schedule.ranks[rank])
        levels = [*self._levels, *self._levels[-1:] * (steps - len(self._levels))]
        lengths = [len(row) for row in schedule.ranks]
        return gather_arrays(communicator, np.array(levels, dtype=np.int64), lengths)

    def costs(self, communicator: Communicator | None, schedule: Schedule, links: Costs) -> Costs:
        """These costs with the most bytes of each stage that were counted, the same on every rank."""
        gathered = gather_arrays(communicator, self._most, [len(self._most)] * schedule.num_ranks)
        most: Floats = np.maximum.reduce(gathered).astype(np.float64)
        full, kept, moved, after = most.T
        table = schedule.table
        return replace(
            links,
            activation=_listed(full),
            checkpoint=_listed(np.minimum(kept, full)),
            offloadable=_listed(np.where(moved > 0, moved, full)) if table.has(Kind.OFFLOAD) else None,
            activation_freed_by_input=_listed(full - after if table.has(Kind.I) else 0 * full),
        )


def _listed(values: Floats) -> tuple[float, ...]:
    return tuple(values.tolist())
