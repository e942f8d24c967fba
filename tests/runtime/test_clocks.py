"""Promise: marks are nanoseconds of the host, and a single rank's clock is its own."""

from __future__ import annotations

from penstock.runtime.session.profile import Clocks, HostClock, compare_clocks


def test_marks_of_the_host_are_nanoseconds_already() -> None:
    clock = HostClock()
    begin, end = clock.now(), clock.now()
    assert begin <= end
    assert clock.nanoseconds([(begin, end)]) == [(begin, end)]


def test_a_single_rank_is_not_ahead_of_itself() -> None:
    assert compare_clocks(None, 0, 1) == Clocks((0.0,), (0.0,))
