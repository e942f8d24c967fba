"""Promise: every stage that uses an output has its own, and what nobody needs any more is not kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from penstock.runtime.stage.values import Envelope, SharedValues
from penstock.runtime.transport.buffer_pool import Buffer
from penstock.runtime.transport.channels import FlatValue

ENVELOPE = Envelope(None, (), ())


def flat(value: Any) -> FlatValue:
    return FlatValue([value], ENVELOPE, [True], ())


def shared(value: Any) -> SharedValues:
    outputs = SharedValues((1, 2, 3))
    outputs.put(0, flat(value))
    return outputs


def test_stages_of_the_rank_get_copies_and_the_last_one_the_tensor_itself() -> None:
    value = torch.ones(2, requires_grad=True)
    outputs = shared(value)
    taken = [outputs.take(stage, 0).leaves[0] for stage in (2, 1, 3)]
    assert [each is value for each in taken] == [False, False, True]
    assert all(each.requires_grad and each.is_leaf for each in taken)
    with torch.no_grad():
        taken[0].zero_()
    assert taken[1].tolist() == taken[2].tolist() == [1, 1]


def test_a_tensor_is_copied_as_long_as_it_is_not_sent() -> None:
    value = torch.ones(2)
    outputs = shared(value)
    assert outputs.send(0, 1).leaves[0] is value
    assert outputs.take(2, 0).leaves[0] is not value
    assert outputs.send(0, 3).leaves[0] is value


def test_after_the_messages_a_stage_takes_the_tensor_itself() -> None:
    value = torch.ones(2)
    outputs = shared(value)
    outputs.send(0, 1)
    outputs.send(0, 2)
    assert outputs.take(3, 0).leaves[0] is value


def test_objects_are_copied_too() -> None:
    value = {1, 2}
    outputs = shared(value)
    outputs.take(1, 0).leaves[0].clear()
    assert value == {1, 2}


def test_nothing_is_kept_after_the_last_use_or_when_a_step_begins() -> None:
    outputs = shared(torch.ones(2))
    for stage in (1, 2, 3):
        outputs.take(stage, 0)
    outputs.put(0, flat(torch.zeros(1)))
    outputs.clear()
    outputs.put(0, flat(torch.ones(1)))
    assert outputs.take(1, 0).leaves[0].tolist() == [1]


def test_stages_share_what_one_message_brought_and_its_buffer_goes_with_the_value_itself() -> None:
    value, buffer = torch.ones(2), Buffer(64, torch.device("cpu"))
    received = FlatValue([value], ENVELOPE, [True], (buffer,))
    calls = Counter[int]()

    def source(microbatch: int) -> FlatValue:
        calls[microbatch] += 1
        return received

    inputs = SharedValues((4, 2), source)
    first, last = inputs.take(2, 0), inputs.take(4, 0)
    assert (first.leaves[0].tolist(), first.leaves[0] is value, first.buffers) == ([1, 1], False, ())
    assert (first.structure, first.differentiable) == (ENVELOPE, [True])
    assert last is received
    inputs.take(4, 0)
    assert calls == {0: 2}
