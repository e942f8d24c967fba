"""Promise: what a script overrides or replaces of torch's package is obeyed or refused, never ignored."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.stage import _PipelineStageBase

from penstock.pipelining import _runner
from tests.oracles.torch_schedules import HAS_WAITS
from tests.support import pipelining_overrides, pipelining_refusals
from tests.support.pool import Pools


def test_overridden_losses_stage_methods_and_steps_are_run_as_by_torch(pools: Pools) -> None:
    assert pools(2).run(pipelining_overrides.compare) == [[], []]


@pytest.mark.parametrize("kind", ["DDP", "FSDP"])
@pytest.mark.full
def test_overridden_methods_run_with_replicas_and_shards(pools: Pools, kind: str) -> None:
    for off in pools(4).run(pipelining_overrides.with_replicas, kind):
        assert off
        assert max(off) == 0


def test_changes_that_would_be_ignored_are_refused_on_every_rank(pools: Pools) -> None:
    for messages in pools(2).run(pipelining_refusals.refusals):
        replaced, patched, removed, scale, deferring, silent, scaling, computing, reducing = messages
        assert "submod of stage 1 changed after the first step" in replaced
        assert "forward_one_chunk of stage 1 is replaced on the object" in patched
        assert "_loss_fn changed after the first step" in removed
        assert "scale_grads changed after the first step" in scale
        assert "dw_builder of stage 1 changed after the first step" in deferring
        assert "did not run 0F0" in silent
        assert "overrides scale_grads, which would be ignored" in scaling
        assert "Computing overrides _maybe_compute_loss, which would be ignored" in computing
        names = "start_gradient_reduction, wait_for_gradient_reduction"  # torch before 2.15 does not call them
        assert (f"overrides {names}, which would be ignored" if HAS_WAITS else "no error") in reducing


def test_every_public_method_of_a_stage_is_obeyed_or_refused() -> None:
    """The others tell where a stage is, or how it is set up."""
    public = {name for name in vars(_PipelineStageBase) if name[0] != "_"}
    handled = {*_runner._KINDS, _runner._FORWARD, *_runner._UNUSED_OF_STAGES}
    assert public - handled == {"has_backward", "is_first", "is_last"} | (
        {"register_forward_context"} if HAS_WAITS else set()
    )
    new = {"start_gradient_reduction", "wait_for_gradient_reduction", "release_fwd_send_outputs"}
    assert {name for name in handled if name[0] != "_"} - public == (set() if HAS_WAITS else new)


def test_a_step_of_an_order_without_backwards_is_refused_if_there_is_a_loss(pools: Pools) -> None:
    found = pools(2).run(pipelining_refusals.forward_orders)
    for message, _ in found:
        assert "its order has no backward, so step() would train nothing" in message
    assert [shape for _, shape in found] == ["", "(8, 8)"]
