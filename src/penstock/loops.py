"""Loops over columns that numpy cannot vectorise: plain Python at first, compiled by numba once that is faster.

Loading the compiler takes half a second, so a process that plans one small schedule never does. The entries
that all loops have passed are counted, and from `COMPILE_AFTER` on every loop is compiled; the machine code is
kept on disk. Both run the same source, over lists or over arrays, with the same bits as result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

COMPILE_AFTER = 1_000_000
"""Entries of columns: plain loops take about as long for them as loading the compiler does."""

_WORTH_A_CALL = 500  # entries; a call of compiled code takes as long as the plain loop for fewer

Column = npt.NDArray[Any]


class Loop:
    """A function of columns that returns nothing: it reads the first ones and writes into the others."""

    _entries = 0
    """What all loops of this process have passed so far."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._compiled: Callable[..., None] | None = None

    @classmethod
    def compile_from_now_on(cls) -> None:
        """Compile every loop at its next long enough run, as after many entries."""
        Loop._entries = max(Loop._entries, COMPILE_AFTER)

    def run(self, entries: int, inputs: Sequence[Column], outputs: Sequence[Column]) -> None:
        """One run over so many entries; `outputs` are changed in place."""
        if self._pays(entries) and (compiled := self._machine_code()) is not None:
            compiled(*map(_read_only, inputs), *outputs)
            return
        lists = [column.tolist() for column in (*inputs, *outputs)]
        self._function(*lists)
        for column, values in zip(outputs, lists[len(inputs) :]):
            column[...] = values

    def _pays(self, entries: int) -> bool:
        Loop._entries += entries
        return Loop._entries >= COMPILE_AFTER and entries >= min(_WORTH_A_CALL, COMPILE_AFTER)

    def _machine_code(self) -> Callable[..., None] | None:
        """The compiled function; None without numba."""
        if self._compiled is None:
            from penstock.compilation import COMPILED, compiled  # noqa: PLC0415 -- loads the compiler

            self._compiled = compiled(self._function) if COMPILED else None
        return self._compiled


def _read_only(column: Column) -> Column:
    """A view that cannot be written to: numba compiles for it once, whatever the column allows."""
    view = np.ascontiguousarray(column).view()
    view.flags.writeable = False
    return view
