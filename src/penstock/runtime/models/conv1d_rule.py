"""The layer rule of `Conv1D`, the linear layer of GPT-2 in transformers."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.backward.layer_rules import Tensors, register_layer

__all__ = ["register_conv1d"]


class _Conv1DRule:
    """GPT-2's linear layer, whose weight is transposed."""

    weights = ("weight", "bias")

    def forward(self, _layer: nn.Module, x: Tensor, *weights: Tensor | None) -> Tensor:
        weight, bias = weights
        assert weight is not None
        assert bias is not None
        y = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
        return y.view(*x.shape[:-1], weight.shape[1])

    def input_gradient(self, _layer: nn.Module, x: Tensor, weights: Tensors, gradient: Tensor) -> Tensor:
        weight = weights[0]
        assert weight is not None
        flat = gradient.reshape(-1, weight.shape[1])
        return (flat @ weight.to(gradient.dtype).t()).view(x.shape)

    def weight_gradients(
        self, _layer: nn.Module, x: Tensor, _weights: Tensors, gradient: Tensor, wanted: tuple[bool, ...]
    ) -> Tensors:
        flat = gradient.reshape(-1, gradient.shape[-1])
        weight_gradient = x.view(-1, x.shape[-1]).t() @ flat if wanted[0] else None
        return weight_gradient, flat.sum(0) if wanted[1] else None

    def add_weight_gradients(self, _layer: nn.Module, x: Tensor, gradient: Tensor, totals: Tensors) -> None:
        flat = gradient.reshape(-1, gradient.shape[-1])
        if totals[0] is not None:
            totals[0].addmm_(x.view(-1, x.shape[-1]).t(), flat)
        if totals[1] is not None:
            totals[1].add_(flat.sum(0))


def register_conv1d() -> None:
    """Register the rule, if transformers is loaded."""
    utilities: Any = sys.modules.get("transformers.pytorch_utils")
    if utilities is not None:
        register_layer(utilities.Conv1D, _Conv1DRule())
