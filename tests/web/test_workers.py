"""Promise: a worker that dies in the middle of a request is replaced before the next one."""

from __future__ import annotations

import asyncio
import os
import signal

from penstock.web.workers import WorkerPool

SMALL = {"schedules": [{"family": "1f1b", "ranks": 2, "microbatches": 4}]}
LARGE = {"schedules": [{"family": "zbv", "ranks": 32, "microbatches": 500}], "jitter": 0.1}


def test_the_request_gets_an_answer_and_the_next_one_another_worker() -> None:
    async def kinds() -> list[str]:
        pool = WorkerPool(size=1)
        pool.start()
        try:
            found = [(await pool.ask("compare", SMALL)).kind]
            for _ in range(3):
                running = asyncio.ensure_future(pool.ask("robustness", LARGE))
                await asyncio.sleep(0.2)
                os.kill(pool.pids[0], signal.SIGKILL)
                found += [(await running).kind, (await pool.ask("compare", SMALL)).kind]
            return found
        finally:
            pool.close()

    assert asyncio.run(kinds()) == ["result", *["memory", "result"] * 3]
