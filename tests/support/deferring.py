"""Modules run with their backward plain, split and whole, and the comparison of their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.runtime.backward.deferral import Deferral, DeferredGradients

Inputs = list[Tensor]
Run = Callable[[nn.Module, Inputs], None]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def upstream(output: Tensor) -> Tensor:
    return numbers(*output.shape, seed=1).to(output.dtype)


def plainly(module: nn.Module, inputs: Inputs) -> None:
    for x in inputs:
        output = module(x)
        output.backward(upstream(output))


@contextmanager
def deferring(deferral: Deferral) -> Iterator[DeferredGradients]:
    """A backward in here defers its weight gradients into the queue that this yields."""
    with deferral.installed():
        gradients = deferral.begin_deferring()
        try:
            yield gradients
        finally:
            deferral.end_deferring()


def split(module: nn.Module, inputs: Inputs, *, fusion: bool = False) -> None:
    deferral = Deferral(module, fusion=fusion)
    for x in inputs:
        with deferral.installed():
            output = module(x)
        with deferring(deferral) as deferred:
            output.backward(upstream(output))
        deferred.run()


def split_with_fusion(module: nn.Module, inputs: Inputs) -> None:
    split(module, inputs, fusion=True)


def whole(module: nn.Module, inputs: Inputs) -> None:
    with Deferral(module).installed():
        plainly(module, inputs)


def gradients(module: nn.Module, inputs: Inputs, run: Run) -> dict[str, Tensor | None]:
    """What `run` leaves in the parameters of a copy of the module, and in the inputs."""
    module = copy.deepcopy(module)
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    run(module, inputs)
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    found.update({f"input {place}": x.grad for place, x in enumerate(inputs)})
    return found


def assert_as_plain(module: nn.Module, *inputs: Tensor, runs: tuple[Run, ...] = (split, whole)) -> None:
    wanted = gradients(module, list(inputs), plainly)
    assert any(gradient is not None for gradient in wanted.values())
    for run in runs:
        for name, gradient in gradients(module, list(inputs), run).items():
            expected = wanted[name]
            if gradient is None or expected is None:
                assert gradient is expected, name
            else:
                assert gradient.dtype is expected.dtype, name
                assert torch.equal(gradient, expected), name


@contextmanager
def without_onednn() -> Iterator[None]:
    # its kernels for bfloat16 crash on machines that announce AMX and do not grant it
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        yield


@contextmanager
def autocasting() -> Iterator[None]:
    with without_onednn(), torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def deferred_calls(module: nn.Module, x: Tensor) -> int:
    deferral = Deferral(module)
    with deferring(deferral) as deferred:
        output = module(x)
        output.backward(upstream(output))
    return len(deferred.inputs())


class Chain(nn.Sequential):
    """Runs its layers, then whatever `last` does with their output."""

    def __init__(self, *layers: nn.Module, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__(*layers)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))  # type: ignore[no-untyped-call]


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + functional.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y))
        output: Tensor = x + self.down(functional.gelu(self.up(x)))
        return output


class UsedTwice(nn.Module):
    """A weight that is used by its layer and elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.other(self.layer(x)), self.layer.weight)
