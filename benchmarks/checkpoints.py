"""Cost of the checksums of a checkpoint: save and load with and without them, and the speed of several kinds.

    python -m benchmarks.checkpoints [GiB]

Both variants alternate in one run; times are medians, of the clock and of the CPU. The page cache is dropped
before a load from the disk.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias
from unittest import mock

from torch import nn

from penstock.runtime import load_checkpoint, save_checkpoint
from penstock.runtime.checkpoints import files as checksums

CHECKSUMS: dict[str, Callable[[bytes], object]] = {
    "zlib.crc32": zlib.crc32,
    "zlib.adler32": zlib.adler32,
    "hashlib.sha1": lambda data: hashlib.sha1(data, usedforsecurity=False).digest(),
    "hashlib.sha256": lambda data: hashlib.sha256(data).digest(),
    "hashlib.blake2b": lambda data: hashlib.blake2b(data).digest(),
}


Seconds: TypeAlias = tuple[float, float]
"""By the clock, and of the CPU."""


def seconds(work: Callable[[], object]) -> Seconds:
    start = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def compare_checksums() -> None:
    blocks = [os.urandom(checksums.BLOCK) for _ in range(16)]
    print("GB per second of the clock with 1 and 2 threads, per second of the CPU")
    for name, function in CHECKSUMS.items():
        speeds = []
        for count in (1, 2):
            with ThreadPoolExecutor(count) as threads:
                times = [seconds(lambda: list(threads.map(function, blocks))) for _ in range(5)]  # noqa: B023
            speeds.append([len(blocks) * checksums.BLOCK / least / 1e9 for least in map(min, zip(*times))])
        print(f"  {name:16} {speeds[0][0]:5.2f} {speeds[1][0]:5.2f} {speeds[0][1]:5.2f}")


def save(path: Path, model: nn.Module, *, with_checksums: bool) -> None:
    with mock.patch.object(zlib, "crc32", zlib.crc32 if with_checksums else lambda *_: 0):
        save_checkpoint(path, model)


def drop_cache(path: Path) -> None:
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(path: Path, model: nn.Module, *, cold: bool, with_checksums: bool) -> Seconds:
    if cold:
        drop_cache(path)
    return seconds(lambda: load_checkpoint(path, model, verify_checksums=with_checksums))


def compare(what: str, measure: Callable[[bool], Seconds], count: int = 5) -> None:
    times: dict[bool, list[Seconds]] = {True: [], False: []}
    for _ in range(count):
        for given, found in times.items():
            found.append(measure(given))
    for kind, name in enumerate(("clock", "CPU")):
        verified, without = (statistics.median(each[kind] for each in found) for found in times.values())
        print(f"{what:24} {name:5} {verified:6.2f} s, without {without:6.2f} s, ratio {verified / without:.2f}")


def main() -> None:
    size = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    compare_checksums()
    layers = [nn.Linear(4096, 4096, bias=False) for _ in range(max(1, round(size * 16)))]
    model = nn.Sequential(*layers)
    path = Path(tempfile.mkdtemp()) / "checkpoint"
    try:
        print(f"{sum(layer.weight.nbytes for layer in layers) / 2**30:.2f} GiB")
        compare("save", lambda given: seconds(lambda: save(path, model, with_checksums=given)))
        save_checkpoint(path, model)
        compare("load from the disk", lambda given: load(path, model, cold=True, with_checksums=given))
        compare("load from the page cache", lambda given: load(path, model, cold=False, with_checksums=given))
    finally:
        shutil.rmtree(path.parent)


if __name__ == "__main__":
    main()
