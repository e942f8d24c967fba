"""A directory that is replaced as a whole: at every moment the old one or the new one is there to be read.

    path                   what is read
    .path.unfinished       what is being written
    .path.replaced         the old one, from the moment it makes room until it is removed

Each step from one state to the next is a rename. Only between two of them there is no `path`, and then the old
one is complete under its other name.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from penstock.runtime.checkpoints.collective import FoundError

__all__ = ["DATA", "MARK", "Replacing", "synced"]

MARK = ".metadata"
"""The file that is written last: a directory without it is no checkpoint."""
DATA = ".distcp"
"""What the names of all other files end in."""


class Replacing:
    """The directory of a checkpoint, through a link if it is one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        self.unfinished = self.path.with_name(f".{self.path.name}.unfinished")
        self.replaced = self.path.with_name(f".{self.path.name}.replaced")

    def readable(self) -> Path:
        """Where a whole checkpoint is."""
        for each in (self.path, self.replaced):
            if (each / MARK).is_file():
                return each
            if each.exists():
                break
        if self.path.is_dir():
            why = f"the directory {self.path} is no checkpoint: it has no file {MARK}, which is written last"
        elif self.path.exists():
            why = f"{self.path} is a file, but a checkpoint is a directory"
        elif self.unfinished.exists():
            why = f"{self.path} does not exist: a save to it began, but did not finish ({self.unfinished.name})"
        else:
            why = f"{self.path} does not exist"
        raise FoundError(why)

    def begin(self) -> None:
        """Make room for a new one; what a crash left is put right."""
        if self.path.exists() and not _is_ours_to_replace(self.path):
            raise FoundError(f"{self.path} holds something else than a checkpoint, and stays as it is")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists() and (self.replaced / MARK).is_file():
            self.replaced.rename(self.path)
        for rubbish in (self.unfinished, self.replaced):
            if rubbish.exists():
                shutil.rmtree(rubbish)
        self.unfinished.mkdir()

    def commit(self) -> None:
        """Put what was written in the place of the old one."""
        synced(self.unfinished)
        if self.path.exists():
            self.path.rename(self.replaced)
        self.unfinished.rename(self.path)
        synced(self.path.parent)
        if self.replaced.exists():
            shutil.rmtree(self.replaced)

    def drop(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.unfinished, ignore_errors=True)


def synced(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _is_ours_to_replace(path: Path) -> bool:
    """Whether there is nothing in it but the files of a checkpoint."""
    return path.is_dir() and all(each.name == MARK or each.suffix == DATA for each in path.iterdir())
