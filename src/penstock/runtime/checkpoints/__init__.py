"""Checkpoints with the tensor names of the whole model, independent of ranks and stages."""

from penstock.runtime.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from penstock.runtime.checkpoints.safetensors import export_safetensors, import_safetensors

__all__ = ["export_safetensors", "import_safetensors", "load_checkpoint", "save_checkpoint"]
