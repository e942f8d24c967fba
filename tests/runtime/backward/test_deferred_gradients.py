"""Promise: W adds weight gradients to those of earlier microbatches as autograd does, bit by bit, or fused."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import mse_loss

import penstock
from penstock.runtime import Pipeline, register_layer
from penstock.runtime.backward import deferral as deferred_gradients
from penstock.runtime.backward.layer_rules import _REGISTRY, rule_of
from tests.support.deferring import (
    Block,
    Inputs,
    assert_as_plain,
    autocasting,
    gradients,
    numbers,
    plainly,
    split,
    split_with_fusion,
)


def microbatches(*shape: int, count: int = 3) -> Inputs:
    return [numbers(*shape, seed=seed).requires_grad_() for seed in range(count)]


def by_autograd() -> Any:
    """Counts the microbatches whose W runs as a graph."""
    function = deferred_gradients._accumulate_by_autograd
    return mock.patch.object(deferred_gradients, "_accumulate_by_autograd", side_effect=function)


# --- hooks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", [False, True])
def test_hooks_on_the_accumulator_of_a_weight_run_in_every_w(*, fusion: bool) -> None:
    layer, seen = nn.Linear(4, 4), []
    node = get_gradient_edge(layer.weight).node
    handle = node.register_hook(lambda *_: seen.append(1))
    pipeline = Pipeline(
        [layer],
        penstock.build("zb-h1", ranks=1, microbatches=3),
        loss=mse_loss,
        gradient_accumulation_fusion=fusion,
    )
    for _ in range(2):
        pipeline.step(numbers(6, 4), target=numbers(6, 4))
    assert len(seen) == 6
    handle.remove()
    del node
    with by_autograd() as graphs:
        pipeline.step(numbers(6, 4), target=numbers(6, 4))
    assert graphs.call_count == 0, "nothing holds the accumulator any more, and there is a gradient"


# --- bit by bit ------------------------------------------------------------------------------------


def test_later_microbatches_need_no_graph_and_change_no_bit() -> None:
    with by_autograd() as graphs:
        assert_as_plain(nn.Sequential(Block(), Block()), *microbatches(3, 5, 16), runs=(split,))
    assert graphs.call_count == 1


def test_the_gradients_of_several_calls_are_summed_before_they_are_accumulated() -> None:
    tied = nn.Linear(16, 16)
    with by_autograd() as graphs:
        assert_as_plain(nn.Sequential(tied, nn.Tanh(), tied, tied), *microbatches(3, 5, 16), runs=(split,))
    assert graphs.call_count == 3


def test_gradients_computed_in_another_dtype_change_no_bit() -> None:
    with autocasting():
        assert_as_plain(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), *microbatches(3, 5, 16))


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class ShiftRule:
    """Leaves the sum over rows, and the dtype, to whoever accumulates."""

    weights = ("weight",)

    def forward(self, _layer: Shift, x: Tensor, *weights: Tensor | None) -> Tensor:
        return x + weights[0]  # type: ignore[operator]

    def input_gradient(self, _layer: Shift, _x: Tensor, _weights: Any, gradient: Tensor) -> Tensor:
        return gradient

    def weight_gradients(
        self, _layer: Shift, _x: Tensor, _weights: Any, gradient: Tensor, _wanted: Any
    ) -> tuple[Tensor]:
        return (gradient.double(),)


def test_a_gradient_of_another_shape_and_dtype_is_reduced_and_cast() -> None:
    register_layer(Shift, ShiftRule())
    try:
        found = gradients(Shift(), microbatches(3, 4), split)["weight"]
    finally:
        del _REGISTRY[Shift.forward]
    wanted = gradients(Shift(), microbatches(3, 4), plainly)["weight"]
    torch.testing.assert_close(found, wanted)


def test_w_adds_to_a_gradient_in_place() -> None:
    layer = nn.Linear(4, 4)
    layer.weight.grad = before = torch.zeros(4, 4)
    layer.bias.grad = torch.zeros(4)
    split(layer, microbatches(3, 4))
    assert layer.weight.grad is before
    assert before.any()


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_anomaly_detection_sees_the_gradients_of_every_microbatch() -> None:
    layer = nn.Linear(4, 4)
    split(layer, microbatches(3, 4, count=1))
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan values"):
        split(layer, [torch.full((3, 4), torch.nan)])


# --- gradient accumulation fusion ------------------------------------------------------------------


def test_fusion_gives_the_same_gradients_up_to_rounding() -> None:
    model, inputs = nn.Sequential(Block(), Block()), microbatches(3, 5, 16)
    wanted = gradients(model, inputs, plainly)
    torch.testing.assert_close(gradients(model, inputs, split_with_fusion), wanted)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_fusion_leaves_a_frozen_weight_without_gradient(frozen: str) -> None:
    layer, inputs = nn.Linear(4, 4), microbatches(3, 4)
    layer.get_parameter(frozen).requires_grad = False
    found = gradients(layer, inputs, split_with_fusion)
    assert found[frozen] is None
    torch.testing.assert_close(found, gradients(layer, inputs, plainly))


def test_fusion_computes_no_temporary_gradient_after_the_first_microbatch() -> None:
    layer = nn.Linear(4, 4)
    rule = rule_of(layer)
    assert rule is not None
    with mock.patch.object(rule, "weight_gradients", side_effect=rule.weight_gradients) as temporary:
        split_with_fusion(layer, microbatches(3, 4))
    assert temporary.call_count == 1


def test_fusion_changes_no_bit_where_dtypes_differ_or_the_rule_cannot_fuse() -> None:
    runs = (split_with_fusion,)
    assert_as_plain(nn.Conv1d(4, 6, 3), *microbatches(2, 4, 9), runs=runs)
    with autocasting():
        assert_as_plain(nn.Linear(16, 16), *microbatches(3, 5, 16), runs=runs)


def test_hooks_fire_with_fusion() -> None:
    layer = nn.Linear(4, 4)
    seen: list[Tensor] = []
    layer.bias.register_hook(seen.append)  # type: ignore[no-untyped-call]
    split_with_fusion(layer, microbatches(3, 4))
    assert len(seen) == 3


@pytest.mark.parametrize("fusion", [False, True])
def test_a_pipeline_fuses_only_if_it_is_asked_to(*, fusion: bool) -> None:
    layer, x, y = nn.Linear(4, 4), numbers(8, 4), numbers(8, 4, seed=1)
    wanted = copy.deepcopy(layer)
    torch.autograd.backward(mse_loss(wanted(x), y))
    fused = mock.Mock(side_effect=deferred_gradients.DeferredGradient.add_fused)
    with (
        mock.patch.object(deferred_gradients.DeferredGradient, "add_fused", fused),
        Pipeline(
            [layer], "zb-h1", microbatches=4, loss=mse_loss, gradient_accumulation_fusion=fusion
        ) as pipeline,
    ):
        pipeline.step(x, target=y)
    assert fused.call_count == (3 if fusion else 0)
    torch.testing.assert_close(layer.weight.grad, wanted.weight.grad)
