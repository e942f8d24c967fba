"""Promise: a backward gives the gradients that torch.autograd.backward gives, and refuses what that refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.runtime.torch_internals.autograd import run_backward


def graph() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
    return module, x, module(x)


@pytest.mark.parametrize("edges", [False, True])
def test_gradients_are_those_of_torch_and_accumulate(*, edges: bool) -> None:
    gradient = torch.randn(2, 3)
    found = []
    for ours in (False, True):
        module, x, _ = graph()
        for _ in range(2):
            output = module(x)
            root = get_gradient_edge(output) if edges else output
            if ours:
                run_backward([root], [gradient])
            else:
                torch.autograd.backward([root], [gradient])
        found.append([x.grad, *(weight.grad for weight in module.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found))


def test_two_roots_in_one_graph_add_up() -> None:
    module, x, output = graph()
    run_backward([get_gradient_edge(output), output], [torch.ones(2, 3), torch.ones(2, 3)])
    expected = torch.autograd.grad(module(x), x, torch.full((2, 3), 2.0))[0]
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_a_gradient_of_another_shape_is_refused() -> None:
    _, _, output = graph()
    with pytest.raises(RuntimeError, match="shape"):
        run_backward([get_gradient_edge(output)], [torch.ones(5)])


def test_the_graph_is_freed() -> None:
    _, _, output = graph()
    run_backward([output], [torch.ones(2, 3)])
    with pytest.raises(RuntimeError, match="second time"):
        run_backward([output], [torch.ones(2, 3)])
