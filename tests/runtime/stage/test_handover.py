"""Promise: what a stage changes after it returned it does not change for the next stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import Schedule
from penstock.errors import PipelineError
from penstock.runtime import Pipeline
from penstock.runtime.stage.values import hand_over, overlapping_positions
from tests.support.grids import small
from tests.support.single_rank import WIDTH, batch, schedules, train_both

SCHEDULES = schedules("interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "v-half", "dualpipev")


Pack = Callable[[Any, Tensor], Any]
Unpack = Callable[..., Tensor]


# --- what is copied ------------------------------------------------------------------------------


def test_a_tensor_that_nobody_else_holds_is_handed_on_without_a_copy() -> None:
    output = torch.ones(3) * 2
    address, leaves = output.data_ptr(), [output.requires_grad_()]
    del output
    (handed,) = hand_over(leaves)
    assert (handed.data_ptr(), handed.requires_grad, leaves) == (address, True, [])


@pytest.mark.parametrize(
    "held",
    [lambda kept: kept, lambda kept: kept[1:], lambda kept: kept.detach(), lambda kept: kept.exp().tanh()],
    ids=["itself", "a view", "detached", "saved by autograd"],
)
def test_a_tensor_that_is_held_elsewhere_is_copied(held: Callable[[Tensor], Tensor]) -> None:
    kept = torch.ones(3, requires_grad=True) * 2
    output = held(kept)
    address, expected, leaves = output.data_ptr(), output.tolist(), [output]
    graph = output.grad_fn
    del output
    (handed,) = hand_over(leaves)
    assert handed.data_ptr() != address
    assert (handed.tolist(), handed.grad_fn, handed.requires_grad) == (expected, None, graph is not None)


def test_the_memory_of_an_array_is_copied() -> None:
    kept = np.ones(3)
    (handed,) = hand_over([torch.from_numpy(kept)])
    kept += 1
    assert handed.tolist() == [1, 1, 1]


def test_an_object_is_copied_if_it_can_be() -> None:
    kept, function = {1, 2}, lambda: 0
    handed = hand_over([kept, function])
    kept.add(3)
    assert handed == [{1, 2}, function]


def test_tensors_that_overlap_are_found() -> None:
    x, y = torch.zeros(4, 4), torch.zeros(4)
    assert overlapping_positions([x]) == ()
    assert overlapping_positions([x, y, x[:0], None, torch.zeros(2).to_sparse()]) == ()
    assert overlapping_positions([y, x, x[1], "text"]) == (1, 2)
    assert overlapping_positions([x[:2], x[2:]]) == ()


# --- against one process -------------------------------------------------------------------------


class Stage(nn.Module):
    """A layer that hands on what `pack` makes of it, for `unpack` of the next stage."""

    position: Tensor

    def __init__(self, index: int, count: int, pack: Pack, unpack: Unpack) -> None:
        super().__init__()
        self.index, self.last = index, index == count - 1
        self.pack, self.unpack = pack, unpack
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("position", torch.zeros(1))
        self.kept: Any = None

    def forward(self, *given: Any) -> Any:
        x = given[0] if self.index == 0 else self.unpack(*given)
        hidden = torch.tanh(self.layer(x))
        return hidden if self.last else self.pack(self, hidden)


def counted(stage: Any, h: Tensor) -> Any:
    return h, stage.position.add_(1)


def counted_in_data(stage: Any, h: Tensor) -> Any:
    stage.position.data.add_(1)
    return {"h": h, "more": (stage.position[:1],)}


def written(stage: Any, h: Tensor) -> Any:
    stage.kept = torch.empty(2, WIDTH) if stage.kept is None else stage.kept
    torch.mul(h.detach(), 2, out=stage.kept)
    return h, stage.kept


def noted(stage: Any, h: Tensor) -> Any:
    stage.kept = bytearray() if stage.kept is None else stage.kept
    stage.kept.append(1)
    return h, stage.kept


def replaced(stage: Any, h: Tensor) -> Any:
    stage.position = stage.position + h.detach().mean()
    return h, stage.position


def twice(_stage: Any, h: Tensor) -> Any:
    h = h * 2
    return h, h


def views(_stage: Any, h: Tensor) -> Any:
    h = h * 2
    return h, h[:, :2]


def open_product(h: Tensor, factor: Tensor) -> Tensor:
    return h * factor


def open_nested(given: dict[str, Any]) -> Tensor:
    result: Tensor = given["h"] * given["more"][0]
    return result


def open_noted(h: Tensor, notes: bytearray) -> Tensor:
    return h * len(notes)


def open_in_place(h: Tensor, same: Tensor) -> Tensor:
    h.add_(1).mul_(2)
    return h + same.sum(1, keepdim=True)


VALUES: dict[str, tuple[Pack, Unpack]] = {
    "a buffer": (counted, open_product),
    "a view of a buffer, changed in data": (counted_in_data, open_nested),
    "an out= tensor": (written, open_product),
    "a buffer that is replaced": (replaced, open_product),
    "an object": (noted, open_noted),
    "one tensor twice, changed in place": (twice, open_in_place),
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("value", VALUES)
@small(lambda value, schedule: value == "a buffer" or schedule.name in {"looped-bfs", "zbv"})
def test_stages_of_one_rank_train_as_one_process(value: str, schedule: Schedule) -> None:
    assert not train_both(lambda index, count: Stage(index, count, *VALUES[value]), schedule)


def test_outputs_are_those_of_their_microbatches() -> None:
    stage = Stage(0, 2, counted, open_product)

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return mse_loss(output[0], target)

    x, y = batch()
    with closing(Pipeline([stage], "1f1b", microbatches=4, loss=loss)) as pipeline:
        trained = pipeline.step(x, target=y, return_outputs=True).outputs
        evaluated = pipeline.eval(x, return_outputs=True).outputs
    assert (trained[1].tolist(), evaluated[1].tolist()) == ([1, 2, 3, 4], [5, 6, 7, 8])
    assert not trained[0].requires_grad


def test_overlapping_inputs_that_a_stage_changes_in_place_are_rejected() -> None:
    schedule = schedules("looped-bfs")[0]
    stages = [Stage(index, 2, views, open_in_place) for index in range(2)]
    with (
        closing(Pipeline(stages, schedule, loss=mse_loss)) as pipeline,
        pytest.raises(PipelineError, match="stage 1 changes an input in place, and stage 0 returned it"),
    ):
        pipeline.step(*batch()[:1], target=batch()[1])


def test_a_tensor_with_a_gradient_inside_of_an_object_is_rejected() -> None:
    def hidden(_stage: Any, h: Tensor) -> Any:
        return h, {h * 2}

    stages = [Stage(index, 2, hidden, lambda h, _: h) for index in range(2)]
    with (
        closing(Pipeline(stages, schedules("looped-bfs")[0], loss=mse_loss)) as pipeline,
        pytest.raises(PipelineError, match="inside of an object that cannot be flattened"),
    ):
        pipeline.step(*batch()[:1], target=batch()[1])
