"""The registry of private torch names: which feature needs a name, and what works without it.

    SCALING = Feature("GradScaler", without="training in bfloat16 or float32")

    unscale = SCALING.name("torch._amp_foreach_non_finite_check_and_unscale_")

    @SCALING.uses("torch.amp.GradScaler._scale")
    def scale_of(scaler): ...

A name of a class may also be a field that its methods set. Names of modules that are not loaded are looked up
at the first call, because FSDP, DTensor and torch.distributed.pipelining are slow to import. If a name is
missing, the call raises an error that says what is lost.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable
from dis import get_instructions
from functools import cache, wraps
from operator import attrgetter
from types import FunctionType
from typing import Any, TypeVar

import torch

from penstock.errors import PipelineError

Function = TypeVar("Function", bound=Callable[..., Any])

VERIFIED = ("2.13", "2.14", "2.15")
"""The torch versions with which all functions of this package were tested, unless a feature says otherwise."""

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""The installed torch, such as (2, 15)."""

FEATURES: list[Feature] = []
"""The features of the areas that are imported; `all_features` imports the others."""

_ABSENT = object()


class Feature:
    """A capability of Penstock that needs private names of torch."""

    def __init__(self, title: str, *, without: str, verified: tuple[str, ...] = VERIFIED) -> None:
        self.title, self.without, self.verified = title, without, verified
        self.names: list[str] = []
        """The names, in full, such as `torch.Tensor._version`."""
        FEATURES.append(self)

    def uses(self, *names: str) -> Callable[[Function], Function]:
        """Decorate a function that uses these names; its first call raises if one is missing."""
        self.names += names

        def decorate(function: Function) -> Function:
            if all(map(_is_loaded, names)) and not missing(names):
                return function
            unchecked = list(names)

            @wraps(function)
            def checked(*args: Any, **kwargs: Any) -> Any:
                if unchecked:
                    self.require(unchecked)
                    unchecked.clear()
                return function(*args, **kwargs)

            return checked  # type: ignore[return-value]

        return decorate

    def name(self, path: str, *, otherwise: Callable[..., Any] | None = None) -> Any:
        """Return the object of torch with this name, or `otherwise`, or a function that raises what is lost."""
        if _is_loaded(path) and not missing([path]):
            return self.uses(path)(_object(path))
        if otherwise is not None:
            self.names.append(path)
            return otherwise
        return self.uses(path)(lambda *args, **kwargs: _object(path)(*args, **kwargs))  # noqa: PLW0108 -- looked up late

    def field(self, path: str) -> Callable[[Any], Any]:
        """Return a function that reads this field of an object."""
        return self.uses(path)(attrgetter(path.rpartition(".")[2]))

    def require(self, names: list[str] | None = None) -> None:
        """Raise if one of these names is missing, by default any name of the feature."""
        if lost := missing(self.names if names is None else names):
            raise PipelineError(
                f"{self.title}: not possible with torch {torch.__version__}, which has no {', '.join(lost)}. "
                f"Without it: {self.without}. Verified with torch {', '.join(self.verified)}"
            )


@cache
def warn_if_untested() -> None:
    """Warn once per process of a torch that was not tested, with the features that are lost, by name."""
    release = ".".join(map(str, RELEASE))
    if release in VERIFIED:
        return
    lost = {feature: missing(feature.names) for feature in all_features()}
    effect = "; ".join(
        f"{feature.title} is not possible (torch has no {', '.join(names)})"
        for feature, names in lost.items()
        if names
    )
    warnings.warn(
        f"Penstock is tested with torch {', '.join(VERIFIED)}, not with {torch.__version__}: "
        f"{effect or 'it has all private names that Penstock needs, but they may behave differently'}. "
        "`penstock doctor` lists what works",
        stacklevel=3,
    )


def all_features() -> list[Feature]:
    """Return the features of all areas."""
    package = sys.modules[__package__]
    for area in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{area.name}")
    return FEATURES


def members(owner: str, names: str) -> list[str]:
    """Return the full names of members of a class or module, given their names with spaces between."""
    return [f"{owner}.{name}" for name in names.split()]


def missing(names: list[str] | tuple[str, ...]) -> list[str]:
    """Return those of these names that the installed torch does not have; imports their modules."""
    return [name for name in names if _object(name) is _ABSENT]


def _is_loaded(path: str) -> bool:
    """Return whether the lookup of a name imports nothing."""
    parts = path.split(".")
    loaded = max(count for count in range(len(parts) + 1) if ".".join(parts[:count]) in sys.modules)
    return loaded == len(parts) or hasattr(sys.modules[".".join(parts[:loaded])], parts[loaded])


def _object(path: str) -> Any:
    """Return the object with this name, None for a field that only instances have, or `_ABSENT`."""
    parts = path.split(".")
    found: Any = torch
    for count in range(1, len(parts)):
        owner, name = found, parts[count]
        # a package may have a function under the name of a module, as `_composable.replicate`
        found = sys.modules.get(".".join(parts[: count + 1])) or getattr(owner, name, _ABSENT)
        if found is _ABSENT and isinstance(owner, type):
            return None if _is_field(owner, name) else _ABSENT
        if found is _ABSENT:
            try:
                found = importlib.import_module(".".join(parts[: count + 1]))
            except ImportError:
                return _ABSENT
    return found


def _is_field(owner: type, name: str) -> bool:
    """Return whether a class declares an attribute, or its methods set it."""
    if any(name in vars(base).get("__annotations__", ()) for base in owner.__mro__):
        return True
    functions = (
        each for base in owner.__mro__ for each in vars(base).values() if isinstance(each, FunctionType)
    )
    calls = (call for each in functions if name in each.__code__.co_names for call in get_instructions(each))
    return any(call.opname == "STORE_ATTR" and call.argval == name for call in calls)
