"""Values between stages that are not tensors alone: numbers, objects, dataclasses; each packed and unpacked."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.support.models import Pair
from tests.support.packing_stage import PackingStage

PLAIN = (None, 3, True, "text", 2.5, math.inf, b"bytes", 1j, 2**80, torch.float16, torch.Size((1, 2)), range(3))


def plain(_: PackingStage, _x: Tensor, h: Tensor, k: int) -> Any:
    return (h, *PLAIN, k, -k, str(k), bool(k % 2), k / 7)


def open_plain(h: Tensor, *rest: Any, k: int) -> Tensor:
    wanted = (*PLAIN, k, -k, str(k), bool(k % 2), k / 7)
    assert rest == wanted, rest
    assert [type(value) for value in rest] == [type(value) for value in wanted]
    return h


def ones(_: PackingStage, _x: Tensor, h: Tensor, k: int) -> Any:
    return h, (1, True, 1.0)[k // 100 % 3]


def open_ones(h: Tensor, one: float, *, k: int) -> Tensor:
    assert type(one) is (int, bool, float)[k // 100 % 3], one
    return h


def zeros(_: PackingStage, _x: Tensor, h: Tensor, k: int) -> Any:
    return h, (0.0, -0.0)[k // 100 % 2]


def open_zeros(h: Tensor, zero: float, *, k: int) -> Tensor:
    assert math.copysign(1, zero) == (1, -1)[k // 100 % 2], zero
    return h


def not_a_number(_: PackingStage, _x: Tensor, h: Tensor, _k: int) -> Any:
    return h, math.nan


def open_not_a_number(h: Tensor, nan: float, *, k: int) -> Tensor:
    assert math.isnan(nan), k
    return h


class Notes:
    """Something that is no tensor and changes."""

    def __init__(self) -> None:
        self.seen: list[int] = []


def changing(stage: PackingStage, _x: Tensor, h: Tensor, k: int) -> Any:
    if not isinstance(stage.kept, Notes):
        stage.kept = Notes()
    stage.kept.seen.append(k)
    return h, stage.kept


def open_changing(h: Tensor, notes: Notes, *, k: int) -> Tensor:
    assert notes.seen[-1] == k, (notes.seen, k)
    return h


def other_layout(_: PackingStage, _x: Tensor, h: Tensor, k: int) -> Any:
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


def dataclasses(_: PackingStage, _x: Tensor, h: Tensor, k: int) -> Any:
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


def init_var(_: PackingStage, _x: Tensor, h: Tensor, _k: int) -> Any:
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


def made_with_work(_: PackingStage, _x: Tensor, h: Tensor, _k: int) -> Any:
    return Doubled(h)


def open_made_with_work(given: Doubled, *, k: int) -> Tensor:
    assert k >= 0
    return given.h


def ordered(_: PackingStage, _x: Tensor, h: Tensor, k: int) -> Any:
    return OrderedDict(h=h, k=k)


def open_ordered(given: OrderedDict[str, Any], *, k: int) -> Tensor:
    assert given["k"] == k
    result: Tensor = given["h"]
    return result
