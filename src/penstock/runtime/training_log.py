"""The log of a training run: one line per step, also as JSON lines and for TensorBoard.

    with TrainingLog(jsonl="train.jsonl") as log:
        for x, y in batches:
            result = pipeline.step(x, target=y)
            norm = pipeline.clip_grad_norm_(1.0)
            ...
            log.step(result.loss, norm, tokens=x.numel())

    [rank 0] step 1  loss 4.1589  grad_norm 1.204  memory 0.31 GiB  tps 12,400

`memory` is the peak memory of the process, or of its accelerator, so far. `tps` is the number of tokens of a
step divided by the seconds since the step before. It covers all ranks if every rank passes the same batch.
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

_GIB = 1 << 30


class TrainingLog:
    """Every rank creates one and calls `step`; only the ranks in `ranks` print and write.

    `ranks`        the ranks that log: rank 0 by default, `None` for all
    `jsonl`        a file that gets one JSON object per step; that of rank 1 has `.rank1` before its suffix
    `tensorboard`  a directory for TensorBoard events; those of rank 1 are in its subdirectory `rank1`
    `every`        print every so many steps, 0 for never; files get all steps
    `first`        the number of the first step: after a run was resumed, one more than were completed
    """

    def __init__(
        self,
        *,
        ranks: Collection[int] | None = (0,),
        jsonl: str | PathLike[str] | None = None,
        tensorboard: str | PathLike[str] | None = None,
        every: int = 1,
        first: int = 1,
    ) -> None:
        if every < 0:
            raise PipelineError(f"every= must be a number of steps of at least 0 (given {every!r})")
        self.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        """The world rank."""
        self.enabled = ranks is None or self.rank in ranks
        """Whether this rank prints and writes."""
        self._every, self._next_step = every, first
        self._file: TextIO | None = None
        self._board: Any = None
        if self.enabled and jsonl is not None:
            path = Path(jsonl)
            own = path.with_stem(f"{path.stem}.rank{self.rank}") if self.rank else path
            self._file = own.open("a", encoding="utf-8")
        if self.enabled and tensorboard is not None:
            self._board = _summary_writer(Path(tensorboard) / (f"rank{self.rank}" if self.rank else ""))
        self._last_time = time.perf_counter()

    def step(
        self,
        loss: float | Tensor | None,
        grad_norm: float | Tensor | None = None,
        *,
        tokens: int | None = None,
        **others: float | Tensor,
    ) -> None:
        """Log a step that has just ended; `others` are numbers of your own, such as `lr=`."""
        now = time.perf_counter()
        seconds, self._last_time = now - self._last_time, now
        number, self._next_step = self._next_step, self._next_step + 1
        if not self.enabled:
            return
        optional: dict[str, float | None] = {
            "loss": _number(loss),
            "grad_norm": _number(grad_norm),
            "memory": float(_peak_memory()),
            "tps": None if tokens is None else tokens / max(seconds, 1e-9),
            **{name: _number(value) for name, value in others.items()},
        }
        values = {name: value for name, value in optional.items() if value is not None}
        if self._every and number % self._every == 0:
            texts = "  ".join(_text(name, value) for name, value in values.items())
            print(f"[rank {self.rank}] step {number}  {texts}", flush=True)  # noqa: T201 -- its purpose
        if self._file is not None:
            line = {"rank": self.rank, "step": number, "seconds": seconds}
            finite = {name: value if isfinite(value) else None for name, value in values.items()}
            print(json.dumps(line | finite, allow_nan=False), file=self._file, flush=True)
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, number)

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        self._file = self._board = None

    def __enter__(self) -> TrainingLog:  # noqa: PYI034 -- Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _summary_writer(directory: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 -- needs an optional package
    except ImportError:
        raise MissingExtraError(
            "tensorboard= needs the package tensorboard, which is not installed: pip install tensorboard "
            "(jsonl= needs no package)"
        ) from None
    return SummaryWriter(str(directory))


def _number(value: float | Tensor | None) -> float | None:
    if isinstance(value, Tensor):
        value = value.detach().item()
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise PipelineError(f"only numbers can be logged (given {printable(repr(value))})") from None


def _text(name: str, value: float) -> str:
    if name == "memory":
        return f"memory {value / _GIB:.2f} GiB"
    form = {"tps": ",.0f", "loss": ".4f"}.get(name, ".4g")
    return f"{name} {value:{form}}"


def _peak_memory() -> int:
    """Return the peak memory in bytes, of the accelerator, or of the process if there is none."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated()
    try:
        import resource  # noqa: PLC0415 -- not on Windows
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
