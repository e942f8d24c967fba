"""Promises of arguments and messages: integers of any type, printable text, shortened lists."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.arguments import index_problem, listed, plural, printable, some, whole_number


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_any_type_are_accepted(value: object) -> None:
    assert whole_number(value) == 3
    assert type(whole_number(value)) is int


@pytest.mark.parametrize("value", [True, 3.0, "3", None, np.float32(3)])
def test_other_values_are_not_integers(value: object) -> None:
    assert whole_number(value) is None


def test_foreign_text_is_shortened_and_control_characters_are_escaped() -> None:
    assert printable("short") == "short"
    assert len(printable("x" * 1000)) == 60
    assert printable("\x1b[2J\n") == r"'\x1b[2J\n'"


def test_a_number_out_of_range_is_told_the_range_and_the_count() -> None:
    assert str(index_problem("step", 9, 3, "step")) == "step must be from 0 to 2: there are 3 steps (given 9)"
    assert str(index_problem("step", -1, 1, "step")) == "step must be 0: there is 1 step (given -1)"


def test_a_count_has_its_noun_in_singular_or_plural() -> None:
    assert [plural(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [plural(2, noun) for noun in ("microbatch", "process")] == ["2 microbatches", "2 processes"]
    assert plural(2, "entry", "entries") == "2 entries"


def test_lists_are_joined_and_long_ones_shortened() -> None:
    assert listed([1, "a"]) == "1, a"
    assert some(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert some(range(10), most=2) == "0, 1, and 8 more"
