"""Promises of split-backward and merge-backward, as text in and text out."""

from __future__ import annotations

import pytest

import penstock
from penstock.lowering import (
    MergeBackward,
    SplitBackward,
)
from tests.support.passes import FAMILIES, after


def test_split_backward_replaces_every_b_by_i_and_w() -> None:
    assert after(SplitBackward(), "0F0 0F1 0B0 0B1") == "0F0 0F1 0I0 0W0 0I1 0W1"


def test_split_backward_keeps_the_input_gradient_in_the_pair() -> None:
    text = "0F0 1F0 (0F1;1B0)OVERLAP_F_B 1F1 0B0 1B1 0B1"
    split = "0F0 1F0 (0F1;1I0)OVERLAP_F_B 1W0 1F1 0I0 0W0 1I1 1W1 0I1 0W1"
    assert after(SplitBackward(), text) == split
    assert after(MergeBackward(), split) == text


def test_merge_backward_keeps_an_i_whose_w_comes_later() -> None:
    assert after(MergeBackward(), "0F0 0F1 0I0 0I1 0W0 0W1") == "0F0 0F1 0I0 0I1 0W0 0W1"
    assert after(MergeBackward(), "0F0 0F1 0I0 0W0 0I1 0W1") == "0F0 0F1 0B0 0B1"
    assert after(MergeBackward(), "0F0 1F0 1I0 0I0 0W0 1W0") == "0F0 1F0 1I0 0B0 1W0"


@pytest.mark.parametrize("name", FAMILIES)
def test_split_and_merge_are_inverse_where_w_directly_follows_i(name: str) -> None:
    schedule = penstock.build(name, ranks=2, microbatches=3)
    split = SplitBackward()(schedule)
    assert penstock.validate(split) == []
    assert MergeBackward()(split) == MergeBackward()(schedule)
