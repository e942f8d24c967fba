"""What a traced module must be like to be split: its inputs and outputs, its hooks, and no value that one stage
changes in place and another one uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils._pytree import TreeSpec

from penstock.errors import PartitionError
from penstock.runtime.models.module_containers import has_hooks

__all__ = ["check_module", "check_mutations", "output_of"]

_VIEW = re.compile(
    "chunk|detach|expand|expand_as|flatten|getitem|narrow|permute|reshape|select|slice|split|squeeze|swapaxes|t|"
    "transpose|unflatten|unsqueeze|view|view_as"
)


def check_module(model: GraphModule) -> None:
    """Raise for what the stages would lose."""
    spec = _spec(model, "in_spec")
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
    values, spec = output.args[0], _spec(model, "out_spec")
    if spec is None:
        return values
    if spec.is_leaf():
        return values[0]
    if spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children()):
        return spec.type(values)
    raise PartitionError("the exported module returns nested values: export one that returns tensors")


def _spec(model: GraphModule, name: str) -> TreeSpec | None:
    """How an exported module's arguments or results are nested; None for one that is not exported."""
    info = getattr(model.graph._codegen, "pytree_info", None)  # noqa: SLF001 -- torch has no other way
    return None if info is None else getattr(info, name)


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
        schema, name = getattr(node.target, "_schema", None), _name(node)
        is_operator = name in ("iadd", "isub", "imul", "itruediv", "ipow", "setitem")
        in_place = schema.is_mutable if schema is not None else is_operator or _ends_in_one_underscore(name)
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
