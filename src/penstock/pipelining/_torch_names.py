"""Names that torch's module has and ours does not define: torch's own objects, shared vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from penstock.runtime.torch_internals.pipelining import DROP_IN

DROP_IN.require()


def names_of(torchs: ModuleType) -> Callable[[str], Any]:
    """A `__getattr__` for the module of the same name in our package."""

    def find(name: str) -> Any:  # noqa: ANN401 -- any object of torch's module
        if name.startswith("__") or not hasattr(torchs, name):
            ours = torchs.__name__.replace("torch.distributed.pipelining", "penstock.pipelining")
            raise AttributeError(f"module {ours!r} has no attribute {name!r}")
        return getattr(torchs, name)

    return find
