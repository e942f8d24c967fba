"""Splitting a traced module, whose graph says what happens between its modules; values may skip stages.

    traced = torch.fx.symbolic_trace(model)          or torch.export.export(model, ...).module()
    split(traced, at=["middle", "up"])

    stage 0   down     returns [x, skip]             graph  0 -> 1, 0 -> 2, 1 -> 2
    stage 1   middle   takes x, returns [y]
    stage 2   up       is called with [x, skip], [y]

A stage returns the list of all values that later stages use, and each of these takes from it what it needs.
The inputs of the model go to stage 0, its outputs come from the last stage. A parameter that several stages
use is a tied weight, a buffer is handed on as a value.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from penstock.arguments import listed, some
from penstock.errors import PartitionError
from penstock.ir.graph import StageGraph
from penstock.runtime.models.stage_starts import check_starts, has_hooks
from penstock.runtime.torch_internals.modules import is_mutable_operator, nesting

_COMPUTES = ("call_module", "call_function", "call_method")
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ipow", "setitem")
_VIEWS = """
chunk detach expand expand_as flatten getitem narrow permute reshape select slice split squeeze swapaxes t
transpose unflatten unsqueeze view view_as
""".split()  # noqa: SIM905 -- a readable list of names


def split_traced(model: GraphModule, names: Sequence[str] | None) -> dict[int, nn.Module]:
    """Return the stages by number, with the attribute `stage_graph`; without a name, the model itself."""
    if names is None:
        raise PartitionError("a traced module has no layout of layers: split by names with `at=`")
    if not names:
        return {0: model}
    _check_module(model)
    first: dict[str, int] = {}
    for position, node in enumerate(_computing(model)):
        for name in _modules_of(node):
            first.setdefault(name, position)
    check_starts(model, names, first)
    return _TracedModel(model, [first[name] for name in names]).stages()


def modules_in_order(model: GraphModule) -> list[str]:
    """Return the names of the innermost modules that a traced module runs, in the order of first operations."""
    stacks = map(_modules_of, _computing(model))
    return list(dict.fromkeys(stack[-1] for stack in stacks if stack))


def _computing(model: GraphModule) -> list[Node]:
    return [node for node in model.graph.nodes if node.op in _COMPUTES]


def _modules_of(node: Node) -> list[str]:
    """The names of the modules that a node is in, outermost first."""
    stack = [name for name, _ in node.meta.get("nn_module_stack", {}).values()]
    if node.op == "call_module" and node.target not in stack:
        stack.append(str(node.target))
    return [name for name in stack if name]


def _check_module(model: GraphModule) -> None:
    """Raise for what the stages would lose."""
    spec = nesting(model, "in_spec")
    if spec is None:
        if has_hooks(model):
            raise PartitionError("the traced module has hooks, which would never run: put them on its modules")
        return
    positional, named = spec.children()
    if named.num_children or any(not each.is_leaf() for each in positional.children()):
        raise PartitionError(
            "the exported module takes keyword arguments or nested values: export one that takes tensors as "
            "positional arguments"
        )


class _TracedModel:
    """A traced module, and the positions among the nodes that compute at which its stages begin."""

    def __init__(self, model: GraphModule, starts: Sequence[int]) -> None:
        self._model, self._last = model, len(starts)
        self._nodes = list(model.graph.nodes)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = [n for n in self._nodes if n.op == "get_attr" and n.target in parameters]
        self._stage: dict[Node, int] = {}
        """Of all nodes but those that get a parameter."""
        for position, node in enumerate(_computing(model)):
            self._stage[node] = bisect_right(starts, position)
            first, *others = node.all_input_nodes or [node]
            computed = [self._stage[each] for each in others if each.op in _COMPUTES]
            if not node.users and first.op == "get_attr" and computed:
                self._stage[node] = max(computed)  # it writes a value to a buffer: where the value is
        self._stage |= {node: 0 for node in self._nodes if node.op == "placeholder"}
        self._stage |= {node: self._last for node in self._nodes if node.op == "output"}
        self._same: dict[Node, Node] = {}
        """Per node that gets a buffer: the node that stands for all of that buffer, placed at its first use."""
        buffers: dict[Any, list[Node]] = {}
        for node in self._nodes:
            if node.op == "get_attr" and node.target not in parameters:
                buffers.setdefault(node.target, []).append(node)
        for nodes in buffers.values():
            self._same |= dict.fromkeys(nodes, nodes[0])
            users = [self._stage[user] for node in nodes for user in node.users]
            self._stage[nodes[0]] = min(users, default=0)
        stages = range(self._last + 1)
        self._uses = [self._used_by(stage) for stage in stages]
        self._taken = [
            {
                source: [node for node in uses if self._stage.get(node) == source]
                for source in sorted({self._stage.get(node, stage) for node in uses} - {stage})
            }
            for stage, uses in enumerate(self._uses)
        ]
        """Per stage: the values that it takes from each of the others."""
        taken = [{node for each in self._taken for node in each.get(stage, ())} for stage in stages]
        self._returned = [[node for node in self._nodes if node in values] for values in taken]
        """Per stage: the values that others take from it."""

    def _used_by(self, stage: int) -> list[Node]:
        """The nodes whose values a stage uses, in the order of the model."""
        own = [node for node in self._nodes if self._stage.get(node) == stage]
        used = {self._same.get(each, each) for node in own for each in node.all_input_nodes}
        return [node for node in self._nodes if node in used]

    def stages(self) -> dict[int, nn.Module]:
        """Return the stages, each with their common graph."""
        edges = [(source, target) for target, taken in enumerate(self._taken) for source in taken]
        graph = StageGraph(self._last + 1, tuple(edges))
        self._check_mutations()
        if odd := sorted({*graph.sources, *graph.sinks} - {0, self._last}):
            raise PartitionError(
                f"stage {listed(odd)} takes no value from others or hands none on: split so that all but the "
                "first use a value of another stage, and all but the last compute one that another stage uses"
            )
        stages: dict[int, nn.Module] = {
            stage: GraphModule(self._model, self._graph(stage)) for stage in range(graph.num_stages)
        }
        held = {name for stage in stages.values() for name in stage.state_dict()}
        if unused := [name for name in self._model.state_dict() if name not in held]:
            raise PartitionError(
                f"the graph of the traced module does not use {some(unused)}, so they would belong to no "
                "stage: remove them from the module"
            )
        for stage in stages.values():
            vars(stage)["stage_graph"] = graph
        return stages

    def _graph(self, stage: int) -> Graph:
        graph = Graph()
        copies: dict[Node, Node] = {}
        for source, values in self._taken[stage].items():
            received = graph.placeholder(f"stage_{source}")
            for node in values:
                position = self._returned[source].index(node)
                copies[node] = graph.call_function(operator.getitem, (received, position))

        def copied(node: Node) -> Node:
            return copies[self._same.get(node, node)]

        own = {node for node, home in self._stage.items() if home == stage}
        own |= {node for node in self._parameters if node in self._uses[stage]}
        for node in self._nodes:
            if node in own and node.op != "output":
                copies[node] = graph.node_copy(node, copied)
        last = stage == self._last
        graph.output(map_arg(self._output(), copied) if last else list(map(copied, self._returned[stage])))
        return graph

    def _output(self) -> Any:
        """What the module returns."""
        values, spec = self._nodes[-1].args[0], nesting(self._model, "out_spec")
        if spec is None:
            return values
        if spec.is_leaf():
            return values[0]
        if spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children()):
            return spec.type(values)
        raise PartitionError("the exported module returns nested values: export one that returns tensors")

    def _check_mutations(self) -> None:
        """Raise if a value is changed in place in one stage and used in another, which has its own copy."""
        order = {node: position for position, node in enumerate(self._nodes)}
        for node in self._nodes:
            changed = _changed(node)
            while changed is not None:
                alike = [each for each in self._same if self._same[each] is self._same.get(changed)]
                later = [user for user in changed.users if order[user] > order[node]]
                for user in [user for each in alike for user in each.users] or later:
                    if self._stage[user] != self._stage[node]:
                        raise PartitionError(
                            f"{changed.target if alike else changed.name} is changed in place by {node.name} "
                            f"in stage {self._stage[node]} and used by {user.name} in stage "
                            f"{self._stage[user]}, which would not see the change: change a copy in the "
                            "model, or split elsewhere"
                        )
                changed = changed.all_input_nodes[0] if _operation(changed) in _VIEWS else None


def _changed(node: Node) -> Node | None:
    """The value that a node changes in place."""
    if not node.all_input_nodes or node.op not in _COMPUTES:
        return None
    if node.op == "call_module":
        module = node.graph.owning_module
        in_place = module is not None and getattr(module.get_submodule(str(node.target)), "inplace", False)
    else:
        in_place, name = is_mutable_operator(node.target), _operation(node)
        if in_place is None:
            in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        in_place |= bool(node.kwargs.get("inplace", False))
    return node.all_input_nodes[0] if in_place else None


def _operation(node: Node) -> str:
    """The name of the operation: `relu_` for `torch.relu_`, `Tensor.relu_` and `aten.relu_.default`."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]
