"""The rules that split the backward of a layer type into its input gradient and its weight gradients.

The registry finds a layer by its forward function, not by its type. A subclass that keeps the forward, as
sharding makes, computes the same and has the same rule. A subclass with its own forward has none.

The formulas are those that autograd uses for the same layer, down to the order of the operands, so the
gradients are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import PipelineError
from penstock.runtime.dtensors import is_dtensor
from penstock.runtime.torch_internals.modules import has_own_convolution

Tensors: TypeAlias = tuple[Tensor | None, ...]
Layer = TypeVar("Layer", bound=nn.Module)
Layer_contra = TypeVar("Layer_contra", bound=nn.Module, contravariant=True)


class LayerRule(Protocol[Layer_contra]):
    """The forward and the two halves of the backward of a layer that is called with one tensor.

    All three run without gradient recording. `x` and the gradient have the dtype that the forward computed in,
    which under autocast is not that of the weights. A weight that the layer does not have is None. In a sharded
    module, `weight_gradients` sees the shapes of the weights, but their values are already released.

    For gradient accumulation fusion, a rule may also have `add_weight_gradients(layer, x, gradient, totals)`,
    which adds the gradients to the totals: None for unwanted weights, and of the dtype of the gradient.
    """

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the layer's parameters; the gradient of the first is the one worth deferring."""

    def forward(self, layer: Layer_contra, x: Tensor, *weights: Tensor | None) -> Tensor:
        """Return the output of the layer with these weights in place of its own."""

    def input_gradient(self, layer: Layer_contra, x: Tensor, weights: Tensors, gradient: Tensor) -> Tensor:
        """Return the gradient of `x`, given that of the output."""

    def weight_gradients(
        self, layer: Layer_contra, x: Tensor, weights: Tensors, gradient: Tensor, wanted: tuple[bool, ...]
    ) -> Tensors:
        """Return the gradients of the wanted weights, and None for the others."""


_REGISTRY: dict[Callable[..., Any], tuple[type[nn.Module], LayerRule[Any], Callable[[Any], bool]]] = {}
"""By forward function: a layer type, its rule, and which of its layers the rule applies to."""


def register_layer(
    layer_type: type[Layer], rule: LayerRule[Layer], takes: Callable[[Layer], bool] = lambda _: True
) -> None:
    """Defer the weight gradients of layers of this type; `takes` selects those that the rule applies to."""
    before, *_ = _REGISTRY.get(layer_type.forward, (layer_type,))
    if before is not layer_type:
        raise PipelineError(
            f"{layer_type.__name__} inherits the forward of {before.__name__}, which already "
            f"has a rule; that rule applies to its layers unless it defines its own forward"
        )
    _REGISTRY[layer_type.forward] = layer_type, rule, takes


def rule_of(module: nn.Module) -> LayerRule[Any] | None:
    """Return the rule of this module, if there is one and it applies."""
    _, rule, applies = _REGISTRY.get(type(module).forward, (None, None, bool))
    return rule if rule is not None and applies(module) else None


def supports_dtensors(rule: LayerRule[Any]) -> bool:
    """Return whether the rule's formulas return DTensors with the same placements as autograd."""
    return isinstance(rule, (_LinearRule, _EmbeddingRule))


