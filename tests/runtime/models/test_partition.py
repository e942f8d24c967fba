"""Promise: the stages that a model is split into compute, in sequence, what the model does."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.planning.layout import even_layout
from penstock.runtime.models.partition import split
from tests.support.partitions import Block, linear, model


def run(parts: dict[int, nn.Module], *given: object) -> Any:
    """As a pipeline does: a tuple is passed on as positional arguments, anything else as one argument."""
    value: Any = given
    for part in parts.values():
        value = part(*value) if type(value) is tuple else part(value)
    return value


def module_names(part: nn.Module) -> list[str]:
    """The modules of a part that are no containers."""
    every = part.named_modules(remove_duplicate=False)
    return [name for name, module in every if not isinstance(module, nn.Sequential)]


class Apply(nn.Module):
    """Any function as a module."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


# --- what a split gives ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "stages"),
    [
        (
            ["layers"],
            [["embed"], ["layers.0", "layers.1.0", "layers.1.1", "layers.2", "layers.3", "head"]],
        ),
        (
            ["layers.0", "head"],
            [["embed"], ["layers.0", "layers.1.0", "layers.1.1", "layers.2", "layers.3"], ["head"]],
        ),
        (
            ["layers.1.1", "layers.3"],
            [["embed", "layers.0", "layers.1.0"], ["layers.1.1", "layers.2"], ["layers.3", "head"]],
        ),
        (
            ["layers.1", "layers.1.1", "layers.2"],
            [["embed", "layers.0"], ["layers.1.0"], ["layers.1.1"], ["layers.2", "layers.3", "head"]],
        ),
    ],
    ids=str,
)
def test_each_name_is_the_first_module_of_a_new_stage(at: list[str], stages: list[list[str]]) -> None:
    assert [module_names(part) for part in split(model(), at).values()] == stages


def nestings() -> st.SearchStrategy[nn.Sequential]:
    leaf = st.builds(linear) | st.builds(nn.Tanh)
    sequential = st.recursive(
        leaf, lambda inside: st.lists(inside, min_size=1, max_size=4).map(lambda some: nn.Sequential(*some))
    )
    return st.lists(sequential, min_size=2, max_size=4).map(lambda some: nn.Sequential(*some))


@settings(deadline=None)  # the first run of a torch kernel takes long
@given(nestings(), st.data())
def test_stages_in_sequence_are_the_model(whole: nn.Sequential, data: st.DataObject) -> None:
    later = module_names(whole)[1:]
    at = [name for name in later if data.draw(st.booleans(), label=name)]
    parts = split(whole, at)
    assert len(parts) == len(at) + 1
    x = torch.rand(3, 2)
    assert torch.equal(run(parts, x), whole(x))
    together = {
        name: tensor for part in parts.values() for name, tensor in part.state_dict(keep_vars=True).items()
    }
    state = whole.state_dict(keep_vars=True)
    assert sum(len(part.state_dict()) for part in parts.values()) == len(state)
    assert {name: id(tensor) for name, tensor in together.items()} == {
        name: id(tensor) for name, tensor in state.items()
    }


def test_gradients_arrive_in_the_parameters_of_the_model() -> None:
    whole = model()
    run(split(whole, ["layers.2"]), torch.rand(3, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in whole.parameters())


def test_containers_that_are_not_split_stay_the_same_objects() -> None:
    whole = model()
    first, second = split(whole, ["layers.2"]).values()
    assert first.get_submodule("layers.1") is whole.get_submodule("layers.1")
    assert second.get_submodule("head") is whole.get_submodule("head")


def test_stages_keep_the_training_mode_of_modules() -> None:
    whole = model().eval()
    whole.get_submodule("layers.1.1").train()
    parts = split(whole, ["layers.1.1", "layers.3"])
    training = {name: module.training for part in parts.values() for name, module in part.named_modules()}
    assert {name for name, flag in training.items() if flag} == {"layers.1.1"}


def test_without_a_name_the_model_is_the_one_stage() -> None:
    whole = Block()
    assert split(whole, []) == {0: whole}


def test_stages_can_be_copied_and_pickled() -> None:
    x = torch.rand(3, 2)
    whole = model().eval()
    parts = split(whole, ["layers.1.1", "head"])
    assert torch.equal(run(copy.deepcopy(parts), x), whole(x))
    assert torch.equal(run(pickle.loads(pickle.dumps(parts)), x), whole(x))  # noqa: S301


def test_children_may_have_any_name() -> None:
    whole = nn.Sequential(
        OrderedDict((name, linear()) for name in ("last", "given", "value", "first", "places"))
    )
    assert len(split(whole, ["given", "first"])) == 3


def test_subclasses_of_sequential_with_its_forward_are_split() -> None:
    class Layers(nn.Sequential):
        pass

    assert len(split(nn.Sequential(linear(), Layers(linear(), linear())), ["1.1"])) == 2


def test_a_module_without_state_may_run_in_two_stages() -> None:
    relu = nn.ReLU()
    whole = nn.Sequential(linear(), relu, linear(), relu)
    x = torch.rand(3, 2)
    assert torch.equal(run(split(whole, ["2", "3"]), x), whole(x))


# --- by layout -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "at"),
    [
        ("Et|tt|tL", ["layers.1", "layers.3"]),
        ("E|t*4|L", ["layers", "head"]),
        ("Ett|t|t|L", ["layers.2", "layers.3", "head"]),
        ("Et*4L", []),
    ],
)
def test_a_layout_splits_the_one_container_of_layers(layout: str, at: list[str]) -> None:
    by_layout, by_name = split(model(), layout=layout), split(model(), at)
    assert list(map(module_names, by_layout.values())) == list(map(module_names, by_name.values()))


