"""The optional package safetensors, and the file names of the Hub's layout.

model.safetensors                        one file, or
model-00001-of-00004.safetensors ...     one for each rank that has its own stages, and
model.safetensors.index.json             the file of each name
"""

from __future__ import annotations

from typing import Any

from penstock.arguments import install_command
from penstock.errors import MissingExtraError

__all__ = ["INDEX_FILE", "SINGLE_FILE", "SafetensorsPackage", "load_safetensors"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class SafetensorsPackage:
    """The functions of the package that are used here."""

    def __init__(self) -> None:
        import safetensors  # noqa: PLC0415 -- an extra
        from safetensors import torch as files  # noqa: PLC0415

        self.safe_open: Any = safetensors.safe_open
        self.SafetensorError: type[Exception] = safetensors.SafetensorError
        self.save_file: Any = files.save_file


def load_safetensors() -> SafetensorsPackage:
    """Import the package, or raise an error that names it."""
    try:
        return SafetensorsPackage()
    except ImportError:
        raise MissingExtraError(
            "safetensors files need the package safetensors, which is not installed: "
            + install_command("torch")
        ) from None
