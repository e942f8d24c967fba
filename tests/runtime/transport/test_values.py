"""Promise: any value comes out of its layout as it went in."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.runtime.transport.values import PRELUDE, Layout, describe, flatten, refuse_unsendable, unflatten


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Hidden:
    states: Any
    length: int
    doubled: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.length)


def crossed(value: object) -> Any:
    """As another rank gets it: through bytes."""
    leaves, structure = flatten(value)
    layout = Layout(describe(leaves, structure))
    row = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.write(layout.views(row), leaves)
    told = Layout.loads(layout.dumps())
    assert told.nbytes == layout.nbytes
    return unflatten(told.structure, told.read(told.views(row)))


@pytest.mark.parametrize(
    "value",
    [None, 3, True, 2.5, "text", (), [], {}, (1, [2, {"a": None}]), Pair(1, "b"), Hidden(None, 4), b"bytes"],
    ids=repr,
)
def test_plain_values_cross_as_they_are(value: object) -> None:
    assert crossed(value) == value
    assert type(crossed(value)) is type(value)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 5)])
def test_tensors_of_every_type_and_shape_cross(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    assert torch.equal(crossed(tensor), tensor)
    assert crossed(tensor).dtype == dtype


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).T,
        torch.randn(6)[::2],
        torch.ones(1).expand(5),
        torch.randn(4, dtype=torch.cfloat).conj(),
    ],
    ids=["transposed", "strided", "expanded", "conjugated"],
)
def test_tensors_of_any_strides_cross(tensor: Tensor) -> None:
    assert torch.equal(crossed(tensor), tensor)


def test_a_tree_keeps_its_classes_its_keys_and_their_order() -> None:
    value = {"b": Pair(torch.ones(2), [1, (None,)]), "a": Hidden(torch.zeros(1), 2)}
    there = crossed(value)
    assert list(there) == ["b", "a"]
    assert type(there["b"]) is Pair
    assert torch.equal(there["b"].left, torch.ones(2))
    assert there["b"].right == [1, (None,)]
    assert there["a"].doubled == 4


@pytest.mark.parametrize("value", [OrderedDict(a=1), defaultdict(list, a=[1]), torch.Size([2]), -0.0], ids=repr)
def test_classes_of_their_own_cross_as_they_are(value: object) -> None:
    assert repr(crossed(value)) == repr(value)


def test_strides_cross() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert crossed(image).stride() == image.stride()
    assert torch.equal(crossed(image), image)


def test_which_tensors_want_gradients_is_part_of_the_layout() -> None:
    wanting = torch.ones(2, requires_grad=True)
    leaves, structure = flatten((wanting, torch.ones(2), 3))
    layout = Layout(describe(leaves, structure))
    assert layout.differentiable == [True, False, False]
    assert not layout.fits([torch.ones(2), torch.ones(2), 3], structure)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2).double()),
        ((1, 2), [1, 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ("a", "b"),
        (None, ()),
    ],
)
def test_values_that_differ_do_not_share_a_layout(one: object, other: object) -> None:
    assert not Layout(describe(*flatten(one))).fits(*flatten(other))
    assert Layout(describe(*flatten(one))).fits(*flatten(one))


class Mutable:
    def __init__(self, state: object) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("cannot be compared")

    __hash__ = None  # type: ignore[assignment]


def test_an_object_that_was_changed_has_another_layout() -> None:
    value = Mutable(1)
    layout = Layout(describe(*flatten(value)))
    assert layout.fits(*flatten(value))
    value.state = 2
    assert not layout.fits(*flatten(value))


def test_an_object_that_hides_a_tensor_with_a_gradient_is_refused() -> None:
    with pytest.raises(PipelineError, match="requires a gradient is inside of an object"):
        describe(*flatten(Mutable(torch.ones(2, requires_grad=True))))


def test_tensors_start_behind_the_prelude_and_on_even_places() -> None:
    leaves, structure = flatten((torch.ones(3, dtype=torch.int8), torch.ones(1)))
    layout = Layout(describe(leaves, structure))
    assert layout.nbytes == PRELUDE + 64 + 64


def test_a_value_that_cannot_be_pickled_is_refused_with_what_can_cross() -> None:
    with pytest.raises(PipelineError, match=r"cannot be pickled.*hand on tensors, numbers"):
        describe(*flatten(lambda: None))


def test_a_sparse_tensor_is_refused_with_a_way_out() -> None:
    with pytest.raises(PipelineError, match=r"stage 1: .*sparse.*to_dense"):
        refuse_unsendable([torch.eye(2).to_sparse()], "stage 1")
