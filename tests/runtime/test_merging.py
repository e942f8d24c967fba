"""Promise: the outputs of microbatches are merged, or an error says where they differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import BatchError
from penstock.runtime.batch import Batcher
from tests.support.batches import rows


def test_tensors_without_dimensions_are_stacked() -> None:
    assert Batcher(3).merge_outputs([torch.tensor(float(k)) for k in range(3)]).tolist() == [0, 1, 2]


def test_equal_values_are_merged_to_one_and_others_to_their_list() -> None:
    merged = Batcher(2).merge_outputs([(float("1.5"), 1, None, True), (float("1.5"), 2, 0, True)])
    assert merged == (1.5, [1, 2], [None, 0], True)
    array = np.arange(3)
    left, right = Batcher(2).merge_outputs([array, array.copy()])
    assert (left is array, right.tolist()) == (True, [0, 1, 2])


def test_equal_values_of_other_types_are_told_apart() -> None:
    left, right = Batcher(2).merge_outputs([1, True])
    assert (type(left), type(right)) == (int, bool)
    with pytest.raises(BatchError, match=r"a dict with \[1\] in microbatch 0 and a dict with \[True\]"):
        Batcher(2).merge_outputs([{1: "a"}, {True: "a"}])


def test_keys_may_come_in_another_order() -> None:
    merged = Batcher(2).merge_outputs([{"a": rows(1), "b": 1}, {"b": 1, "a": rows(1)}])
    assert merged["a"].tolist() == [0, 0]
    assert merged["b"] == 1


def test_gradients_flow_through_merged_outputs() -> None:
    parts = [rows(2).requires_grad_() for _ in range(2)]
    Batcher(2).merge_outputs(parts).sum().backward()
    assert all(part.grad is not None for part in parts)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            [rows(2), None],
            "the output is a tensor of shape .2,. in microbatch 0 and a NoneType in microbatch 1",
        ),
        ([rows(2), rows(2, 1)], r"shape \(2,\) in microbatch 0 and a tensor of shape \(2, 1\) in microbatch 1"),
        ([(1, 2), (1,)], r"a tuple with \[0\], \[1\] in microbatch 0 and a tuple with \[0\] in"),
        ([(1,), [1]], r"a tuple with \[0\] in microbatch 0 and a list with \[0\] in microbatch 1"),
        ([{"a": 1}, {"b": 1}], r"a dict with \['a'\] in microbatch 0 and a dict with \['b'\] in microbatch 1"),
        ([{"a": (1, rows(2))}, {"a": (1, 2)}], r"the output\['a'\]\[1\] is a tensor"),
        ([rows(2, 3), rows(2, 4)], r"shape \(2, 3\) in microbatch 0 and \(2, 4\) in microbatch 1"),
        ([1], "2 microbatches gave 1"),
    ],
    ids=str,
)
def test_outputs_that_differ_are_rejected_with_the_microbatch(outputs: list[Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Batcher(2).merge_outputs(outputs)


def test_a_dimension_that_outputs_do_not_have_is_rejected_with_the_shape() -> None:
    with pytest.raises(BatchError, match=r"merged along dimension 1: its shape is \(2,\)"):
        Batcher(2, merge=1).merge_outputs([rows(2), rows(2)])
