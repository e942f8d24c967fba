"""The user's function that returns the model to verify: found as `module:function`, its errors in one line."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

from penstock.arguments import printable, some
from penstock.errors import PipelineError

__all__ = ["Source", "find_function", "one_line"]

Source: TypeAlias = str | Callable[..., Any]
"""A top-level function of a module, or its path as in `package.module:function`."""


def find_function(source: Source) -> tuple[Callable[..., Any], str]:
    """The function, and its name for messages."""
    if not isinstance(source, str):
        return source, source.__name__
    path, colon, name = source.partition(":")
    if not (path and colon and name) or "/" in path or path.endswith(".py"):
        guess = path.removesuffix(".py").replace("/", ".").strip(".") or "module"
        raise PipelineError(
            f"{printable(source)} is not of the form module:function: write {guess}:{name or 'function'}"
        )
    module = _import(path)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            each
            for each, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == path and each[0] != "_"
        ]
        problem = f"{path} has no function {printable(name)}"
        if hasattr(module, name):
            problem = f"{path}.{name} is not a function"
        raise PipelineError(f"{problem}; the functions of {path} are: {some(functions) or 'none'}")
    return function, source


def _import(path: str) -> ModuleType:
    if (directory := os.getcwd()) not in sys.path:  # noqa: PTH109 -- as `python -m` does
        sys.path.insert(0, directory)
    try:
        return import_module(path)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (path == missing or path.startswith(f"{missing}.")):
            raise PipelineError(
                f"there is no module {printable(path)} in {directory} or in the installed packages"
            ) from None
        raise PipelineError(f"importing {printable(path)} raised {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An error of the user's code in one line, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename[0] != "<"]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own[1:] else ""
    return printable(f"{type(error).__name__}: {error}", 300) + place
