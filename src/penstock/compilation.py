"""Compilation of loops over arrays by numba, where numba is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    from numba import config, njit

    COMPILED = not config.DISABLE_JIT  # type: ignore[attr-defined]
except ImportError:
    COMPILED = False

    def compiled(function: Function) -> Function:
        """The function itself: without numba the results are the same, only slower."""
        return function
else:

    def compiled(function: Function) -> Function:
        """The function, compiled at its first call and cached on disk; it releases the GIL."""
        try:
            return cast("Function", njit(cache=True, nogil=True)(function))
        except (RuntimeError, OSError):  # no cache directory is writable
            return cast("Function", njit(nogil=True)(function))
