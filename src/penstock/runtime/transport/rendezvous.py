"""Where the ranks of a pipeline meet before they are connected: a part of the job's store.

Each new connection of a pipeline uses a key prefix that was never used before, because keys of an earlier
connection, closed or failed, may still be in the store.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.runtime.transport.bounded import call_within
from penstock.runtime.transport.process_groups import rank_name
from penstock.runtime.transport.stores import STORE_IS_SILENT, first_line, store_connection
from penstock.runtime.transport.transport_errors import TransportError, transport_errors

__all__ = ["Rendezvous"]

T = TypeVar("T")

_STORE_SECONDS = 2.0  # that the store has to answer beyond the timeout
_POLL_SECONDS = 0.01
_last_prefix: dict[tuple[int, ...], str] = {}  # by the ranks that connected under it


class Rendezvous:
    """One rank's part; `members` are the world ranks, `check` is called while it waits, and may raise."""

    def __init__(
        self, members: Sequence[int], rank: int, timeout: timedelta, check: Callable[[], None]
    ) -> None:
        self.members, self.rank, self.timeout = tuple(members), rank, timeout
        self._check = check
        self.name = ""
        """The key prefix, once the ranks have agreed on it."""

    def call(self, call: Callable[[], T]) -> T:
        """The result of a call that needs the store and the other ranks; if they fail, a `TransportError`."""

        def attempt() -> T:
            with transport_errors():
                return call()

        try:
            return call_within(self.timeout.total_seconds() + _STORE_SECONDS, attempt, self._check)
        except TimeoutError as error:
            raise TransportError(STORE_IS_SILENT) from error
        except TransportError as error:
            if isinstance(error.__cause__, dist.DistNetworkError):  # groups raise other errors
                raise TransportError(f"{STORE_IS_SILENT} ({first_line(error)})") from error
            why = f"every rank must create the pipeline, and no process may have died ({first_line(error)})"
            raise TransportError(why + self._absent()) from error

    def store(self, name: str, purpose: str = "connect") -> Store:
        """The part of the store with this name, on the connection for this purpose."""
        return PrefixStore(f"{self.name}/{name}", store_connection(purpose))

    def begin(self) -> None:
        """Agree on the prefix: rank 0 generates and announces it, the others read it."""
        store = store_connection("connect")
        if self.rank == 0:
            self.name = f"{self._key}/{uuid.uuid4().hex}"
            store.set(self._key, self.name)
        else:
            self.name = self._read_new_prefix(store)
        _last_prefix[self.members] = self.name
        self.store("present").set(f"{self.rank}", "")

    def end(self) -> None:
        """Remove the announcement, so that the next connection does not read it."""
        store = store_connection("connect")
        if self.rank == 0 and store.check([self._key]) and store.get(self._key).decode() == self.name:
            store.delete_key(self._key)

    def exchange_texts(self, name: str, own: str) -> list[str]:
        """Every rank's text under this name."""
        keys = [f"{other}" for other in range(len(self.members))]

        def exchange() -> list[str]:
            store = self.store(name)
            store.set(f"{self.rank}", own)
            store.wait(keys, self.timeout)
            return [store.get(key).decode() for key in keys]

        return self.call(exchange)

    @property
    def _key(self) -> str:
        return "penstock/" + "-".join(map(str, self.members))

    def _read_new_prefix(self, store: Store) -> str:
        last, end = _last_prefix.get(self.members), time.monotonic() + self.timeout.total_seconds()
        while True:
            store.wait([self._key], self.timeout)
            prefix = store.get(self._key).decode() if store.check([self._key]) else ""
            if prefix and prefix != last:
                return prefix
            if time.monotonic() > end:
                raise TransportError("rank 0 has not announced a new connection")
            time.sleep(_POLL_SECONDS)

    def _absent(self) -> str:
        """Which ranks are missing, to be appended to an error."""
        try:
            absent = call_within(_STORE_SECONDS, self._absent_ranks) if self.name else [0]  # which names it
        except (RuntimeError, TimeoutError):
            absent = []
        return "".join(f"; {rank_name(each, self.members[each])} has not connected" for each in absent)

    def _absent_ranks(self) -> list[int]:
        present = self.store("present", "find absent ranks")  # a thread may still wait on the other connection
        return [rank for rank in range(len(self.members)) if not present.check([f"{rank}"])]
