"""Promises of times and sizes as text."""

from __future__ import annotations

import pytest

from penstock.cost.units import Units, bytes_text, count_text, number_text, seconds_text

UNIT = Units(seconds=False, bytes=False)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (12.75, "12.75 s"),
        (0.01852, "18.52 ms"),
        (4.2e-6, "4.2 µs"),
        (3e-8, "0.03 µs"),
        (123456, "123456 s"),
    ],
)
def test_seconds_have_a_fitting_unit(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1002 * 2**20, "1002 MiB"), (1.5 * 2**30, "1.5 GiB")],
)
def test_sizes_have_a_fitting_unit_and_no_exponents(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_relative_costs_are_units_and_activations_in_singular_and_plural() -> None:
    assert [UNIT.time(value) for value in (33, 1, 0.5)] == ["33 units", "1 unit", "0.5 units"]
    assert [UNIT.memory(value) for value in (4, 1)] == ["4 activations", "1 activation"]
    assert Units().time(0.033) == "33 ms"
    assert Units().memory(2**30) == "1 GiB"


def test_the_numbers_of_a_column_share_the_unit_of_the_longest() -> None:
    scale = Units().time_scale(1.5)
    assert [scale.number(value) for value in (1.5, 0.25)] == ["1.5", "0.25"]
    assert Units().column("makespan", 1.5) == "makespan, s"
    assert UNIT.column("makespan", 1.5) == "makespan"


def test_several_cost_models_are_real_if_one_is() -> None:
    assert Units.common([UNIT, Units(bytes=False)]) == Units(bytes=False)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1 / 3, "0.33333"), (123456.7, "123457"), (99999.6, "100000"), (2e10, "20000000000")],
)
def test_numbers_have_no_exponents(value: float, text: str) -> None:
    assert number_text(value) == text


def test_counts_have_a_decimal_prefix() -> None:
    assert count_text(3.12e14, "FLOPs") == "312 TFLOPs"
    assert count_text(12) == "12"
