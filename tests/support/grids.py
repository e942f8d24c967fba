"""Which cases of a grid run in `make test`: a smaller grid for the same promise, and fewer random examples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
from hypothesis import settings

__all__ = ["examples", "is_full", "repetitions", "small", "thinned"]

T = TypeVar("T")


def small(keep: Callable[..., bool]) -> pytest.MarkDecorator:
    """Run only the cases with `keep(...)` in `make test`, and all of them in `make test-all`.

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("p", [2, 4])
    @small(lambda p, family: p == 2 or family == "zbv")

    `keep` takes any of the test's parameters by name. `tests/conftest.py` marks the other cases as `full`.
    """
    return pytest.mark.small.with_args(keep)


_SHARE = float(os.environ.get("EXAMPLES", "1"))
"""Of all random examples, in `make test-all`."""


def examples(count: int) -> int:
    """`count` random examples in `make test-all`, or a share of them, and a tenth of them in `make test`."""
    return max(count // 10, round(count * _SHARE)) if is_full() else count // 10


def thinned(cases: Iterable[T], step: int, first: int = 0) -> list[T]:
    """All cases of a loop in `make test-all`, each `step`-th of them from `first` in `make test`."""
    return list(cases) if is_full() else list(cases)[first::step]


def repetitions(full: int, few: int) -> int:
    """How often `make test-all` and `make test` repeat what promises the same each time; ranks must be told."""
    return full if is_full() else few


def is_full() -> bool:
    """Whether this is `make test-all`."""
    return settings.get_current_profile_name() == "full"
