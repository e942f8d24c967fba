"""The runtime: `Pipeline` runs schedules on the ranks of torch.distributed."""

from penstock.arguments import install_command
from penstock.errors import MissingExtraError

try:
    import torch  # noqa: F401 -- first of all, so that a missing torch is reported
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtraError(
        f"the runtime needs torch, which is not installed: {install_command('torch')}"
    ) from None

from penstock.runtime.backward.layer_rules import LayerRule, register_layer
from penstock.runtime.batch import REPLICATE, Splitter, register_splitter
from penstock.runtime.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from penstock.runtime.checkpoints.safetensors import export_safetensors, import_safetensors
from penstock.runtime.config import ActionCall
from penstock.runtime.failure import report
from penstock.runtime.failure.process_detector import current_detector
from penstock.runtime.grad_scaler import GradScaler
from penstock.runtime.local_ranks import LocalRanks
from penstock.runtime.models.materialize import materialize
from penstock.runtime.models.partition import split
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.session.step_runner import StepResult
from penstock.runtime.states.torch_runtime import label_actions, record_state
from penstock.runtime.training_log import TrainingLog
from penstock.runtime.verification import Verdict, verify_gradients

__all__ = [
    "REPLICATE",
    "ActionCall",
    "GradScaler",
    "LayerRule",
    "LocalRanks",
    "Pipeline",
    "Splitter",
    "StepResult",
    "TrainingLog",
    "Verdict",
    "export_safetensors",
    "import_safetensors",
    "label_actions",
    "load_checkpoint",
    "materialize",
    "record_state",
    "register_layer",
    "register_splitter",
    "save_checkpoint",
    "split",
    "verify_gradients",
]

report.install(current_detector)
