"""Promise: live activations are counted, inputs may be changed in place, and a graph outlives its output."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.runtime.stage.microbatch import LiveActivations, MicrobatchState, count_changes, non_leaf_inputs
from penstock.runtime.torch_internals.autograd import run_backward


def test_the_peak_is_the_most_at_once_since_the_reset() -> None:
    live = LiveActivations()
    for change in (live.add, live.add, live.remove, live.add, live.add, live.remove):
        change()
    assert (live.count, live.peak) == (2, 3)
    live.reset()
    assert (live.count, live.peak) == (0, 0)


INPUTS = {
    "contiguous": lambda: torch.ones(2, 3),
    "transposed": lambda: torch.ones(3, 2).t(),
    "with gaps": lambda: torch.ones(4, 3)[::2],
    "empty": lambda: torch.ones(0, 3),
    "a number": lambda: torch.tensor(1.0),
    "sparse": lambda: torch.ones(2, 3).to_sparse(),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_may_be_changed_in_place_and_an_unused_one_has_no_gradient(name: str) -> None:
    used, unused = (INPUTS[name]().requires_grad_() for _ in range(2))
    entered, _ = non_leaf_inputs([used, unused])
    assert entered.layout is torch.sparse_coo or entered.data_ptr() == used.data_ptr()
    doubled = entered * 2
    torch.autograd.backward((entered.mul_(3) + doubled).sum())
    assert used.grad is not None
    assert torch.equal(used.grad.to_dense(), torch.full(used.shape, 5.0))
    assert unused.grad is None


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("changed_before", [False, True])
def test_a_leaf_counts_changes_in_place_of_what_entered_the_stage(name: str, *, changed_before: bool) -> None:
    changed, same = (INPUTS[name]() for _ in range(2))
    if changed_before:
        changed.mul_(2)
        same.mul_(2)
    leaves = [changed.requires_grad_(), same.requires_grad_()]
    before = [leaf._version for leaf in leaves]
    entered = non_leaf_inputs(leaves)
    entered[0].mul_(2)
    count_changes(leaves, entered)
    assert [leaf._version > number for leaf, number in zip(leaves, before)] == [True, False]


def test_a_change_in_place_of_a_saved_input_is_an_error() -> None:
    (entered,) = non_leaf_inputs([torch.ones(2, requires_grad=True)])
    squared = entered * entered
    entered.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(squared.sum())


class Doubled(torch.autograd.Function):
    """A node of Python, which torch keeps only as long as a tensor refers to it."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a node of torch": lambda x: x * 2,
    "a node of Python": Doubled.apply,
    "a view": lambda x: (x * 2)[:1],
    "the second output of a node": lambda x: torch.unbind(x * 2)[1],
    "the input": lambda x: x,
}


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_backward_starts_at_the_outputs_after_they_are_gone(name: str, uses: int) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    state, output = MicrobatchState((), [x]), OUTPUTS[name](x)
    (expected,) = torch.autograd.grad(OUTPUTS[name](x), x, torch.full_like(output, uses))
    state.start_at([output], uses)
    shape = output.shape
    del output
    gc.collect()
    assert state.shapes == [shape] * uses
    run_backward(state.roots, [torch.ones(shape)] * uses)
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_a_backward_starts_at_a_node_of_python_even_if_the_stage_has_disabled_gradients() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    state, output = MicrobatchState((), [x]), OUTPUTS["a node of Python"](x)
    with torch.no_grad():
        state.start_at([output], 1)
    run_backward(state.roots, [torch.ones(2, 3)])
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))
