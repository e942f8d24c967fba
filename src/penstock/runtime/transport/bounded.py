"""Calls with a time limit: torch's store may wait for its host for ever, whatever its timeout is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["THREAD_NAME", "call_within"]

T = TypeVar("T")

THREAD_NAME = "penstock-call"
_CHECK_SECONDS = 0.1


def call_within(seconds: float, call: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
    """The result of `call`, which runs on a thread; raises TimeoutError and abandons it if it takes longer.

    `check` is called ten times per second meanwhile, and may raise.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device() if in_use else None  # a setting of this thread

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            results.append(call())
        except BaseException as error:  # noqa: BLE001 -- it is raised on the calling thread
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    end = time.monotonic() + seconds
    while not done.wait(_CHECK_SECONDS):
        check()
        if time.monotonic() > end:
            raise TimeoutError(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]
