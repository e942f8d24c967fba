"""Which cases of a grid run in `make test`: a smaller grid for the same promise, and fewer random examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings

__all__ = ["examples", "small"]


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
    return count if settings.get_current_profile_name() == "full" else count // 10
