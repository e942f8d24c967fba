"""Promise: calls, losses, failures and profiles of a pipeline over a stage graph name its stages and edges."""

from __future__ import annotations

import re
import time
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import StageGraph, build, lower
from penstock.errors import BatchError, PenstockError, PipelineError
from penstock.runtime import Pipeline
from tests.support.pool import Pools
from tests.support.reference import TIMEOUT
from tests.support.slowness import slowness
from tests.support.stage_graphs import GRAPHS, WIDTH, GraphStage, stages_of, train_graph_plainly

TWO_ENCODERS, TWO_HEADS = GRAPHS["two encoders"], GRAPHS["second head"]
X, Z, Y = torch.randn(3, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def pipeline_over(graph: StageGraph, ranks: int = 1, **options: Any) -> Pipeline:
    given: dict[str, Any] = {"loss": mse_loss, "timeout": TIMEOUT, **options}
    stages = given.pop("stages", None) or stages_of(graph)
    return Pipeline(stages, build("1f1b", graph=graph, ranks=ranks, microbatches=3), **given)


# --- sources ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [(X,), (X, Z, Z), ()])
def test_every_source_needs_one_argument(args: tuple[Tensor, ...]) -> None:
    with closing(pipeline_over(TWO_ENCODERS)) as pipeline, pytest.raises(BatchError) as error:
        pipeline.step(*args, target=Y)
    assert f"{len(args)} positional arguments are given, but there must be 2, one for each" in str(error.value)
    assert "stage 0, 1, in this order" in str(error.value)


def test_a_tuple_is_several_arguments_of_a_source() -> None:
    stages = stages_of(TWO_ENCODERS)
    stages[1] = GraphStage(2, 2).double()
    with closing(pipeline_over(TWO_ENCODERS, stages=stages)) as pipeline:
        as_tensors = pipeline.step(X, (Z.clone(), X.clone()), target=Y)
        as_microbatches = pipeline.step(X, list(zip(Z.chunk(3), X.clone().chunk(3))), target=Y)
    assert as_tensors.loss == as_microbatches.loss


# --- sinks -----------------------------------------------------------------------------------------


def test_each_sink_can_have_its_own_loss() -> None:
    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return 0.5 * mse_loss(output, target)

    with closing(pipeline_over(TWO_HEADS, loss={3: weighted, 4: weighted})) as pipeline:
        halved = pipeline.step(X, target=Y)
        plain = train_graph_plainly(TWO_HEADS, stages_of(TWO_HEADS), [X], Y)
    assert halved.loss == pytest.approx(plain / 2, rel=1e-12)
    assert halved.losses is not None
    assert halved.losses.mean().item() == pytest.approx(plain / 2, rel=1e-12)


@pytest.mark.parametrize("loss", [{3: mse_loss}, {3: mse_loss, 2: mse_loss}, {}])
def test_losses_for_other_stages_than_the_sinks_are_rejected(loss: dict[int, Any]) -> None:
    with pytest.raises(PipelineError, match="one for each stage that feeds no other: stage 3, 4"):
        pipeline_over(TWO_HEADS, loss=loss)


def test_a_loss_that_is_no_function_is_rejected() -> None:
    with pytest.raises(PipelineError, match=r"loss= must be a function or a module \(given str\)"):
        pipeline_over(TWO_HEADS, loss={3: mse_loss, 4: "mse"})


class LearnedScale(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(self.scale * output, target)


def test_a_loss_with_parameters_is_not_shared_by_sinks() -> None:
    with pytest.raises(PipelineError, match="stage 3, 4 would share the parameters of the loss"):
        pipeline_over(TWO_HEADS, loss=LearnedScale())
    losses = {3: LearnedScale(), 4: LearnedScale()}
    with closing(pipeline_over(TWO_HEADS, loss=losses)) as pipeline:
        pipeline.step(X, target=Y)
        assert all(loss.scale in set(pipeline.parameters()) for loss in losses.values())
    assert all(loss.scale.grad for loss in losses.values())


# --- between ranks ---------------------------------------------------------------------------------


class Broken(GraphStage):
    """It fails in the second step, when the other ranks have come to wait for it."""

    calls = 0

    def forward(self, *values: Tensor) -> Any:
        self.calls += 1
        if self.calls > 3:
            time.sleep(0.2 * slowness())
            raise ValueError("broken on purpose")
        return super().forward(*values)


def message_of(pipeline: Pipeline, *args: Any, evaluates: bool = False, **options: Any) -> str:
    try:
        (pipeline.eval if evaluates else pipeline.step)(*args, **options)
    except PenstockError as error:
        return str(error)
    return ""


def messages_of_failures() -> list[str]:
    found = []
    for broken in (0, 1):
        stages = stages_of(TWO_ENCODERS) | {broken: Broken(1, 1 + broken).double()}
        with closing(pipeline_over(TWO_ENCODERS, 4, stages=stages)) as pipeline:
            pipeline.step(X, Z, target=Y)
            found.append(message_of(pipeline, X, Z, target=Y))
    with closing(pipeline_over(TWO_HEADS, 4)) as pipeline:
        target = Y if 4 in pipeline.modules else None
        found.append(message_of(pipeline, X, target=target, evaluates=True))
    with closing(pipeline_over(TWO_ENCODERS, 4)) as pipeline:
        args = [value if source in pipeline.modules else None for source, value in enumerate((X, Z))]
        found.append(message_of(pipeline, *args, target=Y))
    return found


def test_failures_name_the_edge_that_a_rank_waits_for(pools: Pools) -> None:
    for first, second, without_target, apart in pools(4).run(messages_of_failures):
        assert "failed on rank 0, stage 0, microbatch 0, in 0F0" in first
        assert "waits for the output of 0F0 from rank 0" in first
        assert "failed on rank 1, stage 1, microbatch 0, in 1F0" in second
        assert re.search("waits for the output of (0F0 from rank 0|1F0 from rank 1)", second)
        assert "has a loss, but rank" in without_target
        assert apart == ""


def measured(graph: StageGraph) -> tuple[list[tuple[int, int]], int, list[float]]:
    inputs = [X] * len(graph.sources)
    with closing(pipeline_over(graph, 3)) as pipeline, pipeline.profile() as profile:
        for _ in range(2):
            pipeline.step(*inputs, target=Y)
        timeline = profile.timeline
        sent = timeline.costs.activation_message
    return list(graph.edges), len(timeline.start), list(sent) if isinstance(sent, tuple) else []


def test_a_profile_has_the_messages_of_every_edge(pools: Pools) -> None:
    graph = StageGraph(3, ((0, 1), (0, 2), (1, 2)))
    for edges, steps, sent in pools(3).run(measured, graph):
        assert steps == lower(build("1f1b", graph=graph, ranks=3, microbatches=3)).num_steps
        assert len(sent) == len(edges)
        assert all(sent)
