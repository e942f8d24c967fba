"""Penstock: pipeline-parallel training schedules, designed, proved, shown and run.

The public names are those of `penstock.api`, which is imported when the first of them is used.
"""

import typing as _typing
from importlib import import_module as _import_module

if _typing.TYPE_CHECKING:
    from penstock.api import *  # noqa: F403 -- all of them
    from penstock.api import __all__ as __all__
    from penstock.errors import *  # noqa: F403 -- which mypy does not find in `penstock.api`

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    api = _import_module("penstock.api")
    if name not in globals():  # a package that `penstock.api` imports is there now
        if name not in (*api.__all__, "__all__"):
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        globals()[name] = getattr(api, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_import_module("penstock.api").__all__})
