"""Arrays of the kernel: a problem in integers and floats, and the state of an order that was run.

An order is one array of tokens, rank after rank. Token 3s + k is the next microbatch of stage s: k is 0 for the
forward, 1 for the input gradient (I, or B where the backward is not split), 2 for the weight gradient (W).
Within a stage and kind, microbatches go by number, so every permutation of a rank's tokens is a list of its
work.

Where a stage's B is shorter than its I and W, an I directly followed by a W of the stage is one B, unless that
W has the flag `SEPARATE`: B ends before W would, but I alone passes the gradient on earlier. The other W belong
to the other I, again by number.

Where pairs can take less than their parts, an I with the flag `PAIRED` directly behind an F is an overlapped
pair with it, one step that ends when both end. A W of its stage directly behind that I is in the pair, as part
of B, unless it has the flag `SEPARATE`. `entry & TOKEN` is an entry of an order without its flags.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.compilation import compiled
from penstock.ir.encoding import Floats, Ints
from penstock.search.message_arrays import MessageArrays

FORWARD, INPUT_GRAD, WEIGHT_GRAD = 0, 1, 2
SEPARATE = 1 << 40
PAIRED = 1 << 41
TOKEN = SEPARATE - 1
MAKESPAN, SPAN, PERIOD = 0, 1, 2


class ProblemArrays(NamedTuple):
    """The work, its costs and its limits."""

    rank_bounds: Ints
    """Where the tokens of each rank begin in an order, and the end of the last rank."""
    rank_of_stage: Ints
    microbatches: int
    kinds: int
    """3 with weight gradients, 2 without."""
    seconds: Floats
    """Per token."""
    fused_seconds: Floats
    """Per stage: seconds of B where that is less than I and W, negative elsewhere."""
    can_fuse: bool
    """Whether there is a stage with fused seconds."""
    pair_seconds: Floats
    """By the stage of a pair's F, that of its backward, and whether a W is in it too (1) or not (0)."""
    can_pair: bool
    """Whether a pair can take less than its parts; if not, `pair_seconds` is empty."""
    stage_order: Ints
    """The stages in the order of the graph."""
    messages: MessageArrays
    """The values between stages."""
    num_channels: int
    has_queues: bool
    """Whether any message occupies its channel."""
    memory_change: Floats
    """Per token: bytes that it allocates at its start, or, if negative, releases at its end."""
    memory_limits: Floats
    """Per rank: bytes available for activations."""
    optimizer_step: float
    """Seconds between the end of a rank's iteration and the start of its next one."""


class RunState(NamedTuple):
    """The times of an order that was run."""

    starts: Floats
    """Per position in the order."""
    ends: Floats
    microbatches: Ints
    """Per position: its microbatch."""
    durations: Floats
    """Per position: its seconds."""
    arrivals: Floats
    """Per message and microbatch: when the value is there, negative if not yet known."""


@compiled
def empty_state(arrays: ProblemArrays) -> RunState:
    """The state before anything is run."""
    size = arrays.rank_bounds[-1]
    arrivals = np.full((len(arrays.messages.producer), arrays.microbatches), -1.0)
    return RunState(np.zeros(size), np.zeros(size), np.zeros(size, np.int64), np.zeros(size), arrivals)
