"""The watch over a step: the first failure on any rank becomes the failure on all, with its cause.

Ranks tell each other through the job's key-value store, never through the channels, which may be what failed.
The failing rank writes down the cause if nobody did before, then hangs up; whoever waits for it wakes up from
that, finds the cause and hangs up in turn. A thread looks for a cause too, so that a rank which is computing
stops at its next action, and one which hangs can still be asked what it is doing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

__all__ = ["Cause", "Status", "Watch"]

_LOOK_EVERY = 0.25  # seconds
_GRACE = 1.0  # seconds that a rank whose connection broke gives others to say why
_CAUSE = "cause"


@dataclass(frozen=True)
class Cause:
    """Why a step failed, and where."""

    rank: int
    kind: str
    """`exception`, `timeout`, `lost` (the connection to `rank` broke) or `interrupted`."""
    step: int
    action: str
    stage: int | None
    microbatch: int | None
    message: str
    details: str
    """The original traceback."""


@dataclass(frozen=True)
class Status:
    """What a rank is doing: the place in its list, and what it waits for, if it waits."""

    mode: str
    """`step` or `eval`, or `outside` when it is in neither."""
    step: int
    """The number of the call it is in, or was in last."""
    place: int
    waits: str


class Watch:
    """One rank's eye on the others. `status` tells what this rank is doing; `on_failure` is called once."""

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        status: Callable[[], Status],
        on_failure: Callable[[], None],
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._lock = threading.Lock()  # a store's connection is for one question at a time
        self._status, self._on_failure = status, on_failure
        self._over = threading.Event()
        self.cause: Cause | None = None
        self._thread = threading.Thread(target=self._look, name="penstock-watch", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_EVERY):
            if not dist.is_initialized():
                return
            try:
                found = self.known_cause()
            except Exception:  # noqa: BLE001 -- the store is gone, and with it the job
                return
            if found is not None:
                self._on_failure()
                self.tell_status()
                return

    def known_cause(self) -> Cause | None:
        """What somebody wrote down, if anybody did."""
        if self.cause is None:
            with self._lock:
                if self._store.check([_CAUSE]):
                    self.cause = Cause(**json.loads(self._store.get(_CAUSE)))
        return self.cause

    def wait_for_cause(self, seconds: float = _GRACE) -> Cause | None:
        """What somebody writes down within this time."""
        end = time.monotonic() + seconds
        while (found := self.known_cause()) is None and time.monotonic() < end:
            time.sleep(0.01)
        return found

    def tell(self, cause: Cause) -> Cause:
        """Write the cause down, if nobody was first; gives what stands there now."""
        with self._lock:
            first = self._store.compare_set(_CAUSE, "", json.dumps(asdict(cause)))
        self.cause = Cause(**json.loads(first))
        return self.cause

    def tell_status(self) -> None:
        """Write down what this rank is doing, once."""
        with self._lock:
            key = f"status/{self._rank}"
            if not self._store.check([key]):
                self._store.set(key, json.dumps(asdict(self._status())))

    def statuses(self, seconds: float) -> dict[int, Status]:
        """What the ranks were doing, of those that say so within this time."""
        keys = [f"status/{rank}" for rank in range(self._ranks)]
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                there = [key for key in keys if self._store.check([key])]
                if len(there) == len(keys) or time.monotonic() > end:
                    texts = {key: self._store.get(key) for key in there}
                    break
            time.sleep(0.02)
        return {int(key.split("/")[1]): Status(**json.loads(text)) for key, text in texts.items()}

    def end(self) -> None:
        """Look no more."""
        self._over.set()
