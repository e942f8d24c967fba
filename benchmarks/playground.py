"""How fast the playground answers, over HTTP, without the browser: `python -m benchmarks.playground`.

With `--cpu`, the CPU time of an answer in its worker instead, which other programs hardly change.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from statistics import median
from time import perf_counter, process_time

SIZES = ((8, 32), (32, 256))
FAMILIES = ("1f1b", "zb-h1", "zbv")
REPEATS, CPU_REPEATS = 7, 3
COSTS = {
    "latency": {"latency_seconds": 0.1},
    "bandwidth": {"bandwidth_bytes_per_second": 20.0, "activation_message_bytes": 1.0, "latency_seconds": 0.1},
}
"""Messages cost latency only, or are followed through channels with bandwidth."""


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


def cases() -> Iterator[tuple[str, dict[str, object]]]:
    """The name and the document of each request."""
    for (ranks, microbatches), (name, costs), family in product(SIZES, COSTS.items(), FAMILIES):
        source = {"family": family, "ranks": ranks, "microbatches": microbatches}
        yield f"p={ranks:<3}m={microbatches:<4}{family:<6} {name:<10}", {"schedules": [source], "costs": costs}


def cpu_times() -> None:
    """Print the CPU time of each answer, with its JSON, in a process that is prepared as a worker is."""
    import penstock.web.preload  # noqa: F401, PLC0415 -- takes a second
    from penstock.web.answers import REQUESTS  # noqa: PLC0415 -- as above

    print(f"CPU time of an answer in ms, median of {CPU_REPEATS}: simulation and drawing, JSON")
    for name, document in cases():
        taken = []
        for _ in range(CPU_REPEATS):
            began = process_time()
            answer = REQUESTS["compare"](document)
            answered = process_time()
            json.dumps(answer, separators=(",", ":"))
            taken.append((answered - began, process_time() - answered))
        print(name + "".join(f"{median(each) * 1000:8.0f}" for each in zip(*taken)))


def main() -> None:
    if sys.argv[1:] == ["--cpu"]:
        cpu_times()
        return
    began = perf_counter()
    with server() as port:
        print(f"ready after {perf_counter() - began:.2f} s; of {REPEATS} answers each, in ms:")
        print(f"{'':<26}{'first':>8}{'median':>8}{'worst':>8}      MB")
        for name, document in cases():
            body = json.dumps(document).encode()
            taken, sizes = zip(*(seconds(port, body) for _ in range(REPEATS)))
            shown = "".join(f"{each * 1000:8.0f}" for each in (taken[0], median(taken), max(taken)))
            print(f"{name}{shown}{sizes[0] / 1e6:8.2f}")


if __name__ == "__main__":
    main()
