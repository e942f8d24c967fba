"""The pools of processes are those of the distributed tests."""

from __future__ import annotations

from tests.distributed.conftest import one_thread, pools

__all__ = ["one_thread", "pools"]
