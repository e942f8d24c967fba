"""The model, the loss and the batch that a user's function returns for verification."""

from __future__ import annotations

import os
import random
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from penstock.arguments import printable
from penstock.errors import PipelineError
from penstock.runtime.models.decoders import is_pretrained
from penstock.runtime.pytree import flatten

__all__ = ["Source", "UserModel", "load_user_model"]

Source: TypeAlias = str | Callable[[], Any]
"""A top-level function of a module, or its path as in `package.module:function`."""

_RETURNS = "(model, loss, inputs, target)"


@dataclass
class UserModel:
    """A model, its loss, and one batch: the arguments of the model, and the target."""

    model: nn.Module
    loss: Callable[..., Tensor]
    args: tuple[Any, ...]
    target: Any

    def __call__(self, args: tuple[Any, ...], target: object) -> Tensor:
        """The loss for these arguments, computed without a pipeline."""
        try:
            output = self.model(*args)
            loss = self.loss(output.logits if is_pretrained(self.model) else output, target)
        except Exception as error:
            raise PipelineError(
                f"in one process, without a pipeline, the model or the loss raised {_one_line(error)}"
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            actual = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise PipelineError(f"the loss must be a tensor with one number, but it has {actual}")
        if not loss.requires_grad:
            raise PipelineError("the loss depends on no trained parameter, so there is no gradient")
        return loss

    @property
    def modules(self) -> nn.ModuleDict:
        """Everything that is trained: the model, and the loss if it is a module."""
        return nn.ModuleDict(
            {"model": self.model} | ({"loss": self.loss} if isinstance(self.loss, nn.Module) else {})
        )

    @property
    def rows(self) -> int | None:
        """The number of rows of the batch."""
        return next((len(leaf) for leaf in self._leaves() if isinstance(leaf, Tensor) and leaf.dim()), None)

    @property
    def fingerprint(self) -> str:
        """A checksum of weights and batch, to compare between processes."""
        checksum = 0
        for leaf in (*self.modules.state_dict().values(), *self._leaves()):
            if isinstance(leaf, Tensor):
                data = leaf.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data
                checksum = zlib.crc32(data, checksum)
        return f"{checksum:08x}"

    def _leaves(self) -> list[Any]:
        return flatten((self.args, self.target))[0]


def load_user_model(source: Source) -> UserModel:
    """Call the function with fixed random seeds, and check what it returns."""
    function, name = _find_function(source)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 -- the global generator, which a user's function may use
    torch.manual_seed(0)
    try:
        returned = function()
    except Exception as error:
        raise PipelineError(f"{name}() raised {_one_line(error)}") from error
    if not isinstance(returned, tuple) or len(returned) != 4:
        what = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise PipelineError(f"{name}() must return the four values {_RETURNS}, but it returned {what}")
    model, loss, inputs, target = returned
    if problems := _problems(model, loss, inputs):
        raise PipelineError(f"{name}() must return {_RETURNS}: " + "; ".join(problems))
    return UserModel(model, loss, inputs if isinstance(inputs, tuple) else (inputs,), target)


def _problems(model: object, loss: object, inputs: object) -> list[str]:
    problems = []
    if not isinstance(model, nn.Module):
        problems.append(f"the model must be an nn.Module, but is a {type(model).__name__}")
    elif devices := {tensor.device.type for tensor in model.parameters()} - {"cpu"}:
        problems.append(f"the model must be on the CPU, where it is verified, but is on {', '.join(devices)}")
    if not callable(loss):
        problems.append(
            "the loss must be a function of output and target that returns one number, but is a "
            f"{type(loss).__name__}"
        )
    if isinstance(inputs, list):
        problems.append("the inputs must be a tensor or a tuple of the model's arguments, but are a list")
    return problems


def _find_function(source: Source) -> tuple[Callable[[], Any], str]:
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
        raise PipelineError(f"{problem}; the functions of {path} are: {', '.join(functions[:8]) or 'none'}")
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
        raise PipelineError(f"importing {printable(path)} raised {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    """An error of the user's code in one line, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename[0] != "<"]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own[1:] else ""
    return printable(f"{type(error).__name__}: {error}", 300) + place
