"""Promise of the split backward: each layer's gradients are those of a plain one bit by bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.deferring import (
    Block,
    Chain,
    UsedTwice,
    assert_as_plain,
    autocasting,
    deferred_calls,
    gradients,
    numbers,
    plainly,
    split,
    whole,
    without_onednn,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@DTYPES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape", [(33, 24), (5, 7, 24), (2, 3, 5, 24), (1, 24), (1, 1, 24), (24,), (0, 24)], ids=str
)
def test_a_linear_layer_gets_the_gradients_of_a_plain_backward(
    shape: tuple[int, ...], dtype: torch.dtype, *, bias: bool
) -> None:
    assert_as_plain(nn.Linear(24, 40, bias=bias, dtype=dtype), numbers(*shape, dtype=dtype).requires_grad_())


@DTYPES
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_takes_inputs_of_any_layout(dtype: torch.dtype, *, bias: bool) -> None:
    layer = nn.Linear(24, 40, bias=bias, dtype=dtype)
    for x in (
        numbers(24, 33, dtype=dtype).t(),
        numbers(5, 24, 7, dtype=dtype).transpose(1, 2),
        numbers(7, 5, 24, dtype=dtype).transpose(0, 1),
        numbers(5, 7, 48, dtype=dtype)[..., ::2],
        numbers(5, 1, 24, dtype=dtype).expand(5, 7, 24),
    ):
        inner = Chain(nn.Identity(), layer, last=lambda y: y * 2)
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        assert_as_plain(inner, leaf)
        assert_as_plain(
            nn.Sequential(View(x.shape, x.stride()), layer), numbers(5 * 7 * 48, dtype=dtype).requires_grad_()
        )


class View(nn.Module):
    def __init__(self, shape: torch.Size, stride: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.stride = shape, stride

    def forward(self, x: Tensor) -> Tensor:
        return x.as_strided(self.shape, self.stride)


def test_gradients_of_any_layout_are_taken() -> None:
    for last in (
        Tensor.sum,
        lambda y: y.transpose(0, 1).reshape(-1),
        lambda y: y[..., ::2],
        lambda y: y.mean(1),
    ):
        assert_as_plain(Chain(nn.Linear(8, 6), last=last), numbers(4, 5, 8).requires_grad_())
        assert_as_plain(Chain(nn.Linear(8, 6), last=last), numbers(4, 8).requires_grad_())


def test_a_linear_layer_whose_weight_is_stored_by_columns() -> None:
    layer = nn.Linear(24, 40)
    layer.weight = nn.Parameter(numbers(24, 40).t())
    assert_as_plain(layer, numbers(5, 7, 24).requires_grad_())


CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3), (2, 4, 11)),
    "1d same": (nn.Conv1d(4, 6, 3, padding="same", dilation=2), (2, 4, 11)),
    "1d even same": (nn.Conv1d(4, 6, 4, padding="same"), (2, 4, 11)),
    "2d": (nn.Conv2d(4, 6, 3), (2, 4, 9, 11)),
    "2d without bias": (nn.Conv2d(4, 6, 3, bias=False), (2, 4, 9, 11)),
    "2d strided": (nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(2, 1)), (2, 4, 13, 11)),
    "2d valid": (nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 9, 11)),
    "2d half even same": (nn.Conv2d(4, 6, (2, 3), padding="same"), (2, 4, 9, 11)),
    "2d grouped": (nn.Conv2d(4, 8, 3, groups=4), (2, 4, 9, 11)),
    "2d reflecting": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 11)),
    "2d without batch": (nn.Conv2d(4, 6, 3), (4, 9, 11)),
    "3d": (nn.Conv3d(2, 3, 3, padding=1, stride=2), (2, 2, 5, 6, 7)),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3, stride=3, output_padding=2), (2, 4, 11)),
    "transposed 2d": (
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        (2, 4, 5, 6),
    ),
    "transposed 3d": (nn.ConvTranspose3d(2, 3, 2, dilation=2, bias=False), (2, 2, 4, 4, 4)),
}


@DTYPES
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_gets_the_gradients_of_a_plain_backward(name: str, dtype: torch.dtype) -> None:
    layer, shape = CONVOLUTIONS[name]
    assert_as_plain(copy.deepcopy(layer).to(dtype), numbers(*shape, dtype=dtype).requires_grad_())


def test_convolutions_are_deferred_unless_their_padding_is_nonzero_or_asymmetric() -> None:
    alone = {
        name for name, (layer, shape) in CONVOLUTIONS.items() if deferred_calls(layer, numbers(*shape)) == 0
    }
    assert alone == {"1d even same", "2d half even same", "2d reflecting"}


def test_a_convolution_keeps_its_memory_format() -> None:
    layer = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert_as_plain(layer, numbers(2, 4, 9, 11).contiguous(memory_format=torch.channels_last).requires_grad_())


@DTYPES
@pytest.mark.parametrize(
    ("options", "deferred"),
    [
        ({}, 1),
        ({"padding_idx": 3}, 1),
        ({"scale_grad_by_freq": True}, 1),
        ({"max_norm": 1.0}, 0),
        ({"sparse": True}, 0),
    ],
    ids=str,
)
def test_an_embedding_gets_the_gradients_of_a_plain_backward(
    options: dict[str, Any], deferred: int, dtype: torch.dtype
) -> None:
    layer = nn.Embedding(10, 6, dtype=dtype, **options)
    words = torch.randint(0, 10, (4, 7), generator=torch.Generator().manual_seed(0))
    assert deferred_calls(copy.deepcopy(layer), words) == deferred
    if not options.get("sparse"):
        assert_as_plain(layer, words)


@pytest.mark.parametrize(
    "model", [nn.Linear(24, 40), nn.Linear(24, 40, bias=False), Block(24)], ids=["bias", "no", "block"]
)
def test_under_autocast_the_gradients_are_those_of_a_plain_backward(model: nn.Module) -> None:
    with autocasting():
        assert_as_plain(model, numbers(5, 7, 24).requires_grad_(), numbers(5, 7, 24, seed=2).requires_grad_())


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_under_autocast_convolutions_get_the_gradients_of_a_plain_backward(name: str) -> None:
    layer, shape = CONVOLUTIONS[name]
    with autocasting():
        assert_as_plain(layer, numbers(*shape).requires_grad_())


def test_a_backward_after_the_autocast_region_of_its_forward_is_the_same() -> None:
    with without_onednn():
        assert_as_plain(Autocast(Block()), numbers(3, 5, 16).requires_grad_())


class Autocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output: Tensor = self.inner(x)
        return output


def test_under_autocast_a_weight_used_again_elsewhere_keeps_both_its_gradients() -> None:
    model, inputs = UsedTwice(), [numbers(3, 5, 8).requires_grad_()]
    with autocasting():
        plain = gradients(model, inputs, plainly)
        for run in (split, whole):
            # autograd adds the two in bfloat16, because it casts the weight once for both
            torch.testing.assert_close(gradients(model, inputs, run), plain, rtol=0.01, atol=0.02)
