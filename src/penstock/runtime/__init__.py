"""Schedules at work on real ranks: `Pipeline` runs them with torch.distributed."""

from penstock.runtime.deferral import LayerRule, register_layer
from penstock.runtime.partition import split
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.program import Custom
from penstock.runtime.result import StepResult
from penstock.runtime.splitters import REPLICATE, Splitter, register_splitter

__all__ = [
    "REPLICATE",
    "Custom",
    "LayerRule",
    "Pipeline",
    "Splitter",
    "StepResult",
    "register_layer",
    "register_splitter",
    "split",
]
