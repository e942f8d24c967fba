"""User-defined schedules, written in the ways that torch supports."""

from __future__ import annotations

from typing import Any

from penstock.pipelining._orders import _Action
from penstock.pipelining.schedules import (
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    B,
    F,
    I,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleInterleaved1F1B,
    W,
    _PipelineScheduleRuntime,
)


class VShaped(PipelineScheduleMulti):
    """One microbatch down a V and back, with the idle slots of a lock-step table."""

    stages_on_ranks = {0: 0, 1: 1, 2: 1, 3: 0}  # noqa: RUF012 -- a table
    microbatches = 1

    def __init__(self, stages: list[Any], n_microbatches: int, **options: Any) -> None:
        super().__init__(stages, n_microbatches, **options)
        self.pipeline_order = {
            0: [_Action(0, F, 0), None, None, _Action(3, F, 0), _Action(3, B, 0), None, None, _Action(0, B, 0)],
            1: [None, _Action(1, F, 0), _Action(2, F, 0), None, None, _Action(2, B, 0), _Action(1, B, 0), None],
        }
        self._validate_and_set_stage_mapping(self.pipeline_order)


class Unbalanced(PipelineScheduleMulti):
    """Three stages on one rank and two on the other, two of them neighbours."""

    stages_on_ranks = {0: 0, 1: 0, 2: 1, 3: 1, 4: 0}  # noqa: RUF012
    microbatches = 1

    def __init__(self, stages: list[Any], n_microbatches: int, **options: Any) -> None:
        super().__init__(stages, n_microbatches, **options)
        for rank, row in enumerate(("0F0 1F0 4F0 4B0 1B0 0B0", "2F0 3F0 3B0 2B0")):
            self.pipeline_order[rank] = [_Action.from_str(text) for text in row.split()]
        self._validate_and_set_stage_mapping(self.pipeline_order)


class WithW(PipelineScheduleMulti):
    """Split backward, weights put off."""

    stages_on_ranks = {0: 0, 1: 1, 2: 0, 3: 1}  # noqa: RUF012
    microbatches = 2

    def __init__(self, stages: list[Any], n_microbatches: int, **options: Any) -> None:
        super().__init__(stages, n_microbatches, **options)
        self.use_full_backward = False
        done = {
            0: [
                (0, F, 0),
                (0, F, 1),
                (2, F, 0),
                (2, F, 1),
                (2, I, 0),
                (2, W, 0),
                (0, I, 0),
                (2, I, 1),
                (0, W, 0),
            ],
            1: [
                (1, F, 0),
                (1, F, 1),
                (3, F, 0),
                (3, I, 0),
                (3, F, 1),
                (1, I, 0),
                (3, I, 1),
                (3, W, 0),
                (1, I, 1),
            ],
        }
        done[0] += [(0, I, 1), (2, W, 1), (0, W, 1)]
        done[1] += [(1, W, 0), (3, W, 1), (1, W, 1)]
        self.pipeline_order = {rank: [_Action(*each) for each in row] for rank, row in done.items()}
        self._validate_and_set_stage_mapping(self.pipeline_order)


class WithReorderedB(_PipelineScheduleRuntime):
    """Communication by hand: both sends after both forwards."""

    stages_on_ranks = {0: 0, 1: 1}  # noqa: RUF012
    microbatches = 2

    def __init__(self, stages: list[Any], n_microbatches: int, **options: Any) -> None:
        super().__init__(stages, n_microbatches, **options)  # type: ignore[no-untyped-call]
        kinds = {0: (F, SEND_F, RECV_B, B), 1: (RECV_F, F, B, SEND_B)}
        self.pipeline_order_with_comms = {
            rank: [_Action(rank, kind, k) for kind in row for k in range(2)] for rank, row in kinds.items()
        }


class Prepared(_PipelineScheduleRuntime):
    """An order that is lowered when it is ready."""

    stages_on_ranks = {0: 0, 1: 1}  # noqa: RUF012
    microbatches = 3

    def __init__(self, stages: list[Any], n_microbatches: int, **options: Any) -> None:
        super().__init__(stages, n_microbatches, **options)  # type: ignore[no-untyped-call]
        order: dict[int, list[Any]] = {rank: [] for rank in range(self.pp_group_size)}
        for rank, row in order.items():
            row += [_Action(rank, F, k) for k in range(n_microbatches)]
            row += [_Action(rank, B, k) for k in reversed(range(n_microbatches))]
        self._prepare_schedule_with_comms(order)


class Backwards(ScheduleInterleaved1F1B):
    """A rank's list of one's own in place of the family's."""

    stages_on_ranks = {0: 0, 1: 1, 2: 0, 3: 1}  # noqa: RUF012
    microbatches = 2

    def _calculate_single_rank_operations(self, rank: int) -> list[Any]:
        stages = (rank, rank + self.pp_group_size)
        row = [_Action(stage, F, k) for stage in stages for k in reversed(range(self._n_microbatches))]
        return row + [
            _Action(stage, B, k) for stage in stages[::-1] for k in reversed(range(self._n_microbatches))
        ]


class OneByOne(PipelineScheduleSingle):
    """One stage per rank, one microbatch after the other."""

    stages_on_ranks = {0: 0, 1: 1}  # noqa: RUF012
    microbatches = 3

    def _get_pipeline_order(self) -> Any:
        ranks, ks = range(self._num_stages), range(self._n_microbatches)
        return {rank: [_Action(rank, kind, k) for k in ks for kind in (F, B)] for rank in ranks}


OWN = (VShaped, Unbalanced, WithW, WithReorderedB, Prepared, Backwards, OneByOne)