def test_a_layout_may_be_an_object() -> None:
    parts = split(model(), layout=even_layout(4, 3))
    assert [len(part.state_dict()) for part in parts.values()] == [4, 9, 4]


# --- tied weights ----------------------------------------------------------------------------------


def test_every_stage_records_the_tied_weights() -> None:
    whole = model()
    whole.get_submodule("head").weight = whole.get_submodule("embed").weight
    whole.get_submodule("layers.3").bias = whole.get_submodule("layers.0").bias
    whole.get_submodule("layers.2").bias = whole.get_submodule("layers.0").bias
    for parts in (split(whole, ["layers.2", "layers.3", "head"]), split(whole, layout="Ett|t|t|L")):
        assert [part.tied for part in parts.values()] == [
            (
                {0: "embed.weight", 3: "head.weight"},
                {0: "layers.0.bias", 1: "layers.2.bias", 2: "layers.3.bias"},
            )
        ] * 4
        assert parts[3].get_parameter("head.weight") is parts[0].get_parameter("embed.weight")


def test_a_weight_with_two_names_in_a_stage_has_the_first() -> None:
    shared = linear()
    parts = split(nn.Sequential(shared, linear(), shared, shared), ["1"])
    assert parts[0].tied == ({0: "0.weight", 1: "2.weight"}, {0: "0.bias", 1: "2.bias"})


def test_without_tied_weights_none_are_recorded() -> None:
    assert [part.tied for part in split(model(), ["layers.2"]).values()] == [(), ()]
    assert split(model(), [])[0].tied == ()


def test_a_child_may_be_called_tied() -> None:
    parts = split(nn.Sequential(OrderedDict(tied=linear(), other=linear())), ["other"])
    assert parts[0].tied == ()
    assert list(parts[0].state_dict()) == ["tied.weight", "tied.bias"]


def test_tied_weights_are_recorded_on_the_meta_device() -> None:
    with torch.device("meta"):
        whole = model()
    whole.get_submodule("head").weight = whole.get_submodule("embed").weight
    assert split(whole, ["head"])[0].tied == ({0: "embed.weight", 1: "head.weight"},)


def test_weights_tied_within_one_stage_are_not_recorded() -> None:
    shared = linear()
    first, second = split(nn.Sequential(linear(), shared, shared), ["1"]).values()
    assert first.tied == second.tied == ()
    assert list(second.state_dict()) == ["1.weight", "1.bias", "2.weight", "2.bias"]


# --- tuples between stages -------------------------------------------------------------------------

Named = namedtuple("Named", ["only"])  # noqa: PYI024


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x, x + 1),
        lambda x: (x,),
        lambda x: ((x,),),
        lambda x: ((x, x),),
        lambda _x: (),
        lambda x: [x],
        lambda x: {"x": x},
        Named,
        lambda _x: None,
    ],
    ids=["pair", "1-tuple", "nested 1-tuple", "pair in tuple", "empty", "list", "dict", "named", "none"],
)
def test_the_next_stage_gets_the_value_that_sequential_passes_on(function: Callable[[Any], Any]) -> None:
    seen: list[Any] = []

    def look(value: object) -> object:
        seen.append(value)
        return value

    whole = nn.Sequential(Apply(function), Apply(look), Apply(lambda x: x))
    x = torch.rand(2)
    whole(x)
    run(split(whole, ["1"]), x)
    run(split(whole, ["1", "2"]), x)
    alone, cut, cut_twice = seen
    assert type(alone) is type(cut) is type(cut_twice)
    assert str(alone) == str(cut) == str(cut_twice)


@pytest.mark.parametrize(
    "function", [lambda x: (x,), lambda x: (x, x), lambda x: x], ids=["1-tuple", "pair", "x"]
)
def test_the_last_stage_returns_the_output_of_the_model(function: Callable[[Any], Any]) -> None:
    whole = nn.Sequential(nn.Identity(), Apply(function))
    x = torch.rand(2)
    assert str(run(split(whole, ["1"]), x)) == str(whole(x))


def test_a_pair_travels_as_two_arguments() -> None:
    first, _ = split(nn.Sequential(Apply(lambda x: (x, x)), nn.Identity()), ["1"]).values()
    assert len(first(torch.rand(2))) == 2
