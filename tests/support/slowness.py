"""How slow this machine is now: limits of time that tests promise hold on cores of their own."""

from __future__ import annotations

import os

__all__ = ["slowness"]


def slowness() -> float:
    """How many processes share a core now, at least 1: a promised time is multiplied by it."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
