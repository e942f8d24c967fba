"""Modules and graphs: dicts of `nn.Module`, wrappers of torch.compile, exported and traced graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from penstock.runtime.torch_internals.autograd import SPLIT_BACKWARD
from penstock.runtime.torch_internals.distributed import CHECKPOINTS
from penstock.runtime.torch_internals.registry import Feature

RECOMPUTATION = Feature("RECOMPUTE actions", without="schedules without them")
MATERIALIZATION = Feature("materialize()", without="stages that are created on their device")
DECODERS = Feature("split() of transformers models", without="stages that are given as modules")
GRAPHS = Feature("split() of exported and traced models", without="nn.Sequential, or stages given as modules")

COMPILER = "torch._dynamo"
"""The module of torch.compile; it is never imported here."""

WRAPPED_NAMES = ("_orig_mod", "_checkpoint_wrapped_module")
"""The names of the module inside the wrappers of torch.compile and of activation checkpointing."""

own_parameters: Callable[[nn.Module], dict[str, Tensor | None]] = SPLIT_BACKWARD.field(
    "torch.nn.Module._parameters"
)
"""Return a module's own parameters; a parametrization is a property of the module, and not in here."""

own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = RECOMPUTATION.field("torch.nn.Module._buffers")
"""Return a module's own buffers, which can be replaced in this dict by values of any type."""

transient_buffers: Callable[[nn.Module], set[str]] = CHECKPOINTS.field(
    "torch.nn.Module._non_persistent_buffers_set"
)
"""Return the names of a module's own buffers that a state dict leaves out."""


@contextmanager
def attributes_set(values: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, given as object, name and value, and restore them at the end."""
    before = [getattr(owner, name) for owner, name, _ in values]
    try:
        for owner, name, value in values:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(values, before):
            setattr(owner, name, value)


@DECODERS.uses("torch.nn.Module._modules")
def replace_children(module: nn.Module, children: Mapping[str, nn.Module]) -> None:
    """Give a module other children, for example a `ModuleList`, which has no API for names."""
    module._modules = dict(children)


@MATERIALIZATION.uses("torch.nn.Module._apply")
def replace_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace all tensors of a module, as `to()` and `to_empty()` do; FSDP overrides it."""
    module._apply(function)  # type: ignore[no-untyped-call]


def reset_method(module: nn.Module) -> Any:
    """Return the method that initializes a module's parameters; None if there is none."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


@SPLIT_BACKWARD.uses("torch.nn.modules.conv._ConvNd._conv_forward")
def has_own_convolution(layer: nn.Module, layer_type: type[nn.Module]) -> bool:
    """Return whether a subclass of a convolution overrides a part of its forward."""
    names = ("_conv_forward", "_output_padding")
    return any(getattr(type(layer), name, None) is not getattr(layer_type, name, None) for name in names)


@SPLIT_BACKWARD.uses("torch.nn.Module._compiled_call_impl")
def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile or TorchScript runs the module."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    dynamo = sys.modules.get(f"{COMPILER}.eval_frame")
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None


@GRAPHS.uses("torch.fx.Graph._codegen")
def nesting(model: GraphModule, name: str) -> Any:
    """Return how the arguments (`in_spec`) or results (`out_spec`) of an exported module are nested."""
    info = getattr(model.graph._codegen, "pytree_info", None)
    return None if info is None else getattr(info, name)


@GRAPHS.uses("torch._ops.OpOverload._schema")
def is_mutable_operator(target: object) -> bool | None:
    """Return whether an operator of torch changes an argument in place; None for another function."""
    schema = getattr(target, "_schema", None)
    return None if schema is None else schema.is_mutable
