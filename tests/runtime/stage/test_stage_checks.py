"""Promise: values that would train something else are refused with the stage and the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import BatchError, PipelineError
from penstock.runtime.batch import Batcher
from penstock.runtime.stage.microbatch import check_finite, check_gradient_shapes, check_rows, checked_loss


def test_what_is_not_finite_is_counted_and_named() -> None:
    check_finite([None, torch.ones(2), torch.tensor([2**62])], "its output", 3)
    with pytest.raises(PipelineError) as caught:
        check_finite([torch.ones(1), torch.tensor([1, torch.nan, torch.inf])], "its output", 3)
    assert str(caught.value) == "stage 3: 2 of 3 elements of its output (tensor 1, shape [3]) are not finite"


@pytest.mark.parametrize(
    ("value", "found"), [(torch.ones(2), r"shape \[2\]"), (1.5, "float"), (None, "NoneType")]
)
def test_a_loss_is_one_number(value: Any, found: str) -> None:
    with pytest.raises(PipelineError, match=f"a tensor with one element; it returned {found}"):
        checked_loss(lambda _: value, torch.ones(1), None, 0)


def test_a_loss_without_its_target_is_explained() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).sum()

    with pytest.raises(PipelineError, match="give target= on the rank of the last stage"):
        checked_loss(loss, torch.ones(1), None, 0)
    assert checked_loss(loss, torch.ones(1), [torch.zeros(1)], 0) == 1


def test_gradients_have_the_shapes_of_the_outputs_or_are_missing() -> None:
    shapes = [torch.Size([2]), torch.Size([3])]
    check_gradient_shapes([torch.ones(2), None], shapes, 0)
    with pytest.raises(PipelineError, match=r"stage 0 received gradients of shapes \[2\], \[4\]"):
        check_gradient_shapes([torch.ones(2), torch.ones(4)], shapes, 0)


def test_rows_are_compared_where_both_are_known() -> None:
    check_rows((("args[0]", 8),), {"target": 8})
    check_rows((), {"target": 8})
    check_rows((("args[0]", 8),), {})
    with pytest.raises(BatchError, match=r"8 in args\[0\], 4 in target"):
        check_rows((("args[0]", 8),), {"target": 4})
    with pytest.raises(BatchError, match=r"8 in args\[0\], 4 in args\[1\]"):
        check_rows((("args[0]", 8), ("args[1]", 4)), {})


def test_rows_of_lists_and_replicated_values_are_unknown() -> None:
    batcher, x = Batcher(2), torch.ones(4, 3)
    rows: dict[str, int] = {}
    batcher.split_arguments((x, [x, x], torch.tensor(1)), {"mask": (x, None)}, rows)
    assert rows == {"args[0]": 4, 'kwargs["mask"][0]': 4}
    assert [len(part) for part in batcher.split_target(x, rows)] == [2, 2]
    assert rows["target"] == 4
    assert len(batcher.split_target([x, x], {"args[0]": 2})) == 2
    with pytest.raises(BatchError, match=r"6 in args\[0\], 4 in target"):
        batcher.split_target(x, {"args[0]": 6})
