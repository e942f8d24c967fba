"""Autograd and tensors: the engine, version counters, storages and fused operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.optim import Optimizer

from penstock.runtime.torch_internals.registry import Feature

STEPS = Feature(
    "steps of a Pipeline", without="schedules, simulation, search, plans and pictures, which need no torch"
)
SPLIT_BACKWARD = Feature(
    "split backward (I and W)", without="schedules with a full backward, such as 1f1b and interleaved-1f1b"
)
PROFILER = Feature("names of actions in torch's profiler", without="steps, and Pipeline.profile()")
CLIPPING = Feature(
    "Pipeline.clip_grad_norm_", without="training without clipping, or torch's function on one rank"
)
SCALING = Feature("GradScaler", without="training in bfloat16 or float32")

version: Callable[[Tensor], int] = STEPS.field("torch.Tensor._version")
"""Return how often a tensor was changed in place."""

storage_uses: Callable[[int], int] = STEPS.name("torch._C._storage_Use_Count")
"""Return how many tensors use the storage with this identity, and a constant."""

unsafe_view: Callable[[Tensor, Sequence[int]], Tensor] = STEPS.name("torch.ops.aten._unsafe_view.default")
"""Return the tensor as the result of a node, with the same memory and its own version counter."""

_run_engine: Callable[..., Any] = STEPS.name("torch.autograd.graph._engine_run_backward")

transform_level: Callable[[], int | None] = SPLIT_BACKWARD.name("torch._C._functorch.maybe_current_level")
"""Return the depth of the transforms of torch.func, such as vmap, that are active; None outside of them."""

is_view: Callable[[Tensor], bool] = SPLIT_BACKWARD.name("torch.Tensor._is_view")
"""Return whether a tensor is a view of another."""

node_class: Callable[[type], type] = SPLIT_BACKWARD.field("torch.autograd.Function._backward_cls")
"""Return the class of the graph nodes of a `torch.autograd.Function`."""

profiler_enabled: Callable[[], bool] = PROFILER.name("torch.autograd._profiler_enabled", otherwise=bool)
"""Return whether torch's profiler records."""

scale_all: Callable[[Sequence[Tensor], Tensor], None] = CLIPPING.name("torch._foreach_mul_")
"""Multiply tensors in place by one factor."""

unscale_all: Callable[[Sequence[Tensor], Tensor, Tensor], None] = SCALING.name(
    "torch._amp_foreach_non_finite_check_and_unscale_"
)
"""Multiply gradients in place by the second tensor; set the first one to 1 if a gradient is not finite."""


@STEPS.uses("torch.UntypedStorage._cdata")
def storage_identity(tensor: Tensor) -> int:
    """Return a number that all tensors of one storage share."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


@STEPS.uses("torch._C._FunctionBase")
def gradient_edge(output: Tensor) -> GradientEdge:
    """Return where the gradient of an output enters the graph; it keeps the graph, but not the output's memory.

    `get_gradient_edge` returns the same in more time, and is needed for leaves and nodes of Python.
    """
    node: Any = output.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


@SPLIT_BACKWARD.uses("torch.Tensor._backward_hooks", "torch.Tensor._post_accumulate_grad_hooks")
def has_hooks(leaf: Tensor) -> bool:
    """Return whether a weight has hooks on its gradient."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


class GradScalerBase(torch.amp.GradScaler):
    """torch's GradScaler for one device; a subclass unscales the gradients."""

    @SCALING.uses(
        "torch.amp.GradScaler._lazy_init_scale_growth_tracker", "torch.amp.GradScaler._unscale_grads_"
    )
    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__(device.type, **options)
        if self.is_enabled():
            self._lazy_init_scale_growth_tracker(device)

    def unscale_gradients(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply the gradients by `inv_scale`; return whether one is not finite."""
        raise NotImplementedError

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,  # noqa: FBT001 -- torch's
    ) -> dict[torch.device, Tensor]:
        return self.unscale_gradients(optimizer, inv_scale, found_inf, allow_fp16=allow_fp16)


def run_backward(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Add the gradients of all leaves below the roots to their `.grad`, given the gradients of the roots.

    The checks of `torch.autograd.backward`, which take as long as the engine, are left out: the caller has
    checked the shapes of the gradients, and calls it outside of transforms of `torch.func`.
    """
    keep_graph = create_graph = False
    options = {"allow_unreachable": True, "accumulate_grad": True}
    _run_engine(tuple(roots), tuple(gradients), keep_graph, create_graph, (), **options)
