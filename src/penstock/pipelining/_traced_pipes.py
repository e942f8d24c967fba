"""Checks of stages that torch's tracer made."""

from __future__ import annotations

import operator
from itertools import pairwise

from penstock.errors import PipelineError
from penstock.ir.graph import StageGraph
from penstock.pipelining.stage import _PipelineStage, _PipelineStageBase


def require_no_skip_connections(stage: _PipelineStageBase) -> None:
    """Require that each stage of a traced pipe takes exactly the outputs of the previous one, in order."""
    if not isinstance(stage, _PipelineStage):
        return
    nodes = [node for node in stage.pipe_info.graph.nodes if node.op == "call_module"]
    for (source, target), (before, node) in zip(StageGraph.chain(len(nodes)).edges, pairwise(nodes)):
        parts = [user for user in before.users if user.target is operator.getitem]
        wanted = sorted(parts, key=lambda part: int(part.args[1])) or [before]
        if [argument for argument in node.args if argument.op != "placeholder"] != wanted:
            raise PipelineError(
                f"stage {target} does not take exactly the outputs of stage {source}; skip connections "
                "are not supported: pass the values through the stages between"
            )
