"""Promise: what a script overrides or replaces of torch's package is obeyed or refused, never ignored."""

from __future__ import annotations

import pytest

from tests.support import pipelining_overrides
from tests.support.pool import Pools

pytestmark = [pytest.mark.xdist_group("ranks-2"), pytest.mark.usefixtures("one_thread")]


def test_overridden_losses_stage_methods_and_steps_are_run_as_by_torch(pools: Pools) -> None:
    assert pools(2).run(pipelining_overrides.compare) == [[], []]


def test_changes_that_would_be_ignored_are_refused_on_every_rank(pools: Pools) -> None:
    for messages in pools(2).run(pipelining_overrides.refusals):
        replaced, patched, removed, silent, scaling = messages
        assert "submod of stage 1 was replaced after the first step" in replaced
        assert "forward_one_chunk of stage 1 is replaced on the object" in patched
        assert "_loss_fn was removed after the first step" in removed
        assert "did not run 0F0" in silent
        assert "overrides scale_grads, which would be ignored" in scaling


def test_a_step_of_an_order_without_backwards_is_refused_if_there_is_a_loss(pools: Pools) -> None:
    found = pools(2).run(pipelining_overrides.forward_orders)
    for message, _ in found:
        assert "its order has no backward, so step() would train nothing" in message
    assert [shape for _, shape in found] == ["", "(8, 8)"]
