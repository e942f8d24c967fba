"""A checkpoint directory that is replaced atomically: at any time the old or the new one can be read.

    path                   the directory that is read
    .path.unfinished       the directory that is being written
    .path.replaced         the old one, from the moment it is replaced until it is removed

Each transition is a rename. `path` does not exist only between two of them, and then the old one is complete as
`.path.replaced`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from penstock.runtime.checkpoints.collective import RankError

INDEX_FILE = ".metadata"
"""The file that is written last: a directory without it is not a checkpoint."""
DATA_SUFFIX = ".distcp"
"""The suffix of all other files."""


class AtomicDirectory:
    """The directory of a checkpoint; a symbolic link is followed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        self.unfinished = self.path.with_name(f".{self.path.name}.unfinished")
        self.replaced = self.path.with_name(f".{self.path.name}.replaced")

    def readable(self) -> Path:
        """Return the path of the complete checkpoint."""
        found = self.path if self.path.exists() else self.replaced
        if (found / INDEX_FILE).is_file():
            return found
        if self.path.is_dir():
            raise RankError(
                f"the directory {found} is not a checkpoint: it has no {INDEX_FILE}, which is written last"
            )
        if self.path.exists():
            raise RankError(f"{self.path} is a file, but a checkpoint is a directory")
        unfinished = f": a save began, but did not finish ({self.unfinished.name})"
        raise RankError(f"{self.path} does not exist{unfinished if self.unfinished.exists() else ''}")

    def begin(self) -> None:
        """Prepare to write a new checkpoint, and clean up after a crash."""
        if self.path.exists() and not _is_checkpoint(self.path):
            raise RankError(f"{self.path} contains other files than those of a checkpoint, and is not replaced")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists() and (self.replaced / INDEX_FILE).is_file():
            self.replaced.rename(self.path)
        for leftover in (self.unfinished, self.replaced):
            if leftover.exists():
                shutil.rmtree(leftover)
        self.unfinished.mkdir()

    def commit(self) -> None:
        """Replace the old directory by the one that was written."""
        fsync_directory(self.unfinished)
        if self.path.exists():
            self.path.rename(self.replaced)
        self.unfinished.rename(self.path)
        fsync_directory(self.path.parent)
        if self.replaced.exists():
            shutil.rmtree(self.replaced)

    def discard(self) -> None:
        """Remove the unfinished directory."""
        shutil.rmtree(self.unfinished, ignore_errors=True)


def fsync_directory(directory: Path) -> None:
    """Wait until the entries of a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_checkpoint(path: Path) -> bool:
    """Whether the directory contains only files of a checkpoint."""
    return path.is_dir() and all(
        each.name == INDEX_FILE or each.suffix == DATA_SUFFIX for each in path.iterdir()
    )
