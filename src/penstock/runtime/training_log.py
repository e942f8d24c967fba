"""What a training tells while it runs: one line a step, and the same as JSON lines and for TensorBoard.

    with TrainingLog(jsonl="train.jsonl") as log:
        for x, y in batches:
            result = pipeline.step(x, target=y)
            norm = pipeline.clip_grad_norm_(1.0)
            ...
            log.step(result.loss, norm, tokens=x.numel())

    [rank 0] step 0  loss 4.1589  grad_norm 1.204  memory 0.31 GiB  tps 12,400

`memory` is the most that the process, or its device, has held so far. `tps` are the tokens of a step, as they
were given, by the seconds since the step before, and so those of all ranks together if every rank is given the
same batch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.arguments import printable
from penstock.errors import MissingExtraError, PipelineError

__all__ = ["TrainingLog"]

_GIB = 1 << 30


class TrainingLog:
    """Every rank makes one and calls `step`; the ranks that are to speak do.

    `ranks`        which speak: rank 0 unless given, `None` for all of them
    `jsonl`        a file that gets one JSON object a step; that of rank 1 has `.rank1` before its ending
    `tensorboard`  a folder for TensorBoard's events; those of rank 1 are in `rank1` inside it
    `every`        print every so many steps, 0 for never; files get them all
    `first`        the number of the first step, after a run was resumed
    """

    def __init__(
        self,
        *,
        ranks: Collection[int] | None = (0,),
        jsonl: str | PathLike[str] | None = None,
        tensorboard: str | PathLike[str] | None = None,
        every: int = 1,
        first: int = 0,
    ) -> None:
        if every < 0:
            raise PipelineError(f"every how many steps to print is a number of at least 0 (given {every!r})")
        self.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        """This rank's number in the world."""
        self.speaks = ranks is None or self.rank in ranks
        """Whether this rank prints and writes."""
        self._every, self._next = every, first
        self._file: TextIO | None = None
        self._board: Any = None
        if self.speaks and jsonl is not None:
            path = Path(jsonl)
            own = path if self.rank == 0 else path.with_name(f"{path.stem}.rank{self.rank}{path.suffix}")
            self._file = own.open("a", encoding="utf-8")
        if self.speaks and tensorboard is not None:
            self._board = _board(Path(tensorboard) / (f"rank{self.rank}" if self.rank else ""))
        self._since = time.perf_counter()

    def step(
        self,
        loss: float | Tensor | None,
        grad_norm: float | Tensor | None = None,
        *,
        tokens: int | None = None,
        **others: float | Tensor,
    ) -> None:
        """Tell of one step that has just ended; `others` are numbers of your own, such as `lr=`."""
        now = time.perf_counter()
        taken, self._since = now - self._since, now
        number, self._next = self._next, self._next + 1
        if not self.speaks:
            return
        told: dict[str, float | None] = {
            "loss": _plain(loss),
            "grad_norm": _plain(grad_norm),
            "memory": float(_memory()),
            "tps": None if tokens is None else tokens / max(taken, 1e-9),
        }
        told |= {name: _plain(value) for name, value in others.items()}
        told = {name: value for name, value in told.items() if value is not None}
        if self._every and number % self._every == 0:
            words = "  ".join(_word(name, value) for name, value in told.items() if value is not None)
            print(f"[rank {self.rank}] step {number}  {words}", flush=True)  # noqa: T201 -- what it is for
        if self._file is not None:
            finite = {name: value if value is None or isfinite(value) else None for name, value in told.items()}
            line = {"rank": self.rank, "step": number, "seconds": taken} | finite
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in told.items():
                self._board.add_scalar(name, value, number)

    def say(self, text: str) -> None:
        """Print a line of your own with the rank before it, on the ranks that speak."""
        if self.speaks:
            print(f"[rank {self.rank}] {text}", flush=True)  # noqa: T201 -- what it is for

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        self._file = self._board = None

    def __enter__(self) -> TrainingLog:  # noqa: PYI034 -- Self comes with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 -- needs a package of its own
    except ImportError:
        raise MissingExtraError(
            "events for TensorBoard are written by the package tensorboard, which is not installed: pip "
            "install tensorboard (jsonl= needs nothing)"
        ) from None
    return SummaryWriter(str(folder))


def _plain(value: float | Tensor | None) -> float | None:
    if isinstance(value, Tensor):
        value = value.detach().item()
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise PipelineError(f"only numbers can be logged (given {printable(repr(value))})") from None


def _word(name: str, value: float) -> str:
    if name == "memory":
        return f"memory {value / _GIB:.2f} GiB"
    if name == "tps":
        return f"tps {value:,.0f}"
    return f"{name} {value:.4f}" if name == "loss" else f"{name} {value:.4g}"


def _memory() -> int:
    """Bytes: the most that was held on the device, or by the process where there is none."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated()
    try:
        import resource  # noqa: PLC0415 -- not on Windows
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
