"""Which cases of a grid run in `make test`: a smaller grid for the same promise, and fewer random examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
from hypothesis import settings

__all__ = ["examples", "small", "thinned"]

T = TypeVar("T")


def small(keep: Callable[..., bool]) -> pytest.MarkDecorator:
    """Run only the cases with `keep(...)` in `make test`, and all of them in `make test-all`.

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("p", [2, 4])
    @small(lambda p, family: p == 2 or family == "zbv")

    `keep` takes any of the test's parameters by name. `tests/conftest.py` marks the other cases as `full`.
    """
    return pytest.mark.small.with_args(keep)


def examples(count: int) -> int:
    """`count` random examples in `make test-all`, a tenth of them in `make test`."""
    return count if _is_full() else count // 10


def thinned(cases: Iterable[T], step: int) -> list[T]:
    """All cases of a loop in `make test-all`, each `step`-th of them in `make test`."""
    return list(cases) if _is_full() else list(cases)[::step]


def _is_full() -> bool:
    return settings.get_current_profile_name() == "full"
