"""Names that torch's modules have and ours do not define: torch's own objects, shared vocabulary."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from penstock.runtime.torch_internals.pipelining import DROP_IN

DROP_IN.require()


def names_of(torchs: ModuleType) -> Callable[[str], Any]:
    """Return a `__getattr__` for the module of the same name in our package."""

    def find(name: str) -> Any:  # noqa: ANN401 -- any object of torch's module
        if name.startswith("__") or not hasattr(torchs, name):
            ours = torchs.__name__.replace("torch.distributed.pipelining", "penstock.pipelining")
            raise AttributeError(f"module {ours!r} has no attribute {name!r}")
        return getattr(torchs, name)

    return find


def mirror(package: ModuleType, *names: str) -> None:
    """Add modules to a package that have the contents of torch's modules with these names."""
    for name in names:
        torchs = import_module(f"torch.distributed.pipelining.{name}")
        module = ModuleType(f"{package.__name__}.{name}", torchs.__doc__)
        contents = {key: value for key, value in vars(torchs).items() if key == "__all__" or key[:2] != "__"}
        vars(module).update(contents)
        sys.modules[module.__name__] = module
        setattr(package, name, module)
