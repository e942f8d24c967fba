"""Estimates: costs of a decoder transformer's layers from its config, the parallel config and the device.

config.json -> ModelConfig ┐
sequence, tp, cp, ep, ...  ├-> operations of each layer -> seconds and bytes -> Costs of each layer
h100 -> Device ────────────┘
"""

from penstock.cost.estimate.devices import Device, device, devices
from penstock.cost.estimate.estimate import Estimate, estimate
from penstock.cost.estimate.layers import active_parameters, model_flops, parameters
from penstock.cost.estimate.model_config import (
    ModelConfig,
    config_of_keys,
    is_config,
    known_models,
    read_config,
)
from penstock.cost.estimate.parallel_config import ParallelConfig

__all__ = [
    "Device",
    "Estimate",
    "ModelConfig",
    "ParallelConfig",
    "active_parameters",
    "config_of_keys",
    "device",
    "devices",
    "estimate",
    "is_config",
    "known_models",
    "model_flops",
    "parameters",
    "read_config",
]
