"""Promise of the split backward of DTensors: numbers, placements and hooks are those of a plain backward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from penstock.errors import PipelineError
from penstock.runtime.backward.deferral import Deferral
from penstock.runtime.pytree import flatten
from penstock.runtime.transport.message_spec import MessageSpec, spec_key
from tests.support.deferring import deferring
from tests.support.grids import small
from tests.support.models import numbers
from tests.support.pool import Pools

EVERYWHERE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)


class Summed(nn.Module):
    """A layer, and what is left to sum up of its result."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: DTensor = self.layer(x)
        return y.redistribute(placements=[EVERYWHERE if each.is_partial() else each for each in y.placements])


def spread(layer: nn.Module, mesh: DeviceMesh, **placements: Any) -> nn.Module:
    for name, placement in placements.items():
        weight = getattr(layer, name).detach()
        setattr(layer, name, nn.Parameter(distribute_tensor(weight, mesh, [placement])))
    return Summed(layer)


def linears(mesh: DeviceMesh) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for shape, of_x, of_weight, of_bias in product(
        ((6, 8), (3, 5, 8)),
        (EVERYWHERE, ROWS, COLUMNS, Shard(-1), Partial()),
        (EVERYWHERE, ROWS, COLUMNS),
        (None, ROWS),
    ):
        placed = {"weight": of_weight} if of_bias is None else {"weight": of_weight, "bias": of_bias}
        layer = spread(nn.Linear(8, 12, bias=of_bias is not None), mesh, **placed)
        x = numbers(1, *shape, dtype=torch.float32)
        if isinstance(of_x, Partial):
            given: Any = DTensor.from_local(x * (1 + mesh.get_local_rank()), mesh, [of_x])
        else:
            given = distribute_tensor(x, mesh, [of_x])
        yield f"{shape}, {of_x}, {of_weight}, {of_bias}", layer, given
        if len(shape) == 3 and of_x in (EVERYWHERE, Partial()):
            yield f"{shape} turned, {of_x}, {of_weight}, {of_bias}", layer, given.transpose(0, 1)


def embeddings(mesh: DeviceMesh) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for of_x, of_weight, padding in product((EVERYWHERE, ROWS), (EVERYWHERE, ROWS, COLUMNS), (None, 3)):
        layer = spread(nn.Embedding(11, 6, padding_idx=padding), mesh, weight=of_weight)
        words = torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(0))
        yield f"{of_x}, {of_weight}, {padding}", layer, distribute_tensor(words, mesh, [of_x])


Found = dict[str, Any]


def upstream(y: DTensor) -> DTensor:
    return distribute_tensor(numbers(2, *y.shape, dtype=y.dtype), y.device_mesh, y.placements)


def trained(model: nn.Module, x: Tensor, *, split: bool) -> tuple[Found, int]:
    """What two backwards leave: gradients and what hooks saw; and how many layer calls were deferred."""
    model, count = copy.deepcopy(model), 0
    x = x.detach().requires_grad_(x.is_floating_point())
    hooked: list[tuple[str, str]] = []
    for name, weight in model.named_parameters():
        seen: Any = weight
        seen.register_hook(lambda gradient, name=name: hooked.append((name, str(gradient.placements))))
    deferral = Deferral(model)
    for _ in range(2):
        if split:
            with deferring(deferral) as deferred:
                y = model(x)
                y.backward(upstream(y))
            count += len(deferred.inputs())
            deferred.run()
        else:
            y = model(x)
            y.backward(upstream(y))
    return {
        "y": y.detach(),
        "x": x.grad,
        **{name: weight.grad for name, weight in model.named_parameters()},
        "hooks": sorted(hooked),
    }, count


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, DTensor):
        return bool(one == other)
    looks = [(t.placements, t.shape, t.stride(), t.to_local().stride()) for t in (one, other)]
    return looks[0] == looks[1] and torch.equal(one.to_local(), other.to_local())


