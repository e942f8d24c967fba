"""What the fork server does before it forks workers: it loads all that answers need, machine code included.

A worker would load the compiler in the middle of its first large answer.
"""

from __future__ import annotations

import penstock.search.driver
import penstock.web.workers  # noqa: F401 -- loads all requests
from penstock.loops import Loop
from penstock.web.answers import compare

__all__: list[str] = []

_LATENCY = {"latency_seconds": 0.1}
_BANDWIDTH = {"bandwidth_bytes_per_second": 2.0, "activation_message_bytes": 1.0}

Loop.compile_from_now_on()
for _costs, _send in ((_LATENCY, "buffered"), (_BANDWIDTH, "buffered"), (_BANDWIDTH, "rendezvous")):
    for _family in ("1f1b", "v-half"):
        _source = {"family": _family, "ranks": 16, "microbatches": 32}  # loops are long enough to be compiled
        compare({"schedules": [_source], "costs": _costs, "send_model": _send})
