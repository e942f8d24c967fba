"""Checkpoints with the tensor names of the whole model, independent of ranks and stages."""

from penstock.runtime.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from penstock.runtime.checkpoints.safetensors_export import export_safetensors
from penstock.runtime.checkpoints.safetensors_import import import_safetensors

__all__ = ["export_safetensors", "import_safetensors", "load_checkpoint", "save_checkpoint"]
