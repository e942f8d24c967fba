"""Promise: whole models get the gradients of a plain backward, checkpointed, frozen or in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.runtime.backward.deferral import Deferral
from penstock.runtime.backward.layer_rules import rule_of
from tests.support.deferring import (
    Block,
    Chain,
    Inputs,
    Run,
    assert_as_plain,
    deferred_calls,
    deferring,
    numbers,
    split,
    upstream,
    whole,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return -x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return -gradient


def negated(x: Tensor) -> Tensor:
    y: Tensor = Negated.apply(x)  # type: ignore[no-untyped-call]
    return y


MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "blocks": (nn.Sequential(Block(), Block()), (3, 5, 16)),
    "chunks of an output": (
        Chain(nn.Linear(8, 12), last=lambda y: y.chunk(3, -1)[0] * y.chunk(3, -1)[2]),
        (4, 5, 8),
    ),
    "one chunk alone": (Chain(nn.Linear(8, 12), last=lambda y: y.chunk(3, -1)[1]), (4, 5, 8)),
    "view as output": (Chain(nn.Linear(8, 12), last=lambda y: y.view(2, -1)), (4, 5, 8)),
    "own function": (nn.Sequential(nn.Linear(8, 8), Chain(last=negated), nn.Linear(8, 4)), (4, 5, 8)),
    "in place after linear": (
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)),
        (4, 5, 8),
    ),
    "in place after 2d": (nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)), (4, 8)),
    "in place after convolution": (nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU(inplace=True)), (4, 8, 9)),
    "in place without batch": (nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU(inplace=True)), (8, 9)),
    "encoder layer": (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), (3, 5, 16)),
    "batch norm": (nn.Sequential(nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3)), (4, 8, 9)),
    "layer called twice": (nn.Sequential(*[nn.Linear(8, 8)] * 3), (4, 5, 8)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("first", [False, True], ids=["inner stage", "first stage"])
def test_a_model_gets_the_gradients_of_a_plain_backward(name: str, *, first: bool) -> None:
    model, shape = MODELS[name]
    inputs = [numbers(*shape, seed=seed).requires_grad_(not first) for seed in range(3)]
    assert_as_plain(model, *inputs)


def test_only_the_layers_inside_attention_are_split() -> None:
    assert (
        deferred_calls(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), numbers(3, 5, 16))
        == 2
    )


def test_the_first_layer_of_the_first_stage_computes_no_input_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(8, 4)
    monkeypatch.setattr(type(rule_of(nn.Linear(1, 1))), "input_gradient", None)
    assert deferred_calls(layer, numbers(3, 8)) == 1
    assert layer.weight.grad is None


def test_i_computes_no_weight_gradient_of_a_deferred_layer() -> None:
    model, x = nn.Sequential(Block(), Block()), numbers(3, 5, 16).requires_grad_()
    assert deferred_calls(model, x) == 10
    assert x.grad is not None
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("norm" in name), name


@pytest.mark.parametrize(
    "frozen", [["0.weight"], ["0.bias"], ["2.weight"], ["2.bias"], ["0.weight", "0.bias"]], ids=str
)
@pytest.mark.parametrize("first", [False, True], ids=["inner stage", "first stage"])
def test_frozen_parameters_get_none(frozen: list[str], *, first: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    for name in frozen:
        model.get_parameter(name).requires_grad = False
    assert_as_plain(model, numbers(4, 5, 8).requires_grad_(not first))


def test_a_frozen_layer_runs_its_own_forward() -> None:
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(requires_grad=False), nn.Linear(8, 8))
    assert Deferral(model).layers == (model[1],)


def test_two_microbatches_in_flight() -> None:
    def interleaved(module: nn.Module, inputs: Inputs) -> None:
        deferral = Deferral(module)
        with deferral.installed():
            outputs = [module(x) for x in inputs]
            pending = []
            for output in outputs:
                with deferring(deferral) as deferred:
                    output.backward(upstream(output))
                pending.append(deferred)
            for deferred in reversed(pending):
                deferred.run()

    # two terms, so that the order of W does not show in the rounding
    assert_as_plain(
        nn.Sequential(Block(), Block()),
        *(numbers(3, 5, 16, seed=s).requires_grad_() for s in (0, 1)),
        runs=(interleaved,),
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("run", [split, whole])
def test_a_checkpointed_region_is_recomputed_once(run: Run, *, reentrant: bool) -> None:
    calls = 0

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def region(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            y: Tensor = self.block(x)
            return y

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.region, x, use_reentrant=reentrant)
            return y

    model = nn.Sequential(nn.Linear(16, 16), Counted(), nn.Linear(16, 16))
    assert_as_plain(model, numbers(3, 5, 16).requires_grad_(), runs=())
    calls = 0
    assert_as_plain(model, numbers(3, 5, 16).requires_grad_(), runs=(run,))
    assert calls == 4  # forward and recomputation, plainly and then deferred
