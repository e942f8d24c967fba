"""Autograd's engine without the checks of `torch.autograd.backward`, which take about as long as the engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


def run_backward(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Add the gradients of all leaves below the roots to their `.grad`, given those of the roots.

    The caller has checked the shapes of the gradients, and calls it outside of transforms of `torch.func`.
    """
    keep_graph = create_graph = False
    _engine_run_backward(
        tuple(roots),
        tuple(gradients),
        keep_graph,
        create_graph,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
