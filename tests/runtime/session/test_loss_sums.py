"""Tests of `average=False`: a pipeline sums the losses of microbatches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from penstock.errors import PipelineError
from penstock.runtime import Pipeline


def test_the_loss_is_the_sum_and_so_are_the_gradients() -> None:
    torch.manual_seed(0)
    module, x, y = nn.Linear(3, 3), torch.randn(7, 3), torch.randn(7, 3)
    other = copy.deepcopy(module)
    result = Pipeline([module], "1f1b", microbatches=3, loss=mse_loss, average=False).step(x, target=y)
    total = torch.stack([mse_loss(other(a), b) for a, b in zip(x.tensor_split(3), y.tensor_split(3))]).sum()
    torch.autograd.backward(total)
    assert result.loss == pytest.approx(float(total.detach()))
    torch.testing.assert_close(module.weight.grad, other.weight.grad)


def test_a_sum_weighted_by_tokens_is_rejected() -> None:
    with pytest.raises(PipelineError, match="give one"):
        Pipeline([nn.Linear(3, 3)], "1f1b", microbatches=3, loss=mse_loss, tokens=len, average=False)
