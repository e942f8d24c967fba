"""Promise: a stage is called with the outputs of all stages that feed it, in their order."""

from __future__ import annotations

from typing import Any

import torch

from penstock.runtime.pytree import flatten
from penstock.runtime.stage.values import Envelope, joined_gradients, joined_inputs, one_source
from penstock.runtime.transport.buffer_pool import Buffer
from penstock.runtime.transport.channels import FlatValue

A, B, C = (torch.full((1,), float(i)) for i in range(3))


def flat(value: object, *needed: int, rows: Any = (), overlapping: tuple[int, ...] = ()) -> FlatValue:
    leaves, structure = flatten(value)
    buffer = Buffer(64, torch.device("cpu"))
    return FlatValue(leaves, Envelope(structure, overlapping, rows), [bool(each) for each in needed], (buffer,))


def test_arguments_follow_one_another_and_repeated_tensors_stay_one() -> None:
    values = [flat((A, A, B), 1, 0), flat({"x": C}, 1), flat([B], 0)]
    joined = joined_inputs(values)
    arguments = joined.structure.arguments(joined.leaves)
    assert [type(each) for each in arguments] == [torch.Tensor] * 3 + [dict, list]
    assert arguments[0] is arguments[1] is A
    assert (arguments[2], arguments[3]["x"], arguments[4][0]) == (B, C, B)


def test_gradients_can_be_told_apart_again_and_all_buffers_are_kept() -> None:
    values = [flat((A, B), 1, 0), flat((B, C), 1, 1)]
    joined = joined_inputs(values)
    assert joined.differentiable == [True, False, True, True]
    assert joined.structure.counts == (1, 2)
    assert joined.buffers == values[0].buffers + values[1].buffers


def test_overlapping_positions_are_those_of_the_joined_leaves() -> None:
    joined = joined_inputs([flat((A, B), overlapping=(0, 1)), flat((A, B), overlapping=(0, 1))])
    assert joined.structure.overlapping == (0, 1, 2, 3)


def test_rows_are_those_of_all_inputs_each_once() -> None:
    one, other = ("args[0]", 8), ("args[1]", 6)
    assert joined_inputs([flat(A, 1), flat(B, 1, rows=(one,))]).structure.rows == (one,)
    values = [flat(A, 1, rows=(one,)), flat(B, 1, rows=(one, other)), flat(C, 1, rows=(other,))]
    assert joined_inputs(values).structure.rows == (one, other)


def test_gradients_of_all_outputs_are_one_list() -> None:
    joined = joined_gradients([FlatValue([A, None], None, [], ()), FlatValue([B], None, [], ())])
    assert joined.leaves == [A, None, B]


def test_a_single_source_is_used_as_it_is() -> None:
    def source(_: int) -> FlatValue:
        return flat(A, 1)

    assert one_source([source], joined_inputs) is source
    assert one_source([], joined_inputs) is None
