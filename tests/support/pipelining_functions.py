"""Custom functions for actions, written as for torch; they run on every rank."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from tests.support.pipelining_scripts import (
    ROWS,
    Run,
    loop,
)
from tests.support.pipelining_usage import made


def forward_as_torch_writes_it(action: Any, ctx: Any) -> None:
    """In place of a forward: what torch asks such a function to do."""
    from penstock.pipelining.schedules import _wait_batch_p2p  # noqa: PLC0415 -- where the script runs

    schedule = ctx.schedule_ref
    stages = {stage.stage_index: stage for stage in schedule._stages}
    stage, k = stages[action.stage_index], action.microbatch_index
    schedule._assert_unsharded(stage)
    if not stage.is_first and stage.stage_index - 1 not in stages:
        assert (stage.stage_index, k) in schedule.fwd_recv_ops
        _wait_batch_p2p(schedule.fwd_recv_ops.pop((stage.stage_index, k)))
    output = stage.forward_one_chunk(k, ctx.arg_mbs[k], ctx.kwarg_mbs[k])
    assert output.shape == (ROWS, 8)
    schedule._maybe_compute_loss(stage, output, ctx.target_mbs, k)
    if stage.stage_index + 1 in stages:
        stages[stage.stage_index + 1].set_local_fwd_input(output, k)


def backward_as_torch_writes_it(action: Any, ctx: Any) -> None:
    """In place of a full backward."""
    from penstock.pipelining.schedules import _wait_batch_p2p  # noqa: PLC0415

    schedule = ctx.schedule_ref
    stages = {stage.stage_index: stage for stage in schedule._stages}
    stage, k = stages[action.stage_index], action.microbatch_index
    if not stage.is_last and stage.stage_index + 1 not in stages:
        _wait_batch_p2p(schedule.bwd_recv_ops.pop((stage.stage_index, k)))
    loss = schedule._maybe_get_loss(stage, k)
    assert (loss is not None) == stage.is_last
    schedule.backward_counter[stage.stage_index] += 1
    last = schedule.backward_counter[stage.stage_index] == schedule._n_microbatches
    stage.backward_one_chunk(k, loss=loss, full_backward=True, last_backward=last)
    if stage.stage_index - 1 in stages:
        stages[stage.stage_index - 1].set_local_bwd_input(stage.get_local_bwd_output(k), k)


def train_with_functions(threads: bool) -> Run:  # noqa: FBT001
    """DualPipeV with functions for F and for overlapped pairs, written for torch."""
    from penstock.pipelining.schedules import OVERLAP_F_B, F  # noqa: PLC0415

    schedule, parts = made("DualPipeV", 8)
    counts: Counter[str] = Counter()

    def forward(action: Any, ctx: Any) -> None:
        counts["F"] += 1
        forward_as_torch_writes_it(action, ctx)

    def overlap(action: Any, ctx: Any) -> None:
        counts["OVERLAP_F_B"] += 1
        one, other = action.sub_actions
        if not threads:
            forward_as_torch_writes_it(one, ctx)
            backward_as_torch_writes_it(other, ctx)
            return
        thread = threading.Thread(target=backward_as_torch_writes_it, args=(other, ctx))
        thread.start()
        forward_as_torch_writes_it(one, ctx)
        thread.join()

    schedule.register_custom_function(F, forward)
    schedule.register_custom_function(OVERLAP_F_B, overlap)
    run = loop(schedule, parts, 7, ROWS * 8, steps=1)
    row = schedule.pipeline_order[dist.get_rank()]
    run.about = dict(counts), dict(Counter(action.computation_type.value for action in row))
    return run


def train_with_a_function_for_each_kind() -> Run:
    """Every kind in its turn, also forwards inside of pairs."""
    from penstock.pipelining import schedules as untyped  # noqa: PLC0415
    from penstock.pipelining.schedules import REDUCE_GRAD, B, F, I, W  # noqa: PLC0415

    names: Any = untyped
    waits = [names.WAIT_REDUCE_GRAD] if hasattr(names, "WAIT_REDUCE_GRAD") else []
    schedule, parts = made("DualPipeV", 8)
    counts: Counter[str] = Counter()

    def run_it(action: Any, ctx: Any) -> None:
        counts[action.computation_type.value] += 1
        stages = {stage.stage_index: stage for stage in ctx.schedule_ref._stages}
        stage, k = stages[action.stage_index], action.microbatch_index
        if action.computation_type == F:
            stage.forward_one_chunk(k, ctx.arg_mbs[k], ctx.kwarg_mbs[k])
        elif action.computation_type == W:
            stage.backward_weight_one_chunk(k)
        elif action.computation_type in waits:
            stage.wait_for_gradient_reduction(8)
        elif action.computation_type == REDUCE_GRAD and waits:
            stage.start_gradient_reduction()
        elif action.computation_type == REDUCE_GRAD:
            stage.perform_reduce_grad(8)
        else:
            stage.backward_one_chunk(k, None, action.computation_type == B)

    kinds = (F, B, I, W, REDUCE_GRAD, *waits)
    for kind in kinds:
        schedule.register_custom_function(kind, run_it)
    run = loop(schedule, parts, 7, ROWS * 8)
    row = schedule.pipeline_order_with_comms[dist.get_rank()]
    wanted = Counter(part.computation_type.value for a in row for part in a.sub_actions or (a,))
    run.about = dict(counts), {kind.value: 2 * wanted[kind.value] for kind in kinds}
    return run


def rejected_functions() -> list[str]:
    """The errors of invalid functions."""
    from penstock.pipelining.schedules import SEND_F, F  # noqa: PLC0415

    messages = []
    schedule, parts = made("Interleaved1F1B", 4)
    try:
        schedule.register_custom_function(SEND_F, print)
    except ValueError as error:
        messages.append(type(error).__name__)
    x = torch.zeros(ROWS, 8)
    for wrong in (
        lambda _, ctx: ctx.schedule_ref._stages[0].backward_one_chunk(bwd_chunk_id=0),
        lambda _, ctx: ctx.schedule_ref._stages[0].forward_one_chunk(0, (x,), {}),
    ):
        schedule.register_custom_function(F, wrong)
        try:
            loop(schedule, parts, 7, ROWS * 4, steps=1)
        except ValueError as error:
            messages.append(str(error))
    return messages


def fail_after_a_pair() -> str:
    """Pairs run by a function, then a failure in an action that is no pair."""
    from penstock.pipelining.schedules import OVERLAP_F_B, REDUCE_GRAD  # noqa: PLC0415

    schedule, parts = made("DualPipeV", 8)

    def overlap(action: Any, ctx: Any) -> None:
        forward_as_torch_writes_it(action.sub_actions[0], ctx)
        backward_as_torch_writes_it(action.sub_actions[1], ctx)

    def fail(_action: Any, _ctx: Any) -> None:
        raise RuntimeError("too late")

    schedule.register_custom_function(OVERLAP_F_B, overlap)
    schedule.register_custom_function(REDUCE_GRAD, fail)
    try:
        loop(schedule, parts, 7, ROWS * 8, steps=1)
    except ValueError as error:
        return str(error)
    return ""
