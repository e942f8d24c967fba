"""How the backward of a layer type comes apart into the gradient of its input and those of its weights.

A layer is known by its forward function, not by its type: a subclass that is made on the fly and keeps
the forward, as sharding does, computes the same and is known too; one with a forward of its own is not.

The formulas are those autograd uses for the same layer, down to the order of the operands, so that the
gradients are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import PipelineError
from penstock.runtime.dtensors import is_dtensor

__all__ = ["LayerRule", "Tensors", "register_layer", "rule_of"]

Tensors: TypeAlias = tuple[Tensor | None, ...]
_Convolution: TypeAlias = Any
Layer = TypeVar("Layer", bound=nn.Module)
Layer_contra = TypeVar("Layer_contra", bound=nn.Module, contravariant=True)


class LayerRule(Protocol[Layer_contra]):
    """The forward and the two halves of the backward of a layer that is called with one tensor.

    All three are called without recording. `x` and the gradient have the dtype the forward computed in,
    which under autocast is not that of the weights. A weight the layer does not have is None. Where the
    module is sharded, `weight_gradients` finds the shapes of the weights, but their numbers are gone.
    """

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the layer's parameters; the gradient of the first is the one worth putting aside."""

    def forward(self, layer: Layer_contra, x: Tensor, *weights: Tensor | None) -> Tensor:
        """What the layer computes, with these weights in place of its own."""

    def input_gradient(self, layer: Layer_contra, x: Tensor, weights: Tensors, gradient: Tensor) -> Tensor:
        """The gradient of `x`, given that of the output."""

    def weight_gradients(
        self, layer: Layer_contra, x: Tensor, weights: Tensors, gradient: Tensor, wanted: tuple[bool, ...]
    ) -> Tensors:
        """The gradients of the weights that are wanted, and None for the others."""


class _Known(NamedTuple):
    """A layer type with its rule, and which of its layers the rule holds for."""

    layer_type: type[nn.Module]
    rule: LayerRule[Any]
    takes: Callable[[Any], bool]


_KNOWN: dict[Callable[..., Any], _Known] = {}


def register_layer(
    layer_type: type[Layer], rule: LayerRule[Layer], takes: Callable[[Layer], bool] = lambda _: True
) -> None:
    """Put aside the weight gradients of layers of this type too; `takes` says of which of them."""
    before = _KNOWN.get(layer_type.forward)
    if before is not None and before.layer_type is not layer_type:
        raise PipelineError(
            f"{layer_type.__name__} has the forward of {before.layer_type.__name__}, which has a rule already: "
            f"its layers go by that rule unless it defines a forward of its own"
        )
    _KNOWN[layer_type.forward] = _Known(layer_type, rule, takes)


def rule_of(module: nn.Module) -> LayerRule[Any] | None:
    """The rule this module goes by, if there is one and it holds for the module."""
    known = _KNOWN.get(type(module).forward)
    return known.rule if known is not None and known.takes(module) else None


def holds_for_dtensors(rule: LayerRule[Any]) -> bool:
    """Whether the rule's formulas give DTensors the placements that autograd does."""
    return isinstance(rule, (_LinearRule, _EmbeddingRule))


def _column_major(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.shape[0]


def _row_major(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) == matrix.shape[1]


class _LinearRule:
    weights = ("weight", "bias")

    def forward(self, layer: nn.Linear, x: Tensor, *weights: Tensor | None) -> Tensor:
        weight, bias = weights
        assert weight is not None
        if x.dim() <= 2 or x.is_contiguous():
            return functional.linear(x, weight, bias)
        # linear would take another kernel here, because no weight requires a gradient, and round differently
        y = functional.linear(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], layer.out_features)
        if bias is None:
            return y
        # in place, a DTensor could not change its placements
        return y + bias if is_dtensor(y) else y.add_(bias)

    def input_gradient(self, layer: nn.Linear, x: Tensor, weights: Tensors, gradient: Tensor) -> Tensor:
        weight = _present(weights).to(gradient.dtype)
        flat = gradient.reshape(-1, layer.out_features)
        if x.dim() == 2 and _column_major(x):
            return (weight.t() @ flat.t()).t()
        return (flat @ weight).view(x.shape)

    def weight_gradients(
        self, layer: nn.Linear, x: Tensor, weights: Tensors, gradient: Tensor, wanted: tuple[bool, ...]
    ) -> Tensors:
        flat = gradient.reshape(-1, layer.out_features)
        flat_x = x.reshape(-1, layer.in_features)
        of_weight = of_bias = None
        if wanted[0]:
            by_rows = _row_major(_present(weights))
            of_weight = flat.t() @ flat_x if by_rows else (flat_x.t() @ flat).t()
        if wanted[1]:
            of_bias = flat.sum(0)
        return of_weight, of_bias


