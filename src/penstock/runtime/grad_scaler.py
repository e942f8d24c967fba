"""A `GradScaler` for a pipeline: the last stage scales the loss, and all ranks agree on overflows.

scaler = GradScaler(pipeline)
pipeline.step(x, target=y)     # gradients are multiplied by the scale
scaler.unscale_(optimizer)     # only if something reads them before the step, such as clip_grad_norm_
scaler.step(optimizer)         # on every rank, or on none
scaler.update()
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import PipelineError
from penstock.runtime.dtensors import local
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.torch_internals.autograd import GradScalerBase, unscale_all


class GradScaler(GradScalerBase):
    """torch's GradScaler for the gradients of a pipeline, with the same options."""

    def __init__(self, pipeline: Pipeline, **options: Any) -> None:
        super().__init__(pipeline.device, **options)
        self._reference = weakref.ref(pipeline)  # the pipeline refers to the scaler
        pipeline.scaler = self if self.is_enabled() else None  # replaces an earlier scaler

    @property
    def _pipeline(self) -> Pipeline:
        pipeline = self._reference()
        if pipeline is None:
            raise PipelineError(
                "the pipeline of this GradScaler does not exist any more: keep a reference to it"
            )
        return pipeline

    def unscale_gradients(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Divide this rank's gradients by the scale; an overflow on any rank counts on all ranks."""
        self._pipeline.check_gradients_complete()
        unscale = partial(_unscale_own, optimizer, inv_scale, found_inf, allow_fp16=allow_fp16)
        # fused optimizers need a tensor without dimensions
        return {found_inf.device: self._pipeline.all_reduce_max(unscale).reshape(())}


def _unscale_own(optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *, allow_fp16: bool) -> Tensor:
    """Divide this rank's gradients by the scale; return whether one is not finite."""
    by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                if gradient.dtype == torch.float16 and not allow_fp16:
                    raise ValueError("float16 gradients cannot be unscaled: keep the weights in float32")
                by_type.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    overflows = {found_inf.device: found_inf}
    with torch.no_grad():
        for (device, _), gradients in by_type.items():
            on_device = overflows.setdefault(device, torch.zeros_like(found_inf, device=device))
            unscale_all(gradients, on_device, inv_scale.to(device))
    largest = torch.stack([each.to(found_inf.device) for each in overflows.values()]).max()
    return largest.reshape(1)
