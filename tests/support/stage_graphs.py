"""Stage graphs with modules, schedules over them, and their training in one process."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from penstock import Action, Kind, Placement, Schedule
from penstock.ir.graph import Edge, StageGraph
from penstock.runtime import Pipeline
from tests.support.reference import TIMEOUT, Outcome, differences, gradients_of, split_plainly

__all__ = [
    "GRAPHS",
    "GraphCase",
    "GraphStage",
    "graph_schedule",
    "random_graph",
    "stages_of",
    "train_graph",
    "train_graph_plainly",
    "train_replicas",
]

WIDTH, M = 4, 3


def with_chain(stages: int, *more: Edge) -> StageGraph:
    return StageGraph(stages, (*zip(range(stages - 1), range(1, stages)), *more))


GRAPHS: Mapping[str, StageGraph] = {
    **{f"skip over {k}": with_chain(k + 3, (0, k + 1)) for k in range(1, 5)},
    "u-net": with_chain(6, (0, 5), (1, 4)),
    "two encoders": StageGraph(4, ((0, 2), (1, 2), (2, 3))),
    "one encoder": StageGraph(5, ((0, 2), (1, 2), (0, 3), (2, 3), (0, 4), (3, 4))),
    "second head": StageGraph(5, ((0, 1), (1, 2), (2, 3), (2, 4))),
}


def random_graph(rng: random.Random) -> StageGraph:
    """Any acyclic graph, also one whose edges go from higher to lower stages."""
    stages = rng.randint(3, 6)
    order = rng.sample(range(stages), stages)
    pairs = [(order[i], order[j]) for j in range(stages) for i in range(j)]
    return StageGraph(stages, tuple(pair for pair in pairs if rng.random() < 0.5))


def graph_schedule(
    graph: StageGraph, ranks: int, rng: random.Random, *, split: bool | None, microbatches: int = M
) -> Schedule:
    """A random legal order on random ranks; `split` backwards are I and W, with None some of them."""
    hosts = list(range(ranks)) + [rng.randrange(ranks) for _ in range(graph.num_stages - ranks)]
    rng.shuffle(hosts)
    waiting: set[Action] = set()
    for s in range(graph.num_stages):
        for k in range(microbatches):
            is_split = rng.random() < 0.5 if split is None else split
            waiting |= {Action(kind, s, k) for kind in (Kind.F, *((Kind.I, Kind.W) if is_split else (Kind.B,)))}
    done: set[Action] = set()
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    while waiting:
        ready = sorted((action for action in waiting if _ready(action, done, graph)), key=str)
        chosen = rng.choice(ready)
        rows[hosts[chosen.stage]].append(chosen)
        done.add(chosen)
        waiting.remove(chosen)
    return Schedule(rows, Placement(tuple(hosts)), microbatches, graph=graph)


def _ready(action: Action, done: set[Action], graph: StageGraph) -> bool:
    s, k = action.stage, action.microbatch
    if action.kind is Kind.F:
        return all(Action(Kind.F, u, k) in done for u in graph.inputs(s))
    if action.kind is Kind.W:
        return Action(Kind.I, s, k) in done
    returned = (Action(Kind.I, t, k) in done or Action(Kind.B, t, k) in done for t in graph.outputs(s))
    return Action(Kind.F, s, k) in done and all(returned)


# --- modules ---------------------------------------------------------------------------------------


class GraphStage(nn.Module):
    """A layer for each argument; it changes an input in place and may return several values."""

    def __init__(self, arguments: int, returns: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(arguments))
        self.returns = returns

    def forward(self, *values: Tensor) -> Any:
        assert len(values) == len(self.layers), f"{len(values)} arguments for {len(self.layers)} layers"
        scaled = [value.mul_(1 + 0.1 * place) if place else value for place, value in enumerate(values)]
        mixed = torch.stack([layer(value) for layer, value in zip(self.layers, scaled)]).sum(0)
        outputs = tuple([torch.tanh(mixed + i) for i in range(self.returns)])
        return outputs[0] if self.returns == 1 else outputs


def stages_of(graph: StageGraph, dtype: torch.dtype = torch.float64) -> dict[int, nn.Module]:
    """Stage 1 returns two values where it feeds others, so its outputs get two arguments from it."""
    torch.manual_seed(0)
    returns = {s: 2 if s == 1 and graph.outputs(s) else 1 for s in range(graph.num_stages)}
    counts = {s: sum(returns[u] for u in graph.inputs(s)) or 1 for s in returns}
    return {s: GraphStage(counts[s], returns[s]).to(dtype) for s in returns}


def batch_of(graph: StageGraph, step: int, rows: int = 2 * M) -> tuple[list[Tensor], Tensor]:
    """One tensor for each source, and the target."""
    generator = torch.Generator().manual_seed(step)
    tensors = [
        torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        for _ in range(len(graph.sources) + 1)
    ]
    return tensors[:-1], tensors[-1]


def forward_plainly(
    graph: StageGraph, stages: Mapping[int, nn.Module], inputs: Sequence[Any]
) -> dict[int, Any]:
    """The output of every sink."""
    values: dict[int, Any] = {}
    batch = dict(zip(graph.sources, inputs))
    for s in graph.forward_order:
        args: list[Any] = [batch[s]] if s in batch else []
        for u in graph.inputs(s):
            args += [each.clone() for each in (values[u] if type(values[u]) is tuple else (values[u],))]
        values[s] = stages[s](*args)
    return {s: values[s] for s in graph.sinks}


def train_graph_plainly(
    graph: StageGraph, stages: Mapping[int, nn.Module], inputs: Iterable[Tensor], target: Tensor, m: int = M
) -> float:
    """One step in this process, microbatch by microbatch; gives the loss."""
    columns = [split_plainly(value, m) for value in inputs]
    total = 0.0
    for k, part in enumerate(split_plainly(target, m)):
        outputs = forward_plainly(graph, stages, [column[k] for column in columns])
        loss = torch.stack([mse_loss(output, part) for output in outputs.values()]).sum() / m
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


# --- as a pipeline ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphCase:
    """A schedule over a graph."""

    name: str
    schedule: Schedule

    def __str__(self) -> str:
        hosts = self.schedule.placement.stage_to_rank
        return f"{self.name}: {self.schedule.graph.edges} on ranks {hosts}"


def train_graph(case: GraphCase) -> Outcome:
    """Two steps and an eval on this rank, compared with one process."""
    outcome, graph = Outcome(), case.schedule.graph
    stages, plain = stages_of(graph), stages_of(graph)
    m = case.schedule.microbatches
    with closing(Pipeline(stages, case.schedule, loss=mse_loss, timeout=TIMEOUT)) as pipeline:
        for step in range(2):
            inputs, target = batch_of(graph, step)
            wanted = train_graph_plainly(graph, plain, inputs, target, m)
            result = pipeline.step(*inputs, target=target)
            outcome.losses.append(result.loss)
            if result.loss is None or abs(result.loss - wanted) > 1e-12:
                outcome.problems.append(f"step {step}: loss {result.loss}, not {wanted}")
        for stage in pipeline.modules:
            found, right = gradients_of(stages[stage]), gradients_of(plain[stage])
            outcome.problems += differences(f"stage {stage}", found, right, exact=False)
        inputs, target = batch_of(graph, 2)
        outcome.problems += _eval_problems(pipeline, plain, inputs, target)
        outcome.peak_live, outcome.peak_buffers = pipeline.peak_live_activations, pipeline.peak_buffers
    return outcome


def train_replicas(case: GraphCase) -> Outcome:
    """One step of two replicas, each with half of the batch, compared with one process."""
    outcome, graph, m = Outcome(), case.schedule.graph, case.schedule.microbatches
    mesh = init_device_mesh("cpu", (2, case.schedule.num_ranks), mesh_dim_names=("dp", "pp"))
    own = mesh["dp"].get_local_rank()
    stages, plain = stages_of(graph), stages_of(graph)
    inputs, target = batch_of(graph, 0)
    halves = [([value.chunk(2)[i] for value in inputs], target.chunk(2)[i]) for i in range(2)]
    groups: dict[str, Any] = {"group": mesh["pp"], "replicas": mesh["dp"]}
    with closing(Pipeline(stages, case.schedule, loss=mse_loss, timeout=TIMEOUT, **groups)) as pipeline:
        result = pipeline.step(*halves[own][0], target=halves[own][1])
    wanted = sum(train_graph_plainly(graph, plain, *half, m) for half in halves) / 2
    if result.loss is None or abs(result.loss - wanted) > 1e-12:
        outcome.problems.append(f"loss {result.loss}, not {wanted}")
    for stage in pipeline.modules:
        right = {name: None if g is None else g / 2 for name, g in gradients_of(plain[stage]).items()}
        outcome.problems += differences(f"stage {stage}", gradients_of(stages[stage]), right, exact=False)
    return outcome


def _eval_problems(
    pipeline: Pipeline, plain: Mapping[int, nn.Module], inputs: list[Tensor], target: Tensor
) -> list[str]:
    graph = pipeline.schedule.graph
    result = pipeline.eval(*inputs, target=target, return_outputs=True)
    with torch.no_grad():
        wanted = forward_plainly(graph, plain, inputs)
        loss = sum(float(mse_loss(output, target)) for output in wanted.values())
    problems = []
    if result.loss is None or abs(result.loss - loss) > 1e-12:
        problems.append(f"eval: loss {result.loss}, not {loss}")
    own = {sink: wanted[sink] for sink in graph.sinks if sink in pipeline.modules}
    found = result.outputs
    if own and len(graph.sinks) == 1:
        found = {graph.sinks[0]: found}
    if (found or {}).keys() != own.keys():
        return [*problems, f"eval: outputs of {found and found.keys()}, not of {own.keys()}"]
    wrong = [sink for sink in own if not torch.allclose(found[sink], own[sink], rtol=0, atol=1e-12)]
    return problems + [f"eval: output of stage {sink}" for sink in wrong]
