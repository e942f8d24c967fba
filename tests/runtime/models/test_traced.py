"""Promises of `split` for traced modules: values may skip stages, and training is that of one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from torch.nn.functional import mse_loss

from penstock import PartitionError, PipelineError, StageGraph, build
from penstock.runtime import Pipeline, split
from tests.support.grids import small
from tests.support.pool import Pools
from tests.support.traced_models import UNet, Wired, batch, traced, train_and_compare, train_unet

CUTS = ["blocks.1", "blocks.2", "blocks.3"]


@pytest.mark.parametrize("how", ["fx", "export"])
def test_stages_hold_the_model_and_know_their_graph(how: str) -> None:
    x, mask, _ = batch()
    model = UNet().double()
    module = traced(model, how, x, mask)
    stages = split(module, at=CUTS)
    graph: Any = stages[0].stage_graph
    assert graph == StageGraph(4, ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3)))
    assert all(stage.stage_graph is graph for stage in stages.values())
    names = [name for stage in stages.values() for name in stage.state_dict()]
    assert sorted(set(names)) == sorted(module.state_dict())
    assert stages[3].tied == ({0: "scale", 3: "scale"},)
    assert stages[1].get_parameter("blocks.1.up.weight") is module.get_parameter("blocks.1.up.weight")
    values: dict[int, Any] = {0: stages[0](x, mask)}
    for stage in (1, 2, 3):
        values[stage] = stages[stage](*(values[source] for source in graph.inputs(stage)))
    assert all(torch.equal(a, b) for a, b in zip(values[3], model(x, mask)))


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "interleaved-1f1b", "zbv"])
@small(lambda family: family != "zbv")
def test_ranks_train_as_one_process(pools: Pools, family: str) -> None:
    """By name where a family has two stages per rank, and with its order over the graph."""
    schedule = build("1f1b" if family == "zb-h1" else family, ranks=2, microbatches=4)
    if schedule.num_stages == 2:
        graph = StageGraph(4, ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3)))
        schedule = build(family, ranks=2, microbatches=4, graph=graph)
    how = "export" if family == "zbv" else "fx"
    given = family if family == "interleaved-1f1b" else schedule
    assert pools(2).run(train_unet, given, how) == [[], []]


@pytest.mark.parametrize("how", ["fx", "export"])
@small(lambda how: how == "fx")
def test_random_graphs_train_as_one_process(how: str) -> None:
    rng = random.Random(0)
    x, _, y = batch()
    for trial in range(15):
        torch.manual_seed(trial)
        whole = Wired(rng).double()
        count = len(whole.layers)
        at = sorted(rng.sample(range(1, count), rng.randint(1, count - 1)))
        stages = split(traced(whole, how, x[:4]), at=[f"layers.{layer}" for layer in at])
        family = rng.choice(("1f1b", "zb-h1", "gpipe"))
        schedule = build(family, ranks=1, microbatches=3, graph=stages[0].stage_graph)  # type: ignore[arg-type]
        wanted = deepcopy(whole)
        for a, b in zip(x.chunk(3), y.chunk(3)):
            (mse_loss(wanted(a), b) / 3).backward()  # type: ignore[no-untyped-call]
        assert train_and_compare(stages, schedule, wanted, 3, (x,), y, mse_loss) == []


# --- pipelines --------------------------------------------------------------------------------------


def test_a_schedule_over_another_graph_is_refused() -> None:
    stages = split(symbolic_trace(UNet()), at=CUTS)
    chain = build("interleaved-1f1b", ranks=1, microbatches=2, stages_per_rank=4)
    with pytest.raises(PipelineError, match=r"the stages feed each other as 0 -> 1, 0 -> 2, .* another graph"):
        Pipeline(stages, chain, loss=mse_loss)


# --- errors -----------------------------------------------------------------------------------------


class Changes(nn.Module):
    """A model that changes a value in place after `b`, and uses it after `c`."""

    def __init__(self, change: Callable[[Changes, Tensor], object]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("count", torch.zeros(4))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        value = self.a(x)
        other = self.b(value) + self.count
        self.change(self, value)
        result: Tensor = self.c(other) + value
        return result


CHANGES: dict[str, Callable[[Any, Tensor], object]] = {
    "a is changed in place by add_": lambda _, value: value.add_(1),
    "a is changed in place by relu": lambda model, value: model.relu(value),
    "a is changed in place by mul_": lambda _, value: value.view(-1)[2:].mul_(2),
    "count is changed in place by copy_": lambda model, value: model.count.copy_(model.d(value).mean(0)),
}


@pytest.mark.parametrize("expected", CHANGES)
def test_values_changed_in_one_stage_and_used_in_another_are_refused(expected: str) -> None:
    module = symbolic_trace(Changes(CHANGES[expected]))
    with pytest.raises(PartitionError, match=expected):
        split(module, at=["b", "d" if "count" in expected else "c"])


def test_values_changed_where_they_are_used_are_right() -> None:
    """In stage 1 only; the updates of a buffer are where its values are computed."""
    for expected in list(CHANGES)[2:]:
        model = Changes(CHANGES[expected])
        stages = split(symbolic_trace(deepcopy(model)), at=["b"])
        x = torch.randn(3, 4)
        assert torch.equal(stages[1](stages[0](x)), model(x)), expected
        assert torch.equal(stages[1].get_buffer("count"), model.get_buffer("count"))


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (["blocks.9"], "there is no module 'blocks.9' in the model: did you mean 'blocks.3'"),
        (["blocks.0"], "'blocks.0' is the very first module"),
        (["blocks.2", "blocks.1"], "names must be in the order of the model: 'blocks.1', 'blocks.2'"),
        (["blocks.1", "blocks.1.up"], "'blocks.1.up' begins where 'blocks.1' begins"),
    ],
)
def test_names_at_which_no_stage_can_begin_are_refused(at: list[str], expected: str) -> None:
    with pytest.raises(PartitionError, match=expected):
        split(symbolic_trace(UNet()), at=at)


def _hooked() -> GraphModule:
    module = symbolic_trace(UNet())
    module.register_forward_hook(lambda *_: None)
    return module


def _with_unused_weight() -> GraphModule:
    module = symbolic_trace(UNet())
    module.register_parameter("spare", nn.Parameter(torch.ones(1)))
    return module


class Nested(nn.Module):
    """Takes and returns dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: dict[str, Tensor] | Tensor) -> dict[str, Tensor]:
        return {"y": self.b(self.a(x["x"] if isinstance(x, dict) else x))}


@pytest.mark.parametrize(
    ("module", "at", "expected"),
    [
        (_hooked, ["blocks.1"], "the traced module has hooks"),
        (_with_unused_weight, ["blocks.1"], "does not use spare, so"),
        (lambda: traced(Nested(), "export", {"x": torch.ones(2, 4)}), ["b"], "takes keyword arguments"),
        (lambda: traced(Nested(), "export", torch.ones(2, 4)), ["b"], "returns nested values"),
    ],
)
def test_modules_that_would_lose_something_are_refused(
    module: Callable[[], GraphModule], at: list[str], expected: str
) -> None:
    with pytest.raises(PartitionError, match=expected):
        split(module(), at=at)


def test_a_layout_of_a_traced_module_is_refused() -> None:
    with pytest.raises(PartitionError, match="a traced module has no layout of layers"):
        split(symbolic_trace(UNet()), layout="Et*2|t*2L")
