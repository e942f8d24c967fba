"""Splitting a traced module, whose graph says what happens between its modules; values may skip stages."""

from __future__ import annotations

import operator
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from penstock.arguments import listed, some
from penstock.errors import PartitionError
from penstock.ir.graph import StageGraph
from penstock.runtime.models.module_containers import has_hooks
from penstock.runtime.models.stage_starts import Start, order_problems, unknown_name
from penstock.runtime.torch_internals.modules import is_mutable_operator, nesting

# What a traced module must be like to be split: its inputs and outputs, its hooks, and no value that one stage
# changes in place and another one uses.


_VIEW = re.compile(
    "chunk|detach|expand|expand_as|flatten|getitem|narrow|permute|reshape|select|slice|split|squeeze|swapaxes|t|"
    "transpose|unflatten|unsqueeze|view|view_as"
)


def check_module(model: GraphModule) -> None:
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


def output_of(model: GraphModule) -> Any:
    """What the module returns."""
    (output,) = (node for node in model.graph.nodes if node.op == "output")
    values, spec = output.args[0], nesting(model, "out_spec")
    if spec is None:
        return values
    if spec.is_leaf():
        return values[0]
    if spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children()):
        return spec.type(values)
    raise PartitionError("the exported module returns nested values: export one that returns tensors")


def check_mutations(nodes: Sequence[Node], stage: Mapping[Node, int], same: Mapping[Node, Node]) -> None:
    """Raise if a value is changed in place in one stage and used in another, which has its own copy.

    `same` has, per node that gets a buffer, the node that stands for all of that buffer.
    """
    order = {node: position for position, node in enumerate(nodes)}
    for node in nodes:
        changed = _changed(node)
        while changed is not None:
            alike = [each for each in same if same[each] is same.get(changed)]
            users = [user for user in changed.users if order[user] > order[node]]
            for user in [user for each in alike for user in each.users] or users:
                if stage[user] != stage[node]:
                    raise PartitionError(
                        f"{changed.target if alike else changed.name} is changed in place by {node.name} in "
                        f"stage {stage[node]} and used by {user.name} in stage {stage[user]}, which would not "
                        "see the change: change a copy in the model, or split elsewhere"
                    )
            changed = changed.all_input_nodes[0] if _VIEW.fullmatch(_name(changed)) else None


def _changed(node: Node) -> Node | None:
    """The value that a node changes in place."""
    if not node.all_input_nodes or node.op not in ("call_module", "call_function", "call_method"):
        return None
    if node.op == "call_module":
        module = node.graph.owning_module
        in_place = module is not None and getattr(module.get_submodule(str(node.target)), "inplace", False)
    else:
        is_mutable, name = is_mutable_operator(node.target), _name(node)
        is_operator = name in ("iadd", "isub", "imul", "itruediv", "ipow", "setitem")
        in_place = is_mutable if is_mutable is not None else is_operator or _ends_in_one_underscore(name)
        in_place |= bool(node.kwargs.get("inplace", False))
    return node.all_input_nodes[0] if in_place else None


