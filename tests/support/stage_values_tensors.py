"""Tensors between stages, of many dtypes, shapes, strides and uses; each packed and unpacked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.models import WIDTH
from tests.support.packing_stage import PackingStage


def many_types(_: PackingStage, _x: Tensor, h: Tensor, k: int) -> Any:
    return {
        "complex": torch.complex(h, h * 2),
        "bfloat16": h.to(torch.bfloat16),
        "float64": h.to(torch.float64),
        "int64": torch.full((3,), k),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "bool": h > 0,
        "conjugate": torch.complex(h, h).conj(),
    }


def open_many_types(given: dict[str, Tensor], *, k: int) -> Tensor:
    assert given["int64"].tolist() == [k] * 3
    assert given["uint8"].tolist() == list(range(5))
    assert [given[name].dtype for name in ("complex", "bfloat16", "bool")] == [
        torch.complex64 if given["complex"].real.dtype == torch.float32 else torch.complex128,
        torch.bfloat16,
        torch.bool,
    ]
    dtype = given["complex"].real.dtype
    added = given["complex"].imag + given["bfloat16"].to(dtype) + given["float64"].to(dtype)
    return (added + given["conjugate"].imag) * given["bool"]


def small(_: PackingStage, _x: Tensor, h: Tensor, k: int) -> Any:
    return [h, h.sum(), h[:0], torch.empty(0, 3, dtype=torch.int64), torch.tensor(k), h[:, :1]]


def open_small(given: list[Tensor], *, k: int) -> Tensor:
    h, total, nothing, none, number, column = given
    assert (list(none.shape), number.shape, number.item(), nothing.shape[0]) == ([0, 3], (), k, 0)
    return h + total / 9 + nothing.sum() + column


def transposed(_: PackingStage, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h.t()


def open_transposed(given: Tensor, *, k: int) -> Tensor:
    assert given.shape[0] == WIDTH, k
    return given.t()


def views(_: PackingStage, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h[:, ::2], h[:, 1::2], h.sum(1, keepdim=True).expand(-1, WIDTH), h.view(-1, 2, WIDTH // 2)


def open_views(even: Tensor, odd: Tensor, spread: Tensor, parted: Tensor, *, k: int) -> Tensor:
    assert k >= 0
    return torch.stack((even, odd), 2).flatten(1) + spread / 9 + parted.flatten(1).flip(1)


def in_place(_: PackingStage, _x: Tensor, h: Tensor, _k: int) -> Any:
    return (h * 3).mul_(2).add_(1)


def input_itself(_: PackingStage, x: Tensor, h: Tensor, _k: int) -> Any:
    return x, h


def open_input_itself(x: Tensor, h: Tensor, *, k: int) -> Tensor:
    assert k >= 0
    return x / 2 + h


def only_input(_: PackingStage, x: Tensor, _h: Tensor, _k: int) -> Any:
    return x


def twice(_: PackingStage, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h, [h, {"again": h}]


def open_twice(h: Tensor, more: list[Any], *, k: int) -> Tensor:
    assert k >= 0
    result: Tensor = h + 2 * more[0] - more[1]["again"] / 2
    return result


def unused(_: PackingStage, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h.exp(), h, h * 2


def open_unused(_never: Tensor, h: Tensor, sometimes: Tensor, *, k: int) -> Tensor:
    return h + sometimes if k % 2 else h


def never_all(_: PackingStage, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h


def open_never_all(h: Tensor, *, k: int) -> Tensor:
    return torch.ones_like(h) if k % 2 else h


def no_gradient(_: PackingStage, _x: Tensor, h: Tensor, k: int) -> Any:
    return h.detach(), h, torch.arange(k, k + 2), h.detach() * 3, h * 3


def open_no_gradient(kept: Tensor, h: Tensor, count: Tensor, three: Tensor, more: Tensor, *, k: int) -> Tensor:
    assert [value.requires_grad for value in (kept, count, three)] == [False] * 3
    assert count.tolist() == [k, k + 1]
    return h * kept + more * three


def a_weight(stage: PackingStage, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h, stage.layer.weight


def open_a_weight(h: Tensor, weight: Tensor, *, k: int) -> Tensor:
    assert k >= 0
    return h @ weight


def straight(_: PackingStage, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h


def product(_: PackingStage, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h * 2


def open_in_place_first(h: Tensor, *, k: int) -> Tensor:
    assert k >= 0
    return h.relu_()


def open_straight(h: Tensor, *, k: int) -> Tensor:
    assert k >= 0
    return h
