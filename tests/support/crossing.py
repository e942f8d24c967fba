"""Kinds of values that stages hand on, each with what the next stage makes of it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import TASKS, WIDTH, Batch, Pair, Task, made, numbers, squared

Pack = Callable[["Through", Tensor, Tensor, int], Any]
Unpack = Callable[..., Tensor]


class Through(nn.Module):
    """A layer that hands on what `pack` makes of it, for `unpack` of the next stage.

    `k` is another number for every microbatch and step: 100 times the step and the microbatch.
    """

    def __init__(self, index: int, count: int, pack: Pack, unpack: Unpack) -> None:
        super().__init__()
        self.index, self.last = index, index == count - 1
        self.pack, self.unpack = pack, unpack
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.kept: Any = []

    def forward(self, *given: Any, k: int) -> Any:
        x = given[0] if self.index == 0 else self.unpack(*given, k=k)
        hidden = torch.tanh(self.layer(x))
        return hidden if self.last else self.pack(self, x, hidden, k)


def _numbered(step: int, m: int, dtype: torch.dtype) -> Batch:
    x, y = (numbers(seed + step, 2 * m, WIDTH, dtype=dtype) for seed in (600, 700))
    return Batch((x,), y, {"k": [100 * step + microbatch for microbatch in range(m)]})


def task(pack: Pack, unpack: Unpack, bits: str = "always", loss: Callable[..., Tensor] = squared) -> Task:
    return Task(made(lambda index, count: Through(index, count, pack, unpack)), _numbered, loss, bits=bits)


PLAIN = (None, 3, True, "text", 2.5, math.inf, b"bytes", 1j, 2**80, torch.float16, torch.Size((1, 2)), range(3))


def plain(_: Through, _x: Tensor, h: Tensor, k: int) -> Any:
    return (h, *PLAIN, k, -k, str(k), bool(k % 2), k / 7)


def open_plain(h: Tensor, *rest: Any, k: int) -> Tensor:
    wanted = (*PLAIN, k, -k, str(k), bool(k % 2), k / 7)
    assert rest == wanted, rest
    assert [type(value) for value in rest] == [type(value) for value in wanted]
    return h


def ones(_: Through, _x: Tensor, h: Tensor, k: int) -> Any:
    return h, (1, True, 1.0)[k // 100 % 3]


def open_ones(h: Tensor, one: float, *, k: int) -> Tensor:
    assert type(one) is (int, bool, float)[k // 100 % 3], one
    return h


def zeros(_: Through, _x: Tensor, h: Tensor, k: int) -> Any:
    return h, (0.0, -0.0)[k // 100 % 2]


def open_zeros(h: Tensor, zero: float, *, k: int) -> Tensor:
    assert math.copysign(1, zero) == (1, -1)[k // 100 % 2], zero
    return h


def not_a_number(_: Through, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h, math.nan


def open_not_a_number(h: Tensor, nan: float, *, k: int) -> Tensor:
    assert math.isnan(nan), k
    return h


class Notes:
    """Something that is no tensor and changes."""

    def __init__(self) -> None:
        self.seen: list[int] = []


def changing(stage: Through, _x: Tensor, h: Tensor, k: int) -> Any:
    if not isinstance(stage.kept, Notes):
        stage.kept = Notes()
    stage.kept.seen.append(k)
    return h, stage.kept


def open_changing(h: Tensor, notes: Notes, *, k: int) -> Tensor:
    assert notes.seen[-1] == k, (notes.seen, k)
    return h


def many_types(_: Through, _x: Tensor, h: Tensor, k: int) -> Any:
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


def small(_: Through, _x: Tensor, h: Tensor, k: int) -> Any:
    return [h, h.sum(), h[:0], torch.empty(0, 3, dtype=torch.int64), torch.tensor(k), h[:, :1]]


def open_small(given: list[Tensor], *, k: int) -> Tensor:
    h, total, nothing, none, number, column = given
    assert (list(none.shape), number.shape, number.item(), nothing.shape[0]) == ([0, 3], (), k, 0)
    return h + total / 9 + nothing.sum() + column


def transposed(_: Through, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h.t()


def open_transposed(given: Tensor, *, k: int) -> Tensor:
    assert given.shape[0] == WIDTH, k
    return given.t()


def views(_: Through, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h[:, ::2], h[:, 1::2], h.sum(1, keepdim=True).expand(-1, WIDTH), h.view(-1, 2, WIDTH // 2)


def open_views(even: Tensor, odd: Tensor, spread: Tensor, parted: Tensor, *, k: int) -> Tensor:
    assert k >= 0
    return torch.stack((even, odd), 2).flatten(1) + spread / 9 + parted.flatten(1).flip(1)


def in_place(_: Through, _x: Tensor, h: Tensor, _k: int) -> Any:
    return (h * 3).mul_(2).add_(1)


def input_itself(_: Through, x: Tensor, h: Tensor, _k: int) -> Any:
    return x, h


def open_input_itself(x: Tensor, h: Tensor, *, k: int) -> Tensor:
    assert k >= 0
    return x / 2 + h


def only_input(_: Through, x: Tensor, _h: Tensor, _k: int) -> Any:
    return x


def twice(_: Through, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h, [h, {"again": h}]


def open_twice(h: Tensor, more: list[Any], *, k: int) -> Tensor:
    assert k >= 0
    result: Tensor = h + 2 * more[0] - more[1]["again"] / 2
    return result


def unused(_: Through, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h.exp(), h, h * 2


def open_unused(_never: Tensor, h: Tensor, sometimes: Tensor, *, k: int) -> Tensor:
    return h + sometimes if k % 2 else h


def never_all(_: Through, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h


def open_never_all(h: Tensor, *, k: int) -> Tensor:
    return torch.ones_like(h) if k % 2 else h


def no_gradient(_: Through, _x: Tensor, h: Tensor, k: int) -> Any:
    return h.detach(), h, torch.arange(k, k + 2), h.detach() * 3, h * 3


def open_no_gradient(kept: Tensor, h: Tensor, count: Tensor, three: Tensor, more: Tensor, *, k: int) -> Tensor:
    assert [value.requires_grad for value in (kept, count, three)] == [False] * 3
    assert count.tolist() == [k, k + 1]
    return h * kept + more * three


def a_weight(stage: Through, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h, stage.layer.weight


def open_a_weight(h: Tensor, weight: Tensor, *, k: int) -> Tensor:
    assert k >= 0
    return h @ weight


def other_layout(_: Through, _x: Tensor, h: Tensor, k: int) -> Any:
    """Another kind of value in each step, and for odd microbatches."""
    return (h, (h,), {"h": h}, [h, None], h.t())[(k // 100 + k % 2) % 5]


def open_other_layout(*given: Any, k: int) -> Tensor:
    turn = (k // 100 + k % 2) % 5
    value = given[0]
    result: Tensor = value["h"] if turn == 2 else value[0] if turn == 3 else value.t() if turn == 4 else value
    return result


@dataclass(frozen=True)
class Frozen:
    h: Tensor
    name: str
    later: int = field(init=False, default=0)
    more: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "later", 1)


def dataclasses(_: Through, _x: Tensor, h: Tensor, k: int) -> Any:
    value = Frozen(h, "name", (Pair(h * 2, k), None))
    object.__setattr__(value, "later", k)
    return value


def open_dataclasses(given: Frozen, *, k: int) -> Tensor:
    assert isinstance(given, Frozen)
    assert (given.name, given.later, given.more[0].rest, given.more[1]) == ("name", k, k, None)
    assert isinstance(given.more[0], Pair)
    return given.h + given.more[0].hidden


@dataclass
class FromScale:
    h: Tensor
    scale: InitVar[float]

    def __post_init__(self, scale: float) -> None:
        self.h = self.h * scale


def init_var(_: Through, _x: Tensor, h: Tensor, _k: int) -> Any:
    return FromScale(h, 3.0)


def open_init_var(given: FromScale, *, k: int) -> Tensor:
    assert k >= 0
    return given.h


@dataclass
class Doubled:
    """What it is made from is not what it holds."""

    h: Tensor

    def __post_init__(self) -> None:
        self.h = self.h * 2


def made_with_work(_: Through, _x: Tensor, h: Tensor, _k: int) -> Any:
    return Doubled(h)


def open_made_with_work(given: Doubled, *, k: int) -> Tensor:
    assert k >= 0
    return given.h


def ordered(_: Through, _x: Tensor, h: Tensor, k: int) -> Any:
    return OrderedDict(h=h, k=k)


def open_ordered(given: OrderedDict[str, Any], *, k: int) -> Tensor:
    assert given["k"] == k
    result: Tensor = given["h"]
    return result


def straight(_: Through, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h


def product(_: Through, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h * 2


def open_in_place_first(h: Tensor, *, k: int) -> Tensor:
    assert k >= 0
    return h.relu_()


def open_straight(h: Tensor, *, k: int) -> Tensor:
    assert k >= 0
    return h


def summed(output: Tensor, _target: Tensor) -> Tensor:
    return output.sum()


def summed_transposed(output: Tensor, _target: Tensor) -> Tensor:
    return output.t().sum()


VALUES: dict[str, Task] = {
    "values that are no tensors": task(plain, open_plain),
    "equal values of other types": task(ones, open_ones),
    "zeros of either sign": task(zeros, open_zeros),
    "a number that is none": task(not_a_number, open_not_a_number),
    "an object that changes": task(changing, open_changing),
    "tensors of many types": task(many_types, open_many_types, "never"),
    "tensors without dimensions or numbers": task(small, open_small, "never"),
    "a transposed tensor": task(transposed, open_transposed, "never"),
    "a transposed tensor with its strides": task(transposed, open_transposed),
    "views": task(views, open_views, "never"),
    "what was changed in place": task(in_place, open_straight),
    "the input itself": task(input_itself, open_input_itself),
    "nothing but the input itself": task(only_input, open_straight),
    "one tensor many times": task(twice, open_twice, "never"),
    "tensors that are not used, or sometimes": task(unused, open_unused),
    "an output that is not used by some microbatches": task(never_all, open_never_all),
    "tensors without gradients among others": task(no_gradient, open_no_gradient, "never"),
    "a weight": task(a_weight, open_a_weight, "fused"),
    "a layout that changes": task(other_layout, open_other_layout),
    "dataclasses and named tuples": task(dataclasses, open_dataclasses),
    "a dataclass made with a value it does not keep": task(init_var, open_init_var),
    "a dataclass that works on what it is made from": task(made_with_work, open_made_with_work),
    "an ordered dict": task(ordered, open_ordered),
    "a plain sum as the loss": task(straight, open_straight, loss=summed),
    "a transposed sum as the loss": task(transposed, open_transposed, "never", loss=summed_transposed),
    "an input that is changed in place": task(product, open_in_place_first),
}
TASKS.update(VALUES)
