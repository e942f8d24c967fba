"""A `GradScaler` for a pipeline: the loss is scaled where it is made, and all ranks agree on what overflowed.

scaler = GradScaler(pipeline)
pipeline.step(x, target=y)     # gradients come out multiplied by the scale
scaler.unscale_(optimizer)     # only if something looks at them, such as clip_grad_norm_
scaler.step(optimizer)         # on every rank, or on none
scaler.update()
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.runtime.dtensors import local

__all__ = ["GradScaler"]


class _Pipeline(Protocol):
    """What is needed of the pipeline that makes the gradients."""

    device: torch.device
    scaler: Any

    def largest_anywhere(self, numbers: Tensor) -> Tensor: ...
    def refuse_incomplete(self) -> None: ...


class GradScaler(torch.amp.GradScaler):
    """As torch's, for the gradients that a pipeline makes; its options are torch's too."""

    def __init__(self, pipeline: _Pipeline, **options: Any) -> None:
        super().__init__(pipeline.device.type, **options)
        self._pipeline = pipeline
        if self.is_enabled():
            self._lazy_init_scale_growth_tracker(pipeline.device)
        pipeline.scaler = self if self.is_enabled() else None  # one before this may have scaled the loss

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,  # noqa: FBT001 -- torch's
    ) -> dict[torch.device, Tensor]:
        """Divide by the scale what this rank holds; what is not finite on any rank counts on all of them."""
        self._pipeline.refuse_incomplete()
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = local(parameter.grad)
                    if gradient.dtype == torch.float16 and not allow_fp16:
                        raise ValueError("gradients in float16 cannot be unscaled: keep the weights in float32")
                    by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        found = {found_inf.device: found_inf}
        with torch.no_grad():
            for (device, _), gradients in by_kind.items():
                on_device = found.setdefault(device, torch.zeros_like(found_inf, device=device))
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, on_device, inv_scale.to(device))
        anywhere = torch.stack([each.to(found_inf.device) for each in found.values()]).max()
        # a fused optimizer computes with it, and wants a number without dimensions
        return {found_inf.device: self._pipeline.largest_anywhere(anywhere.reshape(1)).reshape(())}
