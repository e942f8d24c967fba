"""Parameters that `materialize` has replaced; an optimizer that still holds one raises at its first step.

Such an optimizer was created before `materialize`. Its parameters never get a gradient, so it would train
nothing. Replaced parameters are remembered weakly: without such an optimizer there are none, and no step is
slower.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from penstock.arguments import some
from penstock.errors import PipelineError

__all__ = ["remember_replaced"]

_SHOWN = 4
_replaced: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
_hooks: list[object] = []


def remember_replaced(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Remember the parameters of a stage, by name, that are other objects now."""
    replaced = {name: parameter for name, parameter in before.items() if after.get(name) is not parameter}
    for name, parameter in replaced.items():
        _replaced[parameter] = name
    if replaced and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_optimizer))


def _check_optimizer(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Raise if the optimizer holds a replaced parameter."""
    if not _replaced:
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = [repr(_replaced[parameter]) for parameter in held if parameter in _replaced]
    if names:
        raise PipelineError(
            f"{len(names)} of {len(held)} parameters of this {type(optimizer).__name__} were replaced by "
            f"materialize() after it was created, and would not be trained: {some(names, _SHOWN)}. Create the "
            "optimizer after materialize(), as with pipeline.parameters()"
        )
