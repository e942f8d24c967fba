"""What a user's function gives to be verified: a model, its loss, and one batch."""

from __future__ import annotations

import os
import random
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from penstock.arguments import printable
from penstock.errors import PipelineError
from penstock.runtime.models.decoders import is_pretrained
from penstock.runtime.pytree import flatten

__all__ = ["Parts", "Source", "parts_from"]

Source: TypeAlias = str | Callable[[], Any]
"""A function of a module, or its place as in `package.module:function`."""

_CONTRACT = "(model, loss, inputs, target)"


@dataclass
class Parts:
    """A model, its loss, and one batch: the model's arguments, and the target."""

    model: nn.Module
    loss: Callable[..., Tensor]
    args: tuple[Any, ...]
    target: Any

    def __call__(self, args: tuple[Any, ...], target: object) -> Tensor:
        """The loss of these arguments, computed as if there were no pipelines."""
        try:
            output = self.model(*args)
            loss = self.loss(output.logits if is_pretrained(self.model) else output, target)
        except Exception as error:
            raise PipelineError(
                f"in one process, without a pipeline, the model or the loss raised {_said(error)}"
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise PipelineError(f"the loss must be a tensor with one number, and is of {given}")
        if not loss.requires_grad:
            raise PipelineError("the loss depends on no parameter that is trained: there is no gradient")
        return loss

    @property
    def whole(self) -> nn.ModuleDict:
        """Everything that is trained: the model, and the loss if it is a module."""
        return nn.ModuleDict(
            {"model": self.model} | ({"loss": self.loss} if isinstance(self.loss, nn.Module) else {})
        )

    @property
    def rows(self) -> int | None:
        """How many rows the batch has."""
        return next((len(leaf) for leaf in self._leaves() if isinstance(leaf, Tensor) and leaf.dim()), None)

    @property
    def fingerprint(self) -> str:
        """The same in two processes if they have the same weights and the same batch."""
        found = 0
        for leaf in (*self.whole.state_dict().values(), *self._leaves()):
            if isinstance(leaf, Tensor):
                found = zlib.crc32(leaf.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data, found)
        return f"{found:08x}"

    def _leaves(self) -> list[Any]:
        return flatten((self.args, self.target))[0]


def parts_from(source: Source) -> Parts:
    """Call the function, always with the same random numbers to come, and check what it gives."""
    function, name = _found(source)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 -- the generator that a user's function may draw from
    torch.manual_seed(0)
    try:
        given = function()
    except Exception as error:
        raise PipelineError(f"{name}() raised {_said(error)}") from error
    if not isinstance(given, tuple) or len(given) != 4:
        what = f"{len(given)} things" if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise PipelineError(f"{name}() must return {_CONTRACT}, four things, and it returned {what}")
    model, loss, inputs, target = given
    faults = []
    if not isinstance(model, nn.Module):
        faults.append(f"the model must be an nn.Module, and is a {type(model).__name__}")
    elif elsewhere := {tensor.device.type for tensor in model.parameters()} - {"cpu"}:
        faults.append(f"the model must be on the CPU, where it is verified, and is on {', '.join(elsewhere)}")
    if not callable(loss):
        faults.append(
            "the loss must be a function of output and target that gives one number, and is a "
            f"{type(loss).__name__}"
        )
    if isinstance(inputs, list):
        faults.append("the inputs must be a tensor or a tuple of what the model is called with, and are a list")
    if faults:
        raise PipelineError(f"{name}() must return {_CONTRACT}: " + "; ".join(faults))
    return Parts(model, loss, inputs if isinstance(inputs, tuple) else (inputs,), target)


def _found(source: Source) -> tuple[Callable[[], Any], str]:
    """The function and what to call it."""
    if not isinstance(source, str):
        return source, source.__name__
    path, colon, name = source.partition(":")
    if not (path and colon and name) or "/" in path or path.endswith(".py"):
        guess = path.removesuffix(".py").replace("/", ".").strip(".") or "module"
        raise PipelineError(
            f"{printable(source)} is not a module and a function in it: write {guess}:{name or 'function'}"
        )
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 -- as `python -m` does
        sys.path.insert(0, here)
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(f"{error.name}.")):
            raise PipelineError(
                f"there is no module {printable(path)} in {here} or among the packages"
            ) from None
        raise PipelineError(f"importing {printable(path)} raised {_said(error)}") from error
    except Exception as error:
        raise PipelineError(f"importing {printable(path)} raised {_said(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            each
            for each, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == path and each[0] != "_"
        ]
        is_what = (
            f"{path}.{name} is no function" if hasattr(module, name) else f"{path} has no {printable(name)}"
        )
        raise PipelineError(f"{is_what}; it has {', '.join(functions[:8]) or 'none'}")
    return function, source


def _said(error: BaseException) -> str:
    """An error of somebody's code in one line, with the line it arose from."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename[0] != "<"]
    place = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs[1:] else ""
    return printable(f"{type(error).__name__}: {error}", 300) + place
