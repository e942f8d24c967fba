"""Promise: gradients are divided by the scale, and an overflow of any rank skips the step of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from penstock.errors import PipelineError
from penstock.runtime.grad_scaler import GradScaler


class OtherRanks:
    """A pipeline whose other ranks found this overflow."""

    def __init__(self, overflow: float) -> None:
        self.device, self.scaler, self.checked = torch.device("cpu"), None, 0
        self._overflow = overflow

    scaler: Any

    def all_reduce_max(self, compute: Callable[[], Tensor]) -> Tensor:
        return compute().clamp(min=self._overflow)

    def check_gradients_complete(self) -> None:
        self.checked += 1


@pytest.mark.parametrize(("own", "other"), [(2.0, 0.0), (2.0, 1.0), (torch.inf, 0.0)])
def test_a_step_is_made_only_if_no_rank_has_an_overflow(own: float, other: float) -> None:
    pipeline: Any = OtherRanks(other)
    weight = nn.Parameter(torch.zeros(1))
    scaler, optimizer = GradScaler(pipeline, init_scale=4.0), SGD([weight], lr=1.0)
    assert pipeline.scaler is scaler
    weight.grad = torch.tensor([4 * own])
    scaler.step(optimizer)
    scaler.update()
    fine = own == 2 and other == 0
    assert weight.item() == (-2 if fine else 0)
    assert scaler.get_scale() == (4 if fine else 2)
    assert pipeline.checked == 1


def test_float16_gradients_are_refused() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    pipeline: Any = OtherRanks(0)
    with pytest.raises(ValueError, match="float16 gradients cannot be unscaled"):
        GradScaler(pipeline).unscale_(SGD([weight], lr=1.0))


def test_a_scaler_does_not_keep_its_pipeline() -> None:
    made: Any = OtherRanks
    scaler, weight = GradScaler(made(0)), nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(PipelineError, match="the pipeline of this GradScaler does not exist any more"):
        scaler.unscale_(SGD([weight], lr=1.0))
