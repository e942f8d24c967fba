"""Promise: live activations are counted, and the inputs of a stage may be changed in place."""

from __future__ import annotations

import torch

from penstock.runtime.execution.microbatch_state import LiveActivations, NonLeafInputs


def test_the_peak_is_the_most_at_once_since_the_reset() -> None:
    live = LiveActivations()
    for change in (live.add, live.add, live.remove, live.add, live.add, live.remove):
        change()
    assert (live.count, live.peak) == (2, 3)
    live.reset()
    assert (live.count, live.peak) == (0, 0)


def test_inputs_may_be_changed_in_place_and_an_unused_one_has_no_gradient() -> None:
    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    entered, _ = NonLeafInputs.apply(used, unused)  # type: ignore[no-untyped-call]
    entered.mul_(3).sum().backward()
    assert used.grad is not None
    assert (used.grad.tolist(), unused.grad) == ([3, 3], None)
