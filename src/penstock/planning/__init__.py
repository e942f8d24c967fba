"""Planning: from the costs of layers to a partition, a placement, a microbatch count and an order of work."""

from penstock.planning.model import Layer, Model, model_of_keys, read_model
from penstock.planning.options import Option, Rejected
from penstock.planning.planner import Plan, plan
from penstock.planning.request import PlanRequest

__all__ = [
    "Layer",
    "Model",
    "Option",
    "Plan",
    "PlanRequest",
    "Rejected",
    "model_of_keys",
    "plan",
    "read_model",
]
