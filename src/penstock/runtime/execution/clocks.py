"""Clocks of a profile: of the host, of a device, and the offsets between the clocks of ranks.

Ranks of one machine read the same clock. The clocks of other machines are compared with rank 0's by round
trips, and are correct to within half of the fastest round trip (`Clocks.uncertainty`).
"""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import torch

from penstock.runtime.transport.communicator import Communicator, ControlMessage, gather_arrays
from penstock.runtime.transport.transport_errors import wait

__all__ = ["Clocks", "DeviceClock", "HostClock", "compare_clocks"]

_ROUNDS = 20


@dataclass(frozen=True)
class Clocks:
    """Per rank: how far its clock is ahead of rank 0's, in seconds, and the largest error of that."""

    offsets: tuple[float, ...]
    uncertainty: tuple[float, ...]


class HostClock:
    """The clock of the host, in nanoseconds."""

    now = staticmethod(perf_counter_ns)

    def nanoseconds(self, marks: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The marks themselves."""
        return marks


class DeviceClock:
    """Events on a device's stream, converted to the host's nanoseconds at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.Event:
        """An event at this point of the stream."""
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def nanoseconds(self, marks: list[tuple[torch.Event, torch.Event]]) -> list[tuple[int, int]]:
        """The times of the events on the host's clock; waits for all of them."""
        last = self.now()
        last.synchronize()
        host = perf_counter_ns()
        return [
            (host - round(begin.elapsed_time(last) * 1e6), host - round(end.elapsed_time(last) * 1e6))
            for begin, end in marks
        ]


def compare_clocks(communicator: Communicator | None, rank: int, ranks: int) -> Clocks:
    """Rank 0 asks every other rank for its time, several times; the fastest round trip counts."""
    if communicator is None:
        return Clocks((0.0,), (0.0,))
    found = np.zeros((ranks, 2), dtype=np.int64)
    token = torch.zeros(2, dtype=torch.int64)
    tag = communicator.control_tag(ControlMessage.CLOCK)
    for other in range(1, ranks):
        if rank == other:
            for _ in range(_ROUNDS):
                wait(communicator.receive_host(token, 0, tag))
                token[0], token[1] = perf_counter_ns(), _boot_id()
                wait(communicator.send_host(token, 0, tag))
        elif rank == 0:
            found[other] = _offset_of(communicator, other, token)
    offsets = gather_arrays(communicator, found, [ranks] * ranks)[0] / 1e9
    return Clocks(tuple(offsets[:, 0].tolist()), tuple(offsets[:, 1].tolist()))


def _offset_of(communicator: Communicator, other: int, token: torch.Tensor) -> tuple[int, int]:
    """The offset of another rank's clock and its uncertainty, in nanoseconds."""
    answers, tag = [], communicator.control_tag(ControlMessage.CLOCK)
    for _ in range(_ROUNDS):
        begin = perf_counter_ns()
        wait(communicator.send_host(token, other, tag))
        wait(communicator.receive_host(token, other, tag))
        end = perf_counter_ns()
        answers.append((end - begin, int(token[0]) - (begin + end) // 2))
    if int(token[1]) == _boot_id() != -1:
        return 0, 0
    taken, offset = min(answers)
    return offset, taken // 2


def _boot_id() -> int:
    """A number for this machine since its boot; processes with the same number read the same clock."""
    with contextlib.suppress(OSError):
        return zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    return -1
