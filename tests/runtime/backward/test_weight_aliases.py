"""Promise: hooks fire as in a plain backward, and shared and parametrized weights get exact gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from penstock import Schedule
from penstock.errors import PipelineError
from penstock.runtime.backward.deferral import Deferral
from tests.support.deferring import (
    Block,
    Run,
    UsedTwice,
    assert_as_plain,
    deferred_calls,
    deferring,
    gradients,
    numbers,
    plainly,
    split,
    whole,
)
from tests.support.single_rank import WIDTH, schedules, train_both

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def count_hooks(module: nn.Module) -> dict[str, list[str]]:
    seen: dict[str, list[str]] = {name: [] for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        events = seen[name]
        parameter.register_hook(lambda gradient, to=events: to.append(f"hook {tuple(gradient.shape)}"))  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(
            lambda leaf, to=events: to.append(f"after {leaf.grad.sum()}")
        )  # type: ignore[no-untyped-call]
    return seen


@pytest.mark.parametrize("run", [split, whole])
def test_hooks_fire_once_per_microbatch_as_in_a_plain_backward(run: Run) -> None:
    tied = nn.Linear(16, 16)
    model = nn.Sequential(tied, Block(), nn.Linear(16, 16), tied)
    model[2].weight = tied.weight
    inputs = [numbers(3, 5, 16, seed=seed).requires_grad_() for seed in range(2)]
    seen = []
    for way in (plainly, run):
        module = copy.deepcopy(model)
        seen.append(count_hooks(module))
        way(module, inputs)
    assert seen[0] == seen[1]
    assert all(len(events) == 4 for events in seen[1].values())


def test_no_hook_of_a_deferred_weight_fires_in_i() -> None:
    model = nn.Linear(8, 8)
    seen = count_hooks(model)
    deferred_calls(model, numbers(3, 8))
    assert seen == {"weight": [], "bias": []}


def test_the_return_value_of_a_hook_is_accumulated() -> None:
    model = nn.Linear(8, 8)
    expected = gradients(model, [numbers(3, 8)], plainly)
    model.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    split(model, [numbers(3, 8)])
    assert expected["weight"] is not None
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, expected["weight"] * 2)


def test_a_weight_used_elsewhere_is_exact_before_it_is_excluded() -> None:
    assert_as_plain(UsedTwice(), numbers(3, 5, 8).requires_grad_())


@pytest.mark.parametrize("edges", [False, True], ids=["tensors", "edges"])
def test_an_excluded_weight_is_left_to_autograd(*, edges: bool) -> None:
    model, x = UsedTwice(), numbers(3, 5, 8)
    deferral = Deferral(model)
    with deferral.installed():
        output = model(x)
        root = torch.autograd.graph.get_gradient_edge(output) if edges else output
        assert [id(each) for each in deferral.state.exclude_shared(deferral.weights(), [root])] == [
            id(model.layer.weight)
        ]
        assert deferral.state.exclude_shared(deferral.weights(), [root]) == ()
        seen = count_hooks(model)
        with deferring(deferral) as deferred:
            model(x).sum().backward()
    assert len(deferred.inputs()) == 1
    assert {name: len(events) for name, events in seen.items() if events} == {
        "layer.weight": 2,
        "layer.bias": 2,
    }
    deferred.run()
    assert all(len(events) == 2 for events in seen.values())


def test_an_ordinary_model_has_no_shared_weight() -> None:
    tied = nn.Linear(16, 16)
    model = nn.Sequential(tied, Block(), tied)
    deferral = Deferral(model)
    with deferral.installed():
        assert deferral.state.exclude_shared(deferral.weights(), [model(numbers(3, 5, 16))]) == ()


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),  # type: ignore[no-untyped-call]
    ],
    ids=["weight norm", "spectral norm", "pruned"],
)
def test_a_parametrized_weight_is_not_deferred(change: Callable[[nn.Module], nn.Module]) -> None:
    layer = change(nn.Linear(8, 6))
    assert deferred_calls(layer, numbers(4, 5, 8)) == 0
    assert layer.bias.grad is not None


def test_a_weight_norm_gets_the_gradients_of_a_plain_backward() -> None:
    assert_as_plain(parametrizations.weight_norm(nn.Linear(8, 6)), numbers(4, 5, 8).requires_grad_())


class UsedLater(nn.Module):
    """Uses its weight outside of its layer, but not in the first two microbatches; clips its gradient."""

    def __init__(self, *, clips: bool) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0
        if clips:
            self.layer.weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.layer(x).tanh()
        return y + self.layer.weight.pow(2).mean() if self.calls > 2 else y


@pytest.mark.parametrize("schedule", schedules("zb-h1", "dualpipev"), ids=lambda each: each.name)
def test_a_weight_that_is_used_outside_its_layer_later_gets_both_parts(schedule: Schedule) -> None:
    assert not train_both(lambda *_: UsedLater(clips=False), schedule)


def test_hooks_that_would_get_two_parts_of_a_gradient_are_rejected() -> None:
    (plain,) = schedules("gpipe")[:1]
    assert not train_both(lambda *_: UsedLater(clips=True), plain)
    for schedule in schedules("zb-h1", "zbv"):
        with pytest.raises(PipelineError, match=r"layer\.weight has hooks and is used outside of its layer"):
            train_both(lambda *_: UsedLater(clips=True), schedule)
