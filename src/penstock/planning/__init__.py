"""Planning: from the costs of layers, or a model config and devices, to stages, microbatches and an order."""

from penstock.planning.evaluation import Option
from penstock.planning.jobs import JobRequest
from penstock.planning.layers import PlanRequest
from penstock.planning.model import Layer, Model, model_of_keys, read_model
from penstock.planning.planner import Plan, plan

__all__ = [
    "JobRequest",
    "Layer",
    "Model",
    "Option",
    "Plan",
    "PlanRequest",
    "model_of_keys",
    "plan",
    "read_model",
]