class _LinearRule:
    weights = ("weight", "bias")

    def forward(self, layer: nn.Linear, x: Tensor, *weights: Tensor | None) -> Tensor:
        weight, bias = weights
        assert weight is not None
        if x.dim() <= 2 or x.is_contiguous():
            return functional.linear(x, weight, bias)
        # functional.linear uses another kernel when no weight requires a gradient, which rounds differently
        y = functional.linear(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], layer.out_features)
        if bias is None:
            return y
        # a DTensor cannot change its placements in place
        return y + bias if is_dtensor(y) else y.add_(bias)

    def input_gradient(self, layer: nn.Linear, x: Tensor, weights: Tensors, gradient: Tensor) -> Tensor:
        weight = _first(weights)
        if weight.dtype != gradient.dtype:
            weight = weight.to(gradient.dtype)
        if x.dim() > 2 and type(gradient) is Tensor and gradient.is_contiguous():
            return gradient @ weight  # the same product; fewer views
        flat = gradient.reshape(-1, layer.out_features)
        if x.dim() == 2 and x.stride() == (1, x.shape[0]):  # column-major
            return (weight.t() @ flat.t()).t()
        return (flat @ weight).view(x.shape)

    def weight_gradients(
        self, layer: nn.Linear, x: Tensor, weights: Tensors, gradient: Tensor, wanted: tuple[bool, ...]
    ) -> Tensors:
        flat = gradient.reshape(-1, layer.out_features)
        flat_x = x.reshape(-1, layer.in_features)
        weight_gradient = bias_gradient = None
        if wanted[0]:
            weight = _first(weights)
            row_major = weight.stride() == (weight.shape[1], 1)
            weight_gradient = flat.t() @ flat_x if row_major else (flat_x.t() @ flat).t()
        if wanted[1]:
            bias_gradient = flat.sum(0)
        return weight_gradient, bias_gradient

    def add_weight_gradients(self, layer: nn.Linear, x: Tensor, gradient: Tensor, totals: Tensors) -> None:
        flat = gradient.reshape(-1, layer.out_features)
        if totals[0] is not None:
            totals[0].addmm_(flat.t(), x.reshape(-1, layer.in_features))
        if totals[1] is not None:
            totals[1].add_(flat.sum(0))


class _ConvolutionRule:
    weights = ("weight", "bias")

    def __init__(self, layer_type: type[nn.Module], function: Callable[..., Tensor]) -> None:
        self.layer_type = layer_type
        self.function = function

    def applies(self, layer: nn.Module) -> bool:
        """Whether the layer pads with zeros, symmetrically, and no subclass overrides a part of the forward."""
        return (
            not has_own_convolution(layer, self.layer_type)
            and layer.padding_mode == "zeros"
            and all(total % 2 == 0 for total in _twice_padding(layer))
        )

    def forward(self, layer: Any, x: Tensor, *weights: Tensor | None) -> Tensor:
        if layer.transposed:
            last = (layer.output_padding, layer.groups, layer.dilation)
            return self.function(x, *weights, layer.stride, layer.padding, *last)
        return self.function(x, *weights, layer.stride, layer.padding, layer.dilation, layer.groups)

    def input_gradient(self, layer: nn.Module, x: Tensor, weights: Tensors, gradient: Tensor) -> Tensor:
        input_gradient = self._backward(layer, x, weights, gradient, (True, False, False))[0]
        assert input_gradient is not None
        return input_gradient.view(x.shape)

    def weight_gradients(
        self, layer: nn.Module, x: Tensor, weights: Tensors, gradient: Tensor, wanted: tuple[bool, ...]
    ) -> Tensors:
        return self._backward(layer, x, weights, gradient, (False, *wanted))[1:]

    def _backward(
        self, layer: Any, x: Tensor, weights: Tensors, gradient: Tensor, wanted: tuple[bool, ...]
    ) -> Tensors:
        weight = _first(weights)
        # weight gradients depend only on the shape of the weight, but some kernels also read its values
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


def _twice_padding(layer: Any) -> list[int]:
    """The total padding of both sides, per dimension."""
    if layer.padding == "valid":
        return [0] * len(layer.kernel_size)
    if layer.padding == "same":
        return [spread * (size - 1) for spread, size in zip(layer.dilation, layer.kernel_size)]
    return [2 * padding for padding in layer.padding]


class _EmbeddingRule:
    weights = ("weight",)

    def forward(self, layer: nn.Embedding, x: Tensor, *weights: Tensor | None) -> Tensor:
        weight = _first(weights)
        return functional.embedding(x, weight, layer.padding_idx, scale_grad_by_freq=layer.scale_grad_by_freq)

    def input_gradient(self, *_: object) -> Tensor:
        raise AssertionError("indices have no gradient")

    def weight_gradients(
        self, layer: nn.Embedding, x: Tensor, weights: Tensors, gradient: Tensor, _wanted: tuple[bool, ...]
    ) -> Tensors:
        padding = -1 if layer.padding_idx is None else layer.padding_idx
        vocabulary = _first(weights).shape[0]
        by_frequency = layer.scale_grad_by_freq
        return (torch.ops.aten.embedding_dense_backward(gradient, x, vocabulary, padding, by_frequency),)


def _first(weights: Tensors) -> Tensor:
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
    register_layer(_type, _convolution, _convolution.applies)
