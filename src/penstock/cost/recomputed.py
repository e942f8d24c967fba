"""Costs with every microbatch recomputed, for code that knows no RECOMPUTE actions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.effects import held_bytes
from penstock.cost.prices import action_seconds
from penstock.ir.kinds import Kind


def recomputed_costs(costs: Costs, num_stages: int) -> Costs:
    """The costs of stages whose backward begins with a RECOMPUTE, and that hold the checkpoint until then.

    The seconds of RECOMPUTE, its all-to-all included, are part of the compute of I and of B.
    """
    again = action_seconds(costs, num_stages)[Kind.RECOMPUTE.number] + costs.launch_overhead
    backward_input, backward = (
        tuple((np.array(costs.resolved(name, num_stages)) + again).tolist())
        for name in ("backward_input", "backward")
    )
    return replace(
        costs,
        backward_input=backward_input,
        backward=backward,
        activation=tuple(held_bytes(costs, num_stages, (Kind.RECOMPUTE,)).tolist()),
        activation_freed_by_input=0,
        checkpoint=0,
        offloadable=None,
    )
