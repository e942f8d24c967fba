"""Promise: a model that cannot be split as requested is rejected, with every reason and a remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.runtime.models.partition import split
from tests.support.partitions import Block, linear, model


def error_of(model: nn.Module, at: list[str]) -> str:
    with pytest.raises(PartitionError) as caught:
        split(model, at)
    return str(caught.value)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self[0](x) + x
        return out


# --- by name ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [Block(), Residual(linear(), linear())], ids=lambda m: type(m).__name__)
def test_models_that_override_forward_are_rejected_with_a_remedy(whole: nn.Module) -> None:
    message = error_of(whole, ["1"])
    assert type(whole).__name__ in message
    assert "pass them to Pipeline" in message
    assert "put the children into an nn.Sequential" in message


def test_a_forward_set_on_the_instance_is_rejected() -> None:
    whole = model()
    whole.forward = lambda x: x  # type: ignore[method-assign]
    assert "overrides forward()" in error_of(whole, ["layers"])


def test_unknown_names_are_reported_with_similar_names() -> None:
    assert "no module 'layer.2' in the model: did you mean 'layers.2'" in error_of(model(), ["layer.2"])
    message = error_of(model(), ["zzz"])
    assert "stages can begin at 'layers', 'layers.0', 'layers.1', 'layers.1.0', 'layers.1.1'" in message
    assert "no module ''" in error_of(model(), [""])
    assert "no module 3" in error_of(model(), [3])  # type: ignore[list-item]


def test_names_out_of_order_are_reported_with_the_right_order() -> None:
    message = error_of(model(), ["layers.2", "head", "layers.1.1"])
    assert "in the order of the model: 'layers.1.1', 'layers.2', 'head'" in message


def test_duplicates_are_rejected_also_under_two_names() -> None:
    assert "'head' is a duplicate" in error_of(model(), ["head", "head"])
    assert "'layers.0' begins where 'layers' begins" in error_of(model(), ["layers", "layers.0"])


@pytest.mark.parametrize("name", ["0", "0.0", "0.0.0"])
def test_no_stage_can_begin_at_the_first_module(name: str) -> None:
    whole = nn.Sequential(nn.Sequential(nn.Sequential(linear()), linear()), linear())
    assert f"{name!r} is the very first module" in error_of(whole, [name])


def test_only_a_sequential_can_be_split_inside() -> None:
    whole = nn.Sequential(linear(), Block(), Residual(linear(), linear()))
    message = error_of(whole, ["1.first", "1.rest.1", "2.1"])
    assert "'1.first' is inside '1', a Block" in message
    assert "'1.rest.1' is inside '1', a Block" in message
    assert "'2.1' is inside '2', a Residual" in message


def test_a_string_instead_of_a_list_of_names_is_rejected() -> None:
    with pytest.raises(PartitionError, match=r"write \['layers'\]"):
        split(model(), "layers")


def test_all_problems_are_reported_at_once() -> None:
    whole = model()
    whole.register_forward_hook(lambda *_: None)
    message = error_of(whole, ["head", "nowhere", "embed", "head", "layers.0", "embed.x"])
    for problem in (
        "'nowhere'",
        "'embed.x'",
        "very first",
        "is a duplicate",
        "order of the model",
        "has hooks",
    ):
        assert problem in message


def test_a_module_with_buffers_in_two_stages_is_rejected() -> None:
    norm = nn.BatchNorm1d(2, affine=False)
    message = error_of(nn.Sequential(norm, linear(), norm), ["1"])
    assert "'0.running_mean' in stage 0 and '2.running_mean' in stage 1" in message


def test_only_the_first_of_many_shared_buffers_are_listed() -> None:
    block = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(10)))
    assert "and 22 more" in error_of(nn.Sequential(block, block), ["1"])


@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: module.register_forward_pre_hook(lambda *_: None),
        lambda module: module.register_full_backward_hook(lambda *_: None),
        lambda module: module.register_full_backward_pre_hook(lambda *_: None),
        lambda module: module.register_state_dict_post_hook(lambda *_: None),
        lambda module: module.register_state_dict_pre_hook(lambda *_: None),
        lambda module: module.register_load_state_dict_pre_hook(lambda *_: None),
        lambda module: module.register_load_state_dict_post_hook(lambda *_: None),
    ],
    ids=range(8),
)
def test_containers_with_hooks_are_not_split(register: Callable[[nn.Module], object]) -> None:
    whole = model()
    register(whole.get_submodule("layers"))
    assert "the container 'layers' is split and has hooks" in error_of(whole, ["layers.2"])
    assert len(split(whole, ["layers", "head"])) == 3


def test_a_model_with_hooks_is_not_split() -> None:
    whole = model()
    whole.register_forward_pre_hook(lambda *_: None)
    assert "the model itself is split and has hooks" in error_of(whole, ["head"])


def test_containers_with_their_own_state_are_not_split() -> None:
    class Counting(nn.Sequential):
        def get_extra_state(self) -> Tensor:
            return torch.zeros(())

    whole = model()
    whole.get_submodule("layers").register_buffer("steps", torch.zeros(()))
    assert "the container 'layers' is split and has parameters, buffers" in error_of(whole, ["layers.2"])
    assert "the model itself is split and has parameters" in error_of(Counting(linear(), linear()), ["1"])
    assert len(split(whole, ["layers"])) == 2


# --- by layout -------------------------------------------------------------------------------------


def test_a_layout_must_have_the_layers_of_the_model() -> None:
    with pytest.raises(
        PartitionError, match=r"the layout has 3 layers .* the model has 4: layer 3 would be left"
    ):
        split(model(), layout="Et|ttL")


@pytest.mark.parametrize(
    ("whole", "layout", "why"),
    [
        (nn.Sequential(linear(), linear()), "EtL", "here there is none"),
        (nn.Sequential(nn.Sequential(linear()), nn.Sequential(linear())), "Et|L", "there is 2: '0', '1'"),
        (nn.Sequential(nn.Sequential(linear(), linear())), "E|tt|L", "nothing comes before the layers, '0'"),
        (nn.Sequential(nn.Sequential(linear(), linear())), "E|tt|L", "nothing comes after the layers, '0'"),
        (Block(), "EtL", "Block is not an nn.Sequential"),
    ],
    ids=["flat", "two containers", "no embedding", "no head", "another class"],
)
def test_a_model_that_does_not_fit_a_layout_is_rejected(whole: nn.Module, layout: str, why: str) -> None:
    with pytest.raises(PartitionError) as caught:
        split(whole, layout=layout)
    assert why in str(caught.value)


def test_exactly_one_of_names_and_layout_is_required() -> None:
    with pytest.raises(PartitionError, match="both are given"):
        split(model(), ["head"], layout="Et*4|L")
    with pytest.raises(PartitionError, match="neither of them is given"):
        split(model())
