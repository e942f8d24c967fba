"""Promise: the weight gradients of GPT-2's linear layer are those of a plain backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.runtime.models.decoders import register_conv1d
from tests.support.deferring import (
    assert_as_plain,
    deferred_calls,
    gradients,
    numbers,
    plainly,
    split_with_fusion,
)


@pytest.fixture
def layer() -> Any:
    utilities = pytest.importorskip("transformers.pytorch_utils")
    register_conv1d()
    return utilities.Conv1D(6, 4)


def test_a_split_backward_changes_no_bit(layer: Any) -> None:
    assert deferred_calls(layer, numbers(3, 5, 4)) == 1
    layer.zero_grad()
    assert_as_plain(layer, *(numbers(3, 5, 4, seed=seed).requires_grad_() for seed in range(3)))


def test_fusion_gives_the_same_gradients_up_to_rounding(layer: Any) -> None:
    inputs = [numbers(3, 5, 4, seed=seed).requires_grad_() for seed in range(3)]
    wanted = gradients(layer, inputs, plainly)
    torch.testing.assert_close(gradients(layer, inputs, split_with_fusion), wanted)
