"""Actions as integers, for hot loops: one `int` per part; an overlapped pair is two parts in a row.

    bit   62 ... 58 57 ......... 32 31 ............ 6 5 ... 1   0
          port      stage           microbatch        kind      joined: second part of a pair

The port distinguishes the messages of a stage that has several edges in one direction: 0 is the neighbour in
the chain, the others are numbered by the stage graph (`penstock.ir.graph`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.ir.action import MAX_ID, Action, Overlap, Step
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind

__all__ = [
    "JOINED",
    "KIND_MASK",
    "KIND_SHIFT",
    "MICROBATCH_MASK",
    "MICROBATCH_SHIFT",
    "PORT_SHIFT",
    "STAGE_MASK",
    "STAGE_SHIFT",
    "code_of",
    "decode",
    "encode",
]

JOINED = 1
KIND_SHIFT, KIND_MASK = 1, 0x1F
MICROBATCH_SHIFT, MICROBATCH_MASK = 6, MAX_ID
STAGE_SHIFT, STAGE_MASK = 32, MAX_ID
PORT_SHIFT = 58


def code_of(kind: Kind, stage: int, microbatch: int = 0, port: int = 0) -> int:
    """The integer form of one part; add to it `microbatch << MICROBATCH_SHIFT` to move along."""
    here = stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT | kind.number << KIND_SHIFT
    return port << PORT_SHIFT | here


def encode(steps: Iterable[Step], graph: StageGraph | None = None) -> Iterator[int]:
    """The parts of `steps` as integers; messages off the chain need the graph."""
    for step in steps:
        joined = 0
        for part in step.parts:
            port = 0 if part.peer is None or graph is None else graph.port(part.kind, part.stage, part.peer)
            yield code_of(part.kind, part.stage, part.microbatch or 0, port) | joined
            joined = JOINED


def decode(codes: Iterable[int], graph: StageGraph | None = None) -> Iterator[Step]:
    """The steps that `encode` turned into `codes`."""
    kinds = tuple(Kind)
    pending: Action | None = None
    for code in codes:
        kind, stage, port = (
            kinds[code >> KIND_SHIFT & KIND_MASK],
            code >> STAGE_SHIFT & STAGE_MASK,
            code >> PORT_SHIFT,
        )
        microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK if kind.has_microbatch else None
        peer = graph.peer(kind, stage, port) if port and graph is not None else None
        part = Action(kind, stage, microbatch, peer)
        if code & JOINED:
            assert pending is not None
            yield Overlap(pending, part)
            pending = None
            continue
        if pending is not None:
            yield pending
        pending = part
    if pending is not None:
        yield pending
