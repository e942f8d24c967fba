"""Tasks whose stages pass values of many kinds to each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.models import TASKS, WIDTH, Batch, Task, made, numbers, squared
from tests.support.packing_stage import Pack, PackingStage, Unpack
from tests.support.stage_values_plain import (
    changing,
    dataclasses,
    init_var,
    made_with_work,
    not_a_number,
    ones,
    open_changing,
    open_dataclasses,
    open_init_var,
    open_made_with_work,
    open_not_a_number,
    open_ones,
    open_ordered,
    open_other_layout,
    open_plain,
    open_zeros,
    ordered,
    other_layout,
    plain,
    zeros,
)
from tests.support.stage_values_tensors import (
    a_weight,
    in_place,
    input_itself,
    many_types,
    never_all,
    no_gradient,
    only_input,
    open_a_weight,
    open_in_place_first,
    open_input_itself,
    open_many_types,
    open_never_all,
    open_no_gradient,
    open_small,
    open_straight,
    open_transposed,
    open_twice,
    open_unused,
    open_views,
    product,
    small,
    straight,
    transposed,
    twice,
    unused,
    views,
)

__all__ = ["VALUES"]


def _numbered(step: int, m: int, dtype: torch.dtype) -> Batch:
    x, y = (numbers(seed + step, 2 * m, WIDTH, dtype=dtype) for seed in (600, 700))
    return Batch((x,), y, {"k": [100 * step + microbatch for microbatch in range(m)]})


def task(pack: Pack, unpack: Unpack, bits: str = "always", loss: Callable[..., Tensor] = squared) -> Task:
    return Task(made(lambda index, count: PackingStage(index, count, pack, unpack)), _numbered, loss, bits=bits)


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
