"""torch's traced pipes, and the stage graph of a pipe with values that skip stages.

A stage of such a pipe hands on the list of all its outputs, and a stage that it feeds takes those that it uses:

    stage 0 returns (x, y)    stage 1 takes x, returns z    stage 2 takes z, y
    graph  0 -> 1, 0 -> 2, 1 -> 2      stage 2 is called with [x, y], [z]
"""

# ruff: noqa: N811, N999 -- torch's name

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.pipelining import _IR as _torchs
from torch.fx import Node
from torch.utils.hooks import RemovableHandle

from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.ir.graph import StageGraph
from penstock.pipelining._torch_names import names_of
from penstock.pipelining.stage import _PipelineStage, _PipelineStageBase

__getattr__ = names_of(_torchs)

Picks: TypeAlias = tuple[tuple[int, int], ...]
"""Per argument of a stage: the stage that returns it, and its position there."""


@dataclass(frozen=True)
class TracedGraph:
    """The stage graph of a traced pipe, and what each stage takes of the outputs of others."""

    graph: StageGraph
    picks: tuple[Picks, ...]

    def hooks(self, index: int, module: nn.Module) -> list[RemovableHandle]:
        """Hooks that make a module take and return values as this graph needs it."""
        inputs, hooks = self.graph.inputs(index), []
        if inputs:
            places = [(inputs.index(source), position) for source, position in self.picks[index]]
            hooks.append(module.register_forward_pre_hook(partial(_pick, places)))
        if self.graph.outputs(index):
            hooks.append(module.register_forward_hook(_as_list))
        return hooks


def _pick(places: Sequence[tuple[int, int]], _module: nn.Module, values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([values[place][position] for place, position in places])


def _as_list(_module: nn.Module, _args: object, output: object) -> list[Any]:
    return list(output) if isinstance(output, tuple | list) else [output]


def traced_graph(stage: _PipelineStageBase) -> TracedGraph | None:
    """The graph of a traced pipe; None if each stage takes all outputs of the previous one, in order."""
    if not isinstance(stage, _PipelineStage):
        return None
    nodes = [node for node in stage.pipe_info.graph.nodes if node.op == "call_module"]
    if all(_values(node) == _outputs(before) for before, node in pairwise(nodes)):
        return None
    picks = tuple(tuple(_origin(value, nodes) for value in _values(node)) for node in nodes)
    edges = {(source, target) for target, taken in enumerate(picks) for source, _ in taken}
    graph = StageGraph(len(nodes), tuple(edges))
    if graph.sources != (0,) or graph.sinks != (len(nodes) - 1,):
        odd = sorted({*graph.sources, *graph.sinks} - {0, len(nodes) - 1})
        raise PipelineError(
            f"stage {listed(odd)} of the traced pipe takes nothing from others or hands nothing on to them: "
            "only the first stage may take nothing, and only the last one hand nothing on"
        )
    return TracedGraph(graph, picks)


def _values(node: Node) -> list[Node]:
    """The arguments of a stage that other stages compute."""
    return [value for value in node.args if isinstance(value, Node) and value.op != "placeholder"]


def _outputs(node: Node) -> list[Node]:
    """The outputs of a stage that are used, in order."""
    parts = [user for user in node.users if user.target is operator.getitem]
    return sorted(parts, key=lambda part: int(str(part.args[1]))) or [node]


def _origin(value: Node, stages: Sequence[Node]) -> tuple[int, int]:
    """The stage that returns a value, and its position there."""
    if value.target is operator.getitem:
        source, position = value.args[:2]
        return stages.index(source), int(str(position))
    return stages.index(value), 0
