"""The failure monitor: the first failure on any rank becomes the failure on all ranks, with one cause.

Ranks publish failures in the job's key-value store, never over the channels, which may be what failed. The
failing rank publishes the cause, unless another rank was first, and closes its connections. That wakes up every
rank that waits for it, which reads the cause and closes its own connections. A thread polls for a cause too, so
that a computing rank stops at its next action, and a rank that hangs still publishes its status.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

__all__ = ["FailureCause", "FailureMonitor", "RankStatus"]

_POLL_SECONDS = 0.25
_GRACE_SECONDS = 1.0  # how long a rank with a broken connection waits for another rank's cause
_CAUSE_KEY = "cause"


@dataclass(frozen=True)
class FailureCause:
    """Why and where a step failed."""

    rank: int
    kind: str
    """`exception`, `timeout`, `lost` (a connection of `rank` broke) or `interrupted`."""
    step: int
    action: str
    stage: int | None
    microbatch: int | None
    message: str
    details: str
    """The original traceback."""


@dataclass(frozen=True)
class RankStatus:
    """What a rank is doing."""

    mode: str
    """`step` or `eval`, or `outside` if it runs neither."""
    step: int
    """The number of its current or last step or eval."""
    position: int
    """The position in its list."""
    awaited: str
    """What it waits for; empty if it computes."""


class FailureMonitor:
    """One rank's monitor. `status` gives what this rank is doing; `on_failure` is called once."""

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        status: Callable[[], RankStatus],
        on_failure: Callable[[], None],
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._lock = threading.Lock()  # a connection to the store handles one request at a time
        self._status, self._on_failure = status, on_failure
        self._stopped = threading.Event()
        self.cause: FailureCause | None = None
        self._thread = threading.Thread(target=self._poll, name="penstock-failure-monitor", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            if not dist.is_initialized():
                return
            try:
                cause = self.read_cause()
            except Exception:  # noqa: BLE001 -- the store is gone, and the job with it
                return
            if cause is not None:
                self._on_failure()
                self.publish_status()
                return

    def read_cause(self) -> FailureCause | None:
        """The published cause, if there is one."""
        if self.cause is None:
            with self._lock:
                if self._store.check([_CAUSE_KEY]):
                    self.cause = FailureCause(**json.loads(self._store.get(_CAUSE_KEY)))
        return self.cause

    def wait_for_cause(self, seconds: float = _GRACE_SECONDS) -> FailureCause | None:
        """The cause, if a rank publishes one within this time."""
        end = time.monotonic() + seconds
        while (cause := self.read_cause()) is None and time.monotonic() < end:
            time.sleep(0.01)
        return cause

    def publish_cause(self, cause: FailureCause) -> FailureCause:
        """Publish the cause, unless another rank was first; gives the published one."""
        with self._lock:
            published = self._store.compare_set(_CAUSE_KEY, "", json.dumps(asdict(cause)))
        self.cause = FailureCause(**json.loads(published))
        return self.cause

    def publish_status(self) -> None:
        """Publish what this rank is doing, once."""
        with self._lock:
            key = f"status/{self._rank}"
            if not self._store.check([key]):
                self._store.set(key, json.dumps(asdict(self._status())))

    def statuses(self, seconds: float) -> dict[int, RankStatus]:
        """What the ranks were doing, for those that publish it within this time."""
        keys = [f"status/{rank}" for rank in range(self._ranks)]
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                published = [key for key in keys if self._store.check([key])]
                if len(published) == len(keys) or time.monotonic() > end:
                    texts = {key: self._store.get(key) for key in published}
                    break
            time.sleep(0.02)
        return {int(key.split("/")[1]): RankStatus(**json.loads(text)) for key, text in texts.items()}

    def stop(self) -> None:
        """Stop polling."""
        self._stopped.set()
