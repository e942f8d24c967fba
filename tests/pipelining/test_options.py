"""Promise: every option of torch 2.15's constructors acts as with torch, or is refused by name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import penstock
from penstock.runtime.dtensors import whole
from penstock.runtime.torch_internals.data_parallel import FsdpShards
from tests.oracles import torch_schedules as oracle
from tests.support.pipelining_orders import NAMES, made, order, ours, texts
from tests.support.pipelining_scripts import CPU, ROWS, batch, modules
from tests.support.pool import Pools

since_2_15 = pytest.mark.skipif(oracle.RELEASE < (2, 15), reason="torch has the options from 2.15 on")

OPTIONS: tuple[dict[str, Any], ...] = (
    {"max_active_stages": 2},
    {"max_active_stages": 4, "unshard_lookahead": "auto"},
    {"unshard_lookahead": (1, 3), "defer_reduce_grad_wait": True},
    {"defer_reduce_grad_wait": True},
)


@since_2_15
@pytest.mark.parametrize("name", NAMES)
def test_the_lists_with_an_option_are_torchs(name: str) -> None:
    acted = [False] * len(OPTIONS)
    for stages_per_rank, m in itertools.product((2, 5), (4, 8)):
        try:
            plain = oracle.as_rows(oracle.built(name, 2, stages_per_rank, m).pipeline_order_with_comms)
        except ValueError:
            continue
        for nth, options in enumerate(OPTIONS):
            yours = oracle.built(name, 2, stages_per_rank, m, **options)
            wanted = oracle.as_rows(yours.pipeline_order_with_comms)
            assert texts(made(name, 2, m, stages_per_rank, **options).pipeline_order_with_comms) == wanted
            acted[nth] |= wanted != plain
    # two stages on a rank are never more than fit, but for the look-ahead of one
    assert acted == [name not in ("ZBVZeroBubble", "DualPipeV")] * 2 + [True] * 2


@since_2_15
@pytest.mark.parametrize("name", NAMES)
def test_the_lists_with_a_budget_of_sends_are_torchs(name: str) -> None:
    # with a V and deferred receives ours keep the order of each channel, and torch's do not
    orders = (False,) if name in ("ZBVZeroBubble", "DualPipeV") else (False, True)
    for limit, deferred in itertools.product((1, 2, 3), orders):
        options = {"max_outstanding_sends": limit, "defer_pp_recv": deferred}
        try:
            yours = oracle.built(name, 4, 2, 8, **options)
        except ValueError:
            with pytest.raises(ValueError, match="send-budget"):
                made(name, 4, 8, 2, **options)
            continue
        wanted = oracle.as_rows(yours.pipeline_order_with_comms)
        assert texts(made(name, 4, 8, 2, **options).pipeline_order_with_comms) == wanted


@since_2_15
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_active_stages": 0}, "max_active_stages must be at least 1"),
        ({"unshard_lookahead": "some"}, "lookahead must be"),
        ({"unshard_lookahead": (1, 4)}, "from 1 to max_active_stages=3"),
        ({"unshard_lookahead": (1, True)}, "from 1 to max_active_stages=3"),
        ({"unshard_lookahead": (1,)}, "1 numbers, but the schedule has 2 ranks"),
        ({"max_outstanding_sends": 0}, "send-budget"),
        ({"max_outstanding_sends": True}, "max_outstanding_sends"),
    ],
)
def test_wrong_values_are_refused_by_the_constructor(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made("LoopedBFS", 2, 4, **options)


@since_2_15
@pytest.mark.parametrize("options", OPTIONS)
def test_options_are_refused_for_a_list_that_has_communication(options: dict[str, Any]) -> None:
    """Torch refuses only a look-ahead, and ignores the others."""
    schedule = made("LoopedBFS", 2, 4, **options)
    lowered = schedule.pipeline_order_with_comms
    with pytest.raises(penstock.errors.PipelineError, match=next(iter(options))):
        schedule._prepare_schedule_with_comms(lowered, format="compute_comms")
    full = made("LoopedBFS", 2, 4, unshard_lookahead=(3, 3))
    full._prepare_schedule_with_comms(lowered, format="compute_comms")
    assert texts(full.pipeline_order_with_comms) == texts(lowered)


@pytest.mark.skipif(oracle.RELEASE >= (2, 15), reason="torch has the options")
def test_options_of_a_newer_torch_are_unknown_as_in_torch() -> None:
    stages = made("LoopedBFS", 1, 1)._stages
    for name in ("max_active_stages", "unshard_lookahead", "defer_reduce_grad_wait"):
        for make in (ours._PipelineScheduleRuntime, oracle.torch_schedules._PipelineScheduleRuntime):
            with pytest.raises(TypeError, match=name):
                make(stages, 1, **{name: 2})


# --- in training -----------------------------------------------------------------------------------


def train_shards(options: dict[str, Any]) -> tuple[list[str], dict[str, Tensor]]:
    """What a step does with the shards of four stages, on two replicas of one rank, and its gradients."""
    from penstock.pipelining import PipelineStage, ScheduleInterleaved1F1B  # noqa: PLC0415 -- on a rank

    groups = [dist.new_group([rank]) for rank in range(2)]
    parts, calls = modules(4), list[str]()
    for nth, part in enumerate(parts):
        fully_shard(part)
        part.register_forward_hook(lambda *_, nth=nth: calls.append(f"{nth}forward"))
        part.register_full_backward_hook(lambda *_, nth=nth: calls.append(f"{nth}backward"))

    def logged(name: str) -> Any:
        method = getattr(FsdpShards, name)

        def call(shards: Any) -> None:
            calls.append(f"{stage_of[id(shards)]}{name}")
            method(shards)

        return call

    stages = [PipelineStage(part, nth, 4, CPU, group=groups[dist.get_rank()]) for nth, part in enumerate(parts)]
    schedule: Any = ScheduleInterleaved1F1B(stages, 2, loss_fn=functional.mse_loss, **options)
    x, y = batch(dist.get_rank(), 2 * ROWS)
    with pytest.MonkeyPatch.context() as patched:
        for name in ("unshard", "reduce", "wait"):
            patched.setattr(FsdpShards, name, logged(name))
        replication = schedule._connect().pipeline._replication
        stage_of = {id(shards): stage for stage, shards in replication.shards.items()}
        schedule.step(x, target=y)
    named = ((f"{nth}.{key}", each) for nth, part in enumerate(parts) for key, each in part.named_parameters())
    return calls, {key: whole(parameter.grad) for key, parameter in named}


@since_2_15
def test_options_act_in_a_step_and_gradients_are_right(pools: Pools) -> None:
    alone = nn.Sequential(*modules(4))
    for replica in range(2):
        x, y = batch(replica, 2 * ROWS)
        torch.autograd.backward(functional.mse_loss(alone(x), y) / 2)
    orders = []
    for options in ({}, {"max_active_stages": 1}, {"unshard_lookahead": (1,), "defer_reduce_grad_wait": True}):
        for calls, gradients in pools(2).run(train_shards, options):
            reducing = calls[calls.index("3reduce") : calls.index("3wait")]
            assert ("2backward" in reducing) == ("defer_reduce_grad_wait" in options)
            for key, parameter in alone.named_parameters():
                torch.testing.assert_close(gradients[key], parameter.grad)
        orders.append([call for call in calls if not call.endswith(("reduce", "wait"))])
    assert all(one != other for one, other in itertools.combinations(orders, 2)), "what is gathered when"


@since_2_15
def test_a_function_may_reduce_and_wait_as_in_torch() -> None:
    """The kinds of torch 2.15 that functions can replace."""
    schedule = made("LoopedBFS", 1, 1, 1)
    schedule.register_custom_function(oracle.torch_schedules.WAIT_REDUCE_GRAD, print)
    with pytest.raises(ValueError):
        schedule.register_custom_function(oracle.torch_schedules.WAIT_SEND_F, print)
    assert order("0REDUCE_GRAD 0WAIT_REDUCE_GRAD")[0] == schedule.pipeline_order_with_comms[0][-3:-1]
