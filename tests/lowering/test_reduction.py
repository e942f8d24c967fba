"""Promises of add-reduce-grad, as text in and text out."""

from __future__ import annotations

from penstock.lowering import (
    AddGradReduction,
)
from tests.support.passes import after


def test_gradients_are_reduced_right_after_the_last_backward() -> None:
    assert after(AddGradReduction(), "0F0 1F0 1I0 0B0 1W0") == ("0F0 1F0 1I0 0B0 0REDUCE_GRAD 1W0 1REDUCE_GRAD")


def test_without_backwards_there_is_nothing_to_reduce() -> None:
    assert after(AddGradReduction(), "0F0 0F1") == "0F0 0F1"
