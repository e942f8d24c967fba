"""Promise: any value is received as it was sent."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.runtime.pytree import flatten, unflatten
from penstock.runtime.transport.message_spec import HEADER_BYTES, MessageSpec, check_sendable, spec_key


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


def received(value: object) -> Any:
    """The value as another rank receives it, through bytes."""
    leaves, structure = flatten(value)
    spec = MessageSpec(spec_key(leaves, structure))
    storage = torch.empty(spec.nbytes, dtype=torch.uint8)
    spec.write(spec.views(storage), leaves)
    loaded = MessageSpec.loads(spec.dumps())
    assert loaded.nbytes == spec.nbytes
    return unflatten(loaded.structure, loaded.read(loaded.views(storage)))


@pytest.mark.parametrize(
    "value",
    [None, 3, True, 2.5, "text", (), [], {}, (1, [2, {"a": None}]), Pair(1, "b"), Hidden(None, 4), b"bytes"],
    ids=repr,
)
def test_plain_values_are_received_unchanged(value: object) -> None:
    assert received(value) == value
    assert type(received(value)) is type(value)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 5)])
def test_tensors_of_every_dtype_and_shape_are_received_unchanged(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    assert torch.equal(received(tensor), tensor)
    assert received(tensor).dtype == dtype


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
def test_tensors_of_any_strides_are_received_unchanged(tensor: Tensor) -> None:
    assert torch.equal(received(tensor), tensor)


def test_a_pytree_keeps_its_classes_and_the_order_of_its_keys() -> None:
    value = {"b": Pair(torch.ones(2), [1, (None,)]), "a": Hidden(torch.zeros(1), 2)}
    there = received(value)
    assert list(there) == ["b", "a"]
    assert type(there["b"]) is Pair
    assert torch.equal(there["b"].left, torch.ones(2))
    assert there["b"].right == [1, (None,)]
    assert there["a"].doubled == 4


@pytest.mark.parametrize("value", [OrderedDict(a=1), defaultdict(list, a=[1]), torch.Size([2]), -0.0], ids=repr)
def test_subclasses_of_containers_and_numbers_are_received_unchanged(value: object) -> None:
    assert repr(received(value)) == repr(value)


def test_dense_strides_are_kept() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert received(image).stride() == image.stride()
    assert torch.equal(received(image), image)


def test_which_tensors_require_gradients_is_part_of_the_spec() -> None:
    trained = torch.ones(2, requires_grad=True)
    leaves, structure = flatten((trained, torch.ones(2), 3))
    spec = MessageSpec(spec_key(leaves, structure))
    assert spec.differentiable == [True, False, False]
    assert not spec.matches([torch.ones(2), torch.ones(2), 3], structure)


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
def test_values_that_differ_do_not_share_a_spec(one: object, other: object) -> None:
    assert not MessageSpec(spec_key(*flatten(one))).matches(*flatten(other))
    assert MessageSpec(spec_key(*flatten(one))).matches(*flatten(one))


class Mutable:
    def __init__(self, state: object) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("cannot be compared")

    __hash__ = None  # type: ignore[assignment]


def test_a_changed_object_has_another_spec() -> None:
    value = Mutable(1)
    spec = MessageSpec(spec_key(*flatten(value)))
    assert spec.matches(*flatten(value))
    value.state = 2
    assert not spec.matches(*flatten(value))


def test_an_object_that_contains_a_tensor_with_a_gradient_is_rejected() -> None:
    with pytest.raises(PipelineError, match="requires a gradient is inside of an object"):
        spec_key(*flatten(Mutable(torch.ones(2, requires_grad=True))))


def test_tensors_start_after_the_header_and_are_aligned() -> None:
    leaves, structure = flatten((torch.ones(3, dtype=torch.int8), torch.ones(1)))
    spec = MessageSpec(spec_key(leaves, structure))
    assert spec.nbytes == HEADER_BYTES + 64 + 64


def test_a_value_that_cannot_be_pickled_is_rejected_with_what_can_be_sent() -> None:
    with pytest.raises(PipelineError, match=r"cannot be pickled.*return tensors, numbers"):
        spec_key(*flatten(lambda: None))


class Labelled(Tensor):
    """A tensor of a class of its own."""


def test_a_tensor_of_a_user_defined_class_is_rejected() -> None:
    check_sendable([torch.ones(2), torch.nn.Parameter(torch.ones(2))], "stage 0")
    with pytest.raises(PipelineError, match=r"stage 0: a Labelled would arrive as a plain tensor"):
        check_sendable([torch.ones(2).as_subclass(Labelled)], "stage 0")


def test_a_sparse_tensor_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(PipelineError, match=r"stage 1: .*sparse.*to_dense"):
        check_sendable([torch.eye(2).to_sparse()], "stage 1")
