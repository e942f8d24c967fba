"""How slow this machine is: limits of time that tests promise hold on cores of their own."""

from __future__ import annotations

import os

__all__ = ["slowness"]


def slowness() -> float:
    """How many processes shared a core in the last minutes, at least 1: a promised time is multiplied by it."""
    return max(1.0, max(os.getloadavg()[:2]) / (os.cpu_count() or 1))
