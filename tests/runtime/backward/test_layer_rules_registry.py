"""Promise: rules are found by forward function, users add rules, and compiled modules run unchanged."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import PipelineError
from penstock.runtime.backward.deferral import Deferral
from penstock.runtime.backward.layer_rules import _REGISTRY, Tensors, register_layer, rule_of
from tests.support.deferring import assert_as_plain, deferred_calls, deferring, numbers

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def test_a_rule_is_found_by_the_forward_function() -> None:
    made_on_the_fly = nn.Linear(8, 8)
    made_on_the_fly.__class__ = type("ShardedLinear", (nn.Linear,), {})

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight) * 2

    class Reversed(nn.Conv1d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return functional.conv1d(x.flip(0), weight, bias)

    model = nn.ModuleList([made_on_the_fly, Doubled(8, 8), Reversed(8, 8, 1)])
    assert Deferral(model).layers == (made_on_the_fly,)


def test_the_weight_is_read_when_the_layer_runs() -> None:
    layer = nn.Linear(8, 8)
    deferral = Deferral(layer)
    layer.weight = nn.Parameter(torch.zeros(8, 8))
    with deferral.installed():
        output = layer(numbers(3, 8))
    output.sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias is not None
    assert torch.equal(output, layer.bias.expand(3, 8))


def test_a_layer_called_with_several_tensors_runs_its_own_forward() -> None:
    class Sized(nn.ConvTranspose1d):
        pass

    layer = Sized(4, 4, 3, stride=2)
    deferral = Deferral(layer)
    with deferring(deferral) as deferred:
        layer(numbers(2, 4, 5), output_size=[12]).sum().backward()
        layer(input=numbers(2, 4, 5)).sum().backward()
    assert len(deferred.inputs()) == 0
    assert layer.weight.grad is not None


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(numbers(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class ScaleRule:
    weights = ("factor",)

    def forward(self, _layer: Scale, x: Tensor, *weights: Tensor | None) -> Tensor:
        assert weights[0] is not None
        return x * weights[0]

    def input_gradient(self, _layer: Scale, _x: Tensor, weights: Tensors, gradient: Tensor) -> Tensor:
        assert weights[0] is not None
        return gradient * weights[0]

    def weight_gradients(
        self, _layer: Scale, x: Tensor, _weights: Tensors, gradient: Tensor, _wanted: tuple[bool, ...]
    ) -> Tensors:
        return ((gradient * x).sum((0, 1)),)


def test_a_user_layer_type_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Scale(), nn.Linear(8, 8))
    x = numbers(4, 5, 8).requires_grad_()
    monkeypatch.setitem(_REGISTRY, Scale.forward, None)
    del _REGISTRY[Scale.forward]
    assert deferred_calls(model, x) == 2
    register_layer(Scale, ScaleRule())
    assert deferred_calls(model, x) == 3
    assert_as_plain(model, x)
    del _REGISTRY[Scale.forward]


def test_a_type_that_inherits_its_forward_cannot_replace_the_rule() -> None:
    class Named(nn.Linear):
        pass

    with pytest.raises(PipelineError, match="Named inherits the forward of Linear"):
        register_layer(Named, rule_of(nn.Linear(1, 1)))  # type: ignore[arg-type]


def test_compiled_modules_run_unchanged_and_are_listed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8)))
    model[1].compile(backend="eager")
    model.register_module("2", torch.compile(model[2], backend="eager"))  # type: ignore[arg-type]
    deferral = Deferral(nn.ModuleDict({"model": model}))
    assert deferral.layers == (model[0],)
    assert deferral.compiled == ("model.1", "model.2")


@pytest.mark.full
def test_the_compiler_is_not_loaded_to_look_for_compiled_modules() -> None:
    program = (
        "import sys, torch, penstock.runtime.backward.deferral as d\n"
        "d.Deferral(torch.nn.Linear(1, 1))\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)  # noqa: S603
