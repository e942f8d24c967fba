"""Packages that can be called: `penstock.search(...)` calls `penstock.search.search`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(package: str, function: Callable[..., Any]) -> None:
    """Let a call of the package call the function, whose signature and docstring it then shows."""

    class CallablePackage(ModuleType):
        __call__ = staticmethod(function)
        __signature__ = inspect.signature(function)

    module = sys.modules[package]
    module.__class__ = CallablePackage
    module.__doc__ = f"{module.__doc__}\n{inspect.getdoc(function)}\n"
