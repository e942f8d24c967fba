"""The inputs of a stage that several stages feed, as one value; the gradients of all its outputs as one list.

The arguments of such a stage are those of its inputs one after the other, in ascending order of the stages that
feed it:

    stage 0 returns x         stage 1 returns (y, z)         stage 2 is called with (x, y, z)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from penstock.runtime.execution.handover import Envelope
from penstock.runtime.transport.channels import FlatValue

__all__ = ["JoinedEnvelope", "Source", "joined_gradients", "joined_inputs", "one_source"]

Source: TypeAlias = Callable[[int], FlatValue]
"""Gives the value of a microbatch that another stage computed."""


class JoinedEnvelope(NamedTuple):
    """The envelopes of several values whose leaves are one list."""

    envelopes: tuple[Envelope, ...]
    lengths: tuple[int, ...]
    """How many leaves each value has."""
    counts: tuple[int, ...]
    """How many of them need a gradient."""
    overlapping: tuple[int, ...]
    """The positions of tensors whose memory overlaps that of another tensor of the same value."""
    rows: tuple[tuple[str, int], ...]

    def arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The positional arguments of all values."""
        found, start = list[Any](), 0
        for envelope, length in zip(self.envelopes, self.lengths):
            found += envelope.arguments(leaves[start : start + length])
            start += length
        return tuple(found)


def one_source(sources: Sequence[Source], join: Callable[[Sequence[FlatValue]], FlatValue]) -> Source | None:
    """The only source, or all of them joined; None if there is none."""
    if len(sources) <= 1:
        return sources[0] if sources else None
    return partial(_take_all, tuple(sources), join)


def _take_all(
    sources: Sequence[Source], join: Callable[[Sequence[FlatValue]], FlatValue], microbatch: int
) -> FlatValue:
    return join([source(microbatch) for source in sources])


def joined_inputs(values: Sequence[FlatValue]) -> FlatValue:
    """The values that several stages returned, as one."""
    envelopes: list[Envelope] = [value.structure for value in values]
    lengths = [len(value.leaves) for value in values]
    starts = [sum(lengths[:position]) for position in range(len(lengths))]
    envelope = JoinedEnvelope(
        tuple(envelopes),
        tuple(lengths),
        tuple([sum(value.differentiable) for value in values]),
        tuple([start + place for start, each in zip(starts, envelopes) for place in each.overlapping]),
        tuple(dict.fromkeys(row for each in envelopes for row in each.rows)),
    )
    return _concatenated(values)._replace(structure=envelope)


def joined_gradients(values: Sequence[FlatValue]) -> FlatValue:
    """The gradients that several stages computed, as one list: autograd adds up those of the same output."""
    return _concatenated(values)


def _concatenated(values: Sequence[FlatValue]) -> FlatValue:
    return FlatValue(
        [leaf for value in values for leaf in value.leaves],
        None,
        [needed for value in values for needed in value.differentiable],
        tuple([buffer for value in values for buffer in value.buffers]),
    )