def _ends_in_one_underscore(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _name(node: Node) -> str:
    """The name of the operation: `relu_` for `torch.relu_`, `Tensor.relu_` and `aten.relu_.default`."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


# Splitting a traced module, whose graph says what happens between its modules; values may skip stages.
#
#     traced = torch.fx.symbolic_trace(model)          or torch.export.export(model, ...).module()
#     split(traced, at=["middle", "up"])
#
#     stage 0   down     returns [x, skip]             graph  0 -> 1, 0 -> 2, 1 -> 2
#     stage 1   middle   takes x, returns [y]
#     stage 2   up       is called with [x, skip], [y]
#
# A stage returns the list of all values that later stages use, and each of these takes from it what it needs.
# The inputs of the model go to stage 0, its outputs come from the last stage. A parameter that several stages
# use is a tied weight, a buffer is handed on as a value.


_COMPUTES = ("call_module", "call_function", "call_method")


def split_traced(model: GraphModule, at: Sequence[str] | None, layout: object) -> dict[int, nn.Module]:
    """The stages by number, with the attribute `stage_graph`; without a name, stage 0 is the model itself."""
    if layout is not None:
        raise PartitionError("a traced module has no layout of layers: split by names with `at=`")
    if not at:
        return {0: model}
    check_module(model)
    return _TracedModel(model, _starts(model, at)).stages()


# --- where stages begin ----------------------------------------------------------------------------


def _starts(model: GraphModule, names: Sequence[str]) -> list[int]:
    """The positions, among the nodes that compute, at which stages begin."""
    first: dict[str, int] = {}
    for position, node in enumerate(_computing(model.graph)):
        for name in _modules_of(node):
            first.setdefault(name, position)
    known = [name for name in names if isinstance(name, str) and name in first]
    valid = [name for name, position in first.items() if position]
    modules = dict(model.named_modules(remove_duplicate=False))
    problems = [unknown_name(name, valid, exists=name in modules) for name in names if name not in known]
    starts: list[tuple[str, Start]] = [(name, (first[name],) if first[name] else ()) for name in known]
    problems += order_problems(starts)
    if problems:
        raise PartitionError("\n".join(problems))
    return [first[name] for name in known]


def modules_in_order(model: GraphModule) -> list[str]:
    """The names of the innermost modules that a traced module runs, in the order of their first operations."""
    stacks = (_modules_of(node) for node in _computing(model.graph))
    return list(dict.fromkeys(stack[-1] for stack in stacks if stack))


def _computing(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op in _COMPUTES]


def _modules_of(node: Node) -> list[str]:
    """The names of the modules that a node is in, outermost first."""
    stack = [name for name, _ in node.meta.get("nn_module_stack", {}).values()]
    if node.op == "call_module" and node.target not in stack:
        stack.append(str(node.target))
    return [name for name in stack if name]


# --- stages ----------------------------------------------------------------------------------------


class _TracedModel:
    """A traced module, and the positions at which its stages begin."""

    def __init__(self, model: GraphModule, starts: Sequence[int]) -> None:
        self._model, self._last = model, len(starts)
        self._nodes = list(model.graph.nodes)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._stage: dict[Node, int] = {}
        """Of all nodes but those that get a parameter."""
        for position, node in enumerate(_computing(model.graph)):
            self._stage[node] = bisect_right(starts, position)
            first, *others = node.all_input_nodes or [node]
            computed = [self._stage[each] for each in others if each.op in _COMPUTES]
            if not node.users and first.op == "get_attr" and computed:
                self._stage[node] = max(computed)  # it writes a value to a buffer: where the value is
        self._stage |= {node: 0 for node in self._nodes if node.op == "placeholder"}
        self._stage |= {node: self._last for node in self._nodes if node.op == "output"}
        self._same = self._place_buffers()

    def _place_buffers(self) -> dict[Node, Node]:
        """Place each buffer at its first use, once; per node that gets one: the node that stands for it."""
        buffers = [n for n in self._nodes if n.op == "get_attr" and n.target not in self._parameters]
        found: dict[Node, Node] = {}
        for _, same in groupby(sorted(buffers, key=lambda node: str(node.target)), lambda node: node.target):
            nodes = list(same)
            found |= dict.fromkeys(nodes, nodes[0])
            users = [self._stage[user] for node in nodes for user in node.users]
            self._stage[nodes[0]] = min(users, default=0)
        return found

    def _uses(self, stage: int) -> list[Node]:
        """The nodes whose values a stage uses, in the order of the model."""
        own = [node for node in self._nodes if self._stage.get(node) == stage]
        used = {self._same.get(each, each) for node in own for each in node.all_input_nodes}
        return [node for node in self._nodes if node in used]

    @cached_property
    def _taken(self) -> list[dict[int, list[Node]]]:
        """Per stage: the values that it takes from each of the others."""
        found: list[dict[int, list[Node]]] = []
        for stage in range(self._last + 1):
            taken: dict[int, list[Node]] = {}
            for node in self._uses(stage):
                home = self._stage.get(node, stage)
                if home != stage:
                    taken.setdefault(home, []).append(node)
            found.append(dict(sorted(taken.items())))
        return found

    @cached_property
    def _returned(self) -> list[list[Node]]:
        """Per stage: the values that others take from it."""
        taken = [{node for each in self._taken for node in each.get(stage, ())} for stage in range(self._last)]
        return [[node for node in self._nodes if node in values] for values in taken]

    def stages(self) -> dict[int, nn.Module]:
        """The stages, each with their common graph."""
        edges = [(source, target) for target, taken in enumerate(self._taken) for source in taken]
        graph = StageGraph(self._last + 1, tuple(edges))
        check_mutations(self._nodes, self._stage, self._same)
        if odd := sorted({*graph.sources, *graph.sinks} - {0, self._last}):
            raise PartitionError(
                f"stage {listed(odd)} takes no value from others or hands none on: split so that all but the "
                "first use a value of another stage, and all but the last compute one that another stage uses"
            )
        stages: dict[int, nn.Module] = {
            s: GraphModule(self._model, self._graph(s)) for s in range(self._last + 1)
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
                copies[node] = graph.call_function(
                    operator.getitem, (received, self._returned[source].index(node))
                )
        used = set(self._uses(stage))

        def copied(node: Node) -> Node:
            return copies[self._same.get(node, node)]

        for node in self._nodes:
            is_parameter = node.op == "get_attr" and node.target in self._parameters
            if node.op != "output" and (node in used if is_parameter else self._stage.get(node) == stage):
                copies[node] = graph.node_copy(node, copied)
        result: Any = [copies[node] for node in self._returned[stage]] if stage < self._last else None
        graph.output(map_arg(output_of(self._model), copied) if result is None else result)
        return graph