def compared(kind: str) -> tuple[int, list[str]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    count, problems = 0, []
    for name, model, x in {"linear": linears, "embedding": embeddings}[kind](mesh):
        try:
            wanted, _ = trained(model, x, split=False)
        except RuntimeError:  # torch cannot do it either
            continue
        found, deferred = trained(model, x, split=True)
        problems += [f"{name}: {what} differs" for what in wanted if not _same(wanted[what], found[what])]
        if deferred != 2:
            problems.append(f"{name}: {deferred} deferred calls")
        count += 1
    return count, problems


@pytest.mark.parametrize(("kind", "least"), [("linear", 40), ("embedding", 12)])
@small(lambda kind: kind == "embedding")
def test_a_layer_of_dtensors_gets_the_gradients_of_a_plain_backward(
    pools: Pools, kind: str, least: int
) -> None:
    for count, problems in pools(2).run(compared, kind):
        assert not problems
        assert count >= least


class UsedTwice(nn.Module):
    """Its weight is used by a layer and outside of it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        inner = nn.Linear(8, 8, bias=False)
        self.layer, self.other = (
            spread(inner, mesh, weight=ROWS),
            spread(nn.Linear(8, 8), mesh, weight=ROWS, bias=ROWS),
        )
        self.weight = inner.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.other(self.layer(x)).redistribute(placements=[EVERYWHERE]) @ self.weight
        return y


def jobs_of_a_weight_used_twice() -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = UsedTwice(mesh)
    x = distribute_tensor(torch.ones(3, 8), mesh, [EVERYWHERE])
    deferral = Deferral(model)
    counts = []
    for _ in range(2):
        with deferring(deferral) as deferred:
            y = model(x)
            deferral.state.exclude_shared(deferral.weights(), [y])
            y.sum().backward()
        counts.append(len(deferred.inputs()))
        deferred.run()
    return counts[0], counts[1]


def test_a_weight_that_is_used_outside_of_its_layer_too_is_left_to_autograd(pools: Pools) -> None:
    assert pools(2).run(jobs_of_a_weight_used_twice) == [(2, 1)] * 2


class Box:
    """Cannot be taken apart."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


def message_about_a_box() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    try:
        spec_key(*flatten(Box(DTensor.from_local(torch.ones(2), mesh, [ROWS]))))
    except PipelineError as error:
        return str(error)
    return ""


def test_an_object_that_contains_a_dtensor_is_rejected(pools: Pools) -> None:
    for text in pools(2).run(message_about_a_box):
        assert "a DTensor is inside of an object that cannot be flattened" in text


def specs_shared() -> list[tuple[str, str]]:
    """Values that match each other's spec, though they differ."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    part = torch.ones(2, 3)
    values = {
        "plain": part,
        "rows": DTensor.from_local(part, mesh, [ROWS]),
        "columns": DTensor.from_local(part, mesh, [COLUMNS]),
        "everywhere": DTensor.from_local(part, mesh, [EVERYWHERE]),
        "a sum": DTensor.from_local(part, mesh, [Partial()]),
        "a mean": DTensor.from_local(part, mesh, [Partial("avg")]),
        "uneven": DTensor.from_local(part, mesh, [ROWS], shape=torch.Size((3, 3)), stride=(3, 1)),
        "on another mesh": DTensor.from_local(part, other, [ROWS]),
        "wanting a gradient": DTensor.from_local(part, mesh, [ROWS]).requires_grad_(),
    }
    specs = {
        name: MessageSpec.loads(MessageSpec(spec_key(*flatten(value))).dumps())
        for name, value in values.items()
    }
    fitting = [(one, two) for one in specs for two in values if specs[one].matches(*flatten(values[two]))]
    assert {(name, name) for name in values} <= set(fitting)
    return [(one, two) for one, two in fitting if one != two]


def test_dtensors_that_differ_do_not_share_a_spec(pools: Pools) -> None:
    assert pools(2).run(specs_shared) == [[], []]
