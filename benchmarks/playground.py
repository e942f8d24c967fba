"""How fast the playground answers, over HTTP, without the browser: `python -m benchmarks.playground`."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

SIZES = ((8, 32), (32, 256))
FAMILIES = ("1f1b", "zb-h1", "zbv")
REPEATS = 7


@contextmanager
def server() -> Iterator[int]:
    """A playground in its own process; yields its port."""
    command = [sys.executable, "-u", "-m", "penstock", "play", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 -- our own
        assert process.stdout is not None
        found = re.search(r":(\d+)/", process.stdout.readline())
        assert found is not None
        yield int(found[1])
        process.terminate()


def seconds(port: int, body: bytes) -> tuple[float, int]:
    started = perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/api/compare", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    size = len(answer.read())
    assert answer.status == 200
    return perf_counter() - started, size


def main() -> None:
    with server() as port:
        for ranks, microbatches in SIZES:
            for family in FAMILIES:
                source = {"family": family, "ranks": ranks, "microbatches": microbatches}
                body = json.dumps({"schedules": [source], "costs": {"latency_seconds": 0.1}}).encode()
                runs = [seconds(port, body) for _ in range(REPEATS)]
                taken, size = median(run[0] for run in runs), runs[0][1]
                print(
                    f"p={ranks:<3} m={microbatches:<4} {family:<6} {taken * 1000:7.1f} ms  {size / 1e6:.2f} MB"
                )


if __name__ == "__main__":
    main()