class _ConvolutionRule:
    weights = ("weight", "bias")

    def __init__(self, layer_type: type[nn.Module], function: Callable[..., Tensor]) -> None:
        self.layer_type = layer_type
        self.function = function

    def takes(self, layer: nn.Module) -> bool:
        """Whether the layer pads with zeros, the same on both sides, and changed no part of its forward."""
        names = ("_conv_forward", "_output_padding")
        own = all(getattr(type(layer), name, None) is getattr(self.layer_type, name, None) for name in names)
        return own and layer.padding_mode == "zeros" and all(total % 2 == 0 for total in _twice_padding(layer))

    def forward(self, layer: _Convolution, x: Tensor, *weights: Tensor | None) -> Tensor:
        if layer.transposed:
            last = (layer.output_padding, layer.groups, layer.dilation)
            return self.function(x, *weights, layer.stride, layer.padding, *last)
        return self.function(x, *weights, layer.stride, layer.padding, layer.dilation, layer.groups)

    def input_gradient(self, layer: nn.Module, x: Tensor, weights: Tensors, gradient: Tensor) -> Tensor:
        of_x = self._backward(layer, x, weights, gradient, (True, False, False))[0]
        assert of_x is not None
        return of_x.view(x.shape)

    def weight_gradients(
        self, layer: nn.Module, x: Tensor, weights: Tensors, gradient: Tensor, wanted: tuple[bool, ...]
    ) -> Tensors:
        return self._backward(layer, x, weights, gradient, (False, *wanted))[1:]

    def _backward(
        self, layer: _Convolution, x: Tensor, weights: Tensors, gradient: Tensor, wanted: tuple[bool, ...]
    ) -> Tensors:
        weight = _present(weights)
        # of the weight gradients only its shape is asked, but some kernels read it all the same
        weight = weight.to(gradient.dtype) if wanted[0] else torch.empty_like(weight, dtype=gradient.dtype)
        if x.dim() < weight.dim():
            x, gradient = x.unsqueeze(0), gradient.unsqueeze(0)
        gradients: Tensors = torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            None if weights[1] is None else weights[1].shape,
            layer.stride,
            [total // 2 for total in _twice_padding(layer)],
            layer.dilation,
            layer.transposed,
            layer.output_padding,
            layer.groups,
            wanted,
        )
        return gradients


def _twice_padding(layer: _Convolution) -> list[int]:
    """Per dimension: the padding of both sides together."""
    if layer.padding == "valid":
        return [0] * len(layer.kernel_size)
    if layer.padding == "same":
        return [spread * (size - 1) for spread, size in zip(layer.dilation, layer.kernel_size)]
    return [2 * padding for padding in layer.padding]


class _EmbeddingRule:
    weights = ("weight",)

    def forward(self, layer: nn.Embedding, x: Tensor, *weights: Tensor | None) -> Tensor:
        weight = _present(weights)
        return functional.embedding(x, weight, layer.padding_idx, scale_grad_by_freq=layer.scale_grad_by_freq)

    def input_gradient(self, *_: object) -> Tensor:
        raise AssertionError("indices have no gradient")

    def weight_gradients(
        self, layer: nn.Embedding, x: Tensor, weights: Tensors, gradient: Tensor, _wanted: tuple[bool, ...]
    ) -> Tensors:
        padding = -1 if layer.padding_idx is None else layer.padding_idx
        rows = _present(weights).shape[0]
        by_frequency = layer.scale_grad_by_freq
        return (torch.ops.aten.embedding_dense_backward(gradient, x, rows, padding, by_frequency),)


def _present(weights: Tensors) -> Tensor:
    weight = weights[0]
    assert weight is not None
    return weight


register_layer(nn.Linear, _LinearRule())
register_layer(nn.Embedding, _EmbeddingRule(), lambda layer: layer.max_norm is None and not layer.sparse)
for _type, _function in (
    (nn.Conv1d, functional.conv1d),
    (nn.Conv2d, functional.conv2d),
    (nn.Conv3d, functional.conv3d),
    (nn.ConvTranspose1d, functional.conv_transpose1d),
    (nn.ConvTranspose2d, functional.conv_transpose2d),
    (nn.ConvTranspose3d, functional.conv_transpose3d),
):
    _convolution = _ConvolutionRule(_type, _function)
    register_layer(_type, _convolution, _convolution.takes)
