"""Promise: a split backward leaves nothing behind, on the module, in memory, or after a failure."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.runtime.backward.deferral import Deferral
from tests.support.deferring import Block, deferred_calls, deferring, gradients, numbers, plainly, upstream

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def test_a_deferral_leaves_no_attribute_on_the_module() -> None:
    model = Block()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    deferral = Deferral(model)
    with deferral.installed(), deferral.installed():
        assert all("forward" in layer.__dict__ for layer in deferral.layers)
    with pytest.raises(ZeroDivisionError), deferral.installed():
        raise ZeroDivisionError
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before


def test_a_layer_whose_forward_is_already_replaced_is_not_patched() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def mine(x: Tensor) -> Tensor:
        return x

    model[0].__dict__["forward"] = mine
    assert deferred_calls(model, numbers(3, 8)) == 1
    assert model[0].__dict__["forward"] is mine


def test_under_no_grad_a_layer_runs_its_own_forward() -> None:
    layer = nn.Linear(8, 8)
    with Deferral(layer).installed(), torch.no_grad():
        assert not layer(numbers(3, 8)).requires_grad


def test_w_runs_once() -> None:
    layer = nn.Linear(8, 8)
    with deferring(Deferral(layer)) as deferred:
        layer(numbers(3, 8)).sum().backward()
    assert len(deferred.inputs()) == 1
    deferred.run()
    assert len(deferred.inputs()) == 0
    with pytest.raises(PipelineError, match="already"):
        deferred.run()


def test_two_backwards_cannot_defer_at_the_same_time() -> None:
    deferral = Deferral(nn.Linear(8, 8))
    with deferring(deferral), pytest.raises(PipelineError, match="another backward"), deferring(deferral):
        pass


def test_w_runs_under_no_grad() -> None:
    layer = nn.Linear(8, 8)
    with deferring(Deferral(layer)) as deferred:
        layer(numbers(3, 8)).sum().backward()
    with torch.no_grad():
        deferred.run()
    assert layer.weight.grad is not None


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        raise ZeroDivisionError


@pytest.mark.parametrize("defers", [True, False])
def test_a_deferral_is_usable_after_a_failed_backward(*, defers: bool) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.Sequential(first, second)
    deferral, x = Deferral(model), numbers(3, 8)

    with deferral.installed():
        output = second(Failing.apply(first(x)))  # type: ignore[no-untyped-call]
        with pytest.raises(ZeroDivisionError), deferring(deferral) if defers else nullcontext():
            output.sum().backward()
        model.zero_grad()
        output = model(x)
        with deferring(deferral) as deferred:
            output.backward(upstream(output))
        deferred.run()
    wanted = gradients(model, [x], plainly)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=0, atol=0)


def test_a_backward_on_another_thread_defers_too() -> None:
    model = Block()
    deferral = Deferral(model)
    with deferring(deferral) as deferred:
        thread = threading.Thread(target=lambda: model(numbers(3, 5, 16)).sum().backward())
        thread.start()
        thread.join()
    assert len(deferred.inputs()) == 5


def test_w_releases_all_tensors() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Linear(8, 8))
    held: list[weakref.ref[Tensor]] = []
    model[2].register_forward_pre_hook(lambda _, inputs: held.append(weakref.ref(inputs[0])))
    model[2].register_full_backward_hook(lambda *given: held.append(weakref.ref(given[2][0])))
    with deferring(Deferral(model)) as deferred:
        model(numbers(3, 8)).sum().backward()
    gc.collect()
    assert all(each() is not None for each in held)
    gc.disable()
    try:
        deferred.run()
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(8, 8), (3, 8)), (nn.Conv1d(4, 6, 3), (2, 4, 9)), (nn.ConvTranspose1d(4, 6, 3), (2, 4, 9))],
)
def test_w_needs_the_shape_of_a_weight_but_not_its_values(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer, x = copy.deepcopy(layer), numbers(*shape)
    expected = gradients(layer, [x], plainly)["weight"]
    with deferring(Deferral(layer)) as deferred:
        plainly(layer, [x])
    weight = layer.get_parameter("weight")
    weight.untyped_storage().resize_(0)  # as sharding does once a layer's I is over
    deferred.run()
    assert weight.grad is not None
    assert expected is not None
    assert torch.equal(weight.grad, expected)


def test_a_full_backward_releases_all_tensors_of_a_microbatch() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    held: list[weakref.ref[Tensor]] = []
    model[2].register_forward_pre_hook(lambda _, inputs: held.append(weakref.ref(inputs[0])))
    gc.disable()
    try:
        with Deferral(model).installed():
            model(numbers(3, 8)).sum().backward()
            assert [each() for each in held] == [None]
    finally:
        gc.enable()


def test_a_double_backward_is_rejected() -> None:
    layer, x = nn.Linear(8, 8), numbers(3, 8).requires_grad_()
    with Deferral(layer).installed(), pytest.raises(PipelineError, match="create_graph"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_a_weight_changed_between_forward_and_backward_is_noticed_as_in_a_plain_backward() -> None:
    layer, x = nn.Linear(8, 8), numbers(3, 8).requires_grad_()
    with Deferral(layer).installed():
        output = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
