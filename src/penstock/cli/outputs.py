"""Checks of the files and directories that a command writes: before its work, not after it."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from penstock.formats.files import open_stream

__all__ = ["require_folder", "require_writable"]


def require_writable(output: Path) -> None:
    """A usage error if a file cannot be written there."""
    if open_stream(output) is not None:
        return
    target = Path(os.path.realpath(output))
    if target.is_dir():
        raise typer.BadParameter(f"{output} is a directory; give the name of a file")
    if target.exists() and not target.is_file():  # a pipe or a device
        return
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise typer.BadParameter(f"{output}: the directory {output.parent} does not exist or is not writable")


def require_folder(folder: Path) -> None:
    """A usage error if files cannot be written to a directory, which is created if it does not exist."""
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise typer.BadParameter(f"{existing} is a file; give a directory")
    if not os.access(existing, os.W_OK):
        raise typer.BadParameter(f"{folder}: the directory {existing} is not writable")
