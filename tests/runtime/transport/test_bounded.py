"""Promise: a call gives its result or its error, or is abandoned after its time."""

from __future__ import annotations

import threading
import time

import pytest

from penstock.runtime.transport.network import call_within


def test_results_and_errors_are_those_of_the_call() -> None:
    assert call_within(20, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        call_within(20, lambda: 1 // 0)


def test_a_call_that_does_not_end_is_abandoned() -> None:
    end = threading.Event()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        call_within(0.2, lambda: end.wait(60))
    assert time.monotonic() - begin < 30
    end.set()


def test_the_check_ends_a_call() -> None:
    end = threading.Event()

    def check() -> None:
        raise LookupError("a rank has ended")

    with pytest.raises(LookupError):
        call_within(60, lambda: end.wait(60), check)
    end.set()
