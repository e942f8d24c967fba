"""The values between stages: handed on, joined and shared by stages of a rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.runtime.dtensors import local
from penstock.runtime.pytree import Leaves, Structure, unflatten
from penstock.runtime.torch_internals.autograd import storage_identity, storage_uses, version
from penstock.runtime.transport.channels import FlatValue
from penstock.runtime.transport.message_spec import copied

_NUMBERS_AND_TEXTS = (type(None), int, float, complex, str, bytes, range)
_AS_THEY_ARE = (Tensor, *_NUMBERS_AND_TEXTS, torch.dtype, torch.device, torch.Size)
"""What is not copied as an object: tensors, and what cannot be changed."""


class Envelope(NamedTuple):
    """The structure of a value between two stages, and what the next stage must know of it."""

    structure: Structure
    overlapping: tuple[int, ...]
    """The positions of tensors whose memory overlaps that of another tensor of the value."""
    rows: tuple[tuple[str, int], ...]
    """Arguments of the first stages that were split, each with its number of rows; other ranks compare it."""

    def arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the positional arguments that the value is: a tuple is several."""
        value = unflatten(self.structure, leaves)
        return value if type(value) is tuple else (value,)


def hand_over(leaves: Leaves) -> Leaves:
    """Return the leaves without their graph, which nobody else can change; empties `leaves`.

    A stage may return a tensor that it keeps: a buffer, a cache, its input, a view of them. Its next forward
    may change it, before the next stage on the same rank has used it or before it is sent. It is then copied.
    A tensor whose memory has no other reference, as the output of nearly every stage, is handed on as it is.
    """
    differentiable = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    handed = own_tensors(leaves)
    for position, needed in enumerate(differentiable):
        if needed:
            handed[position].requires_grad_()
        elif not isinstance(handed[position], _AS_THEY_ARE):
            handed[position] = copied(handed[position])
    return handed


def _copy(leaf: Any) -> Any:
    """Copy a leaf that was handed over, for one of several stages that use it."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return leaf if isinstance(leaf, _AS_THEY_ARE) else copied(leaf)


def own_tensors(leaves: Leaves) -> Leaves:
    """Return the leaves with tensors that have no graph and that nobody else can change; empties `leaves`."""
    leaves.reverse()
    return [_own(leaves) for _ in range(len(leaves))]


def _own(leaves: Leaves) -> Any:
    leaf = leaves.pop()
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach()  # drops the last reference to the output, unless somebody else holds it
    return leaf if _is_only_reference(leaf) else leaf.clone()


@cache
def _uses_of_one_tensor() -> int:
    only = torch.empty(1)
    return storage_uses(storage_identity(only))


def storage_references(tensor: Tensor) -> int:
    """Return how many tensors use the storage of a tensor."""
    return storage_uses(storage_identity(tensor)) - _uses_of_one_tensor() + 1


def _is_only_reference(tensor: Tensor) -> bool:
    memory = tensor if type(tensor) is Tensor else local(tensor)
    # memory that is not torch's own, as of a numpy array, may have other references
    return is_plain(memory) and storage_references(memory) == 1 and memory.untyped_storage().resizable()


def is_plain(tensor: Tensor) -> bool:
    """Return whether it is a dense tensor with memory of its own or of its base."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return False
    return not tensor.is_quantized and not tensor.is_nested


def overlapping_positions(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of tensors whose memory overlaps another one, as far as their ranges show."""
    if len(leaves) == 1:
        return ()
    ranges = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and is_plain(leaf) and leaf.numel() and not leaf.is_meta:
            start = leaf.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride()))
            ranges.append((start, start + (last + 1) * leaf.element_size(), position))
    ranges.sort()
    found, end, before = set(), 0, -1
    for start, stop, position in ranges:
        if start < end:
            found |= {before, position}
        if stop > end:
            end, before = stop, position
    return tuple(sorted(found))


def versions(leaves: Sequence[Any], positions: Sequence[int]) -> list[int]:
    """Return the version counters of these tensors, which count changes in place."""
    return [version(leaves[position]) for position in positions if not leaves[position].is_inference()]


def check_unchanged(before: Sequence[int], after: Sequence[int], stage: int, inputs: Sequence[int]) -> None:
    """Raise if a stage changed inputs that overlap in memory: on other ranks they are separate tensors.

    `inputs` are the stages that feed it.
    """
    if list(before) != list(after):
        fed_by = " or ".join(map(str, inputs))
        raise PipelineError(
            f"stage {stage} changes an input in place, and stage {fed_by} returned it together with another "
            "tensor of the same memory. The stages get separate tensors, so the change would be missing in the "
            f"other one: return clone() of one of them in stage {fed_by}, or do not change it in place"
        )


Source: TypeAlias = Callable[[int], FlatValue]
"""Returns the value of a microbatch that another stage computed."""


class JoinedEnvelope(NamedTuple):
    """The envelopes of the values of several stages, which feed one; their leaves are one list.

    Its arguments are those of its inputs one after the other, in ascending order of the stages that feed it:

        stage 0 returns x         stage 1 returns (y, z)         stage 2 is called with (x, y, z)
    """

    envelopes: tuple[Envelope, ...]
    lengths: tuple[int, ...]
    """How many leaves each value has."""
    counts: tuple[int, ...]
    """How many of them need a gradient."""
    overlapping: tuple[int, ...]
    """The positions of tensors whose memory overlaps that of another tensor of the same value."""
    rows: tuple[tuple[str, int], ...]

    def arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the positional arguments of all values."""
        found, start = list[Any](), 0
        for envelope, length in zip(self.envelopes, self.lengths):
            found += envelope.arguments(leaves[start : start + length])
            start += length
        return tuple(found)


def one_source(sources: Sequence[Source], join: Callable[[Sequence[FlatValue]], FlatValue]) -> Source | None:
    """Return the only source, or all of them joined; None if there is none."""
    if len(sources) <= 1:
        return sources[0] if sources else None
    return lambda microbatch: join([source(microbatch) for source in sources])


def joined_inputs(values: Sequence[FlatValue]) -> FlatValue:
    """Return the values that several stages returned, as one."""
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
    return joined_gradients(values)._replace(structure=envelope)


def joined_gradients(values: Sequence[FlatValue]) -> FlatValue:
    """Return the values of several stages as one list; autograd adds up gradients of the same output."""
    return FlatValue(
        [leaf for value in values for leaf in value.leaves],
        None,
        [needed for value in values for needed in value.differentiable],
        tuple([buffer for value in values for buffer in value.buffers]),
    )


class SharedValues:
    """Values by microbatch, each kept until all `consumers`, which are stages on any rank, have it.

    A value is put, or comes from the `source`, such as a receive channel, when the first consumer asks for it.

    A message is a copy, but stages on the same rank would get the same tensors, and one of them may change its
    input in place. So a stage takes a copy as long as another one still needs the value, and the last one takes
    the value itself.
    """

    def __init__(self, consumers: Collection[int], source: Source | None = None) -> None:
        self._consumers, self._source = tuple(consumers), source
        self._values: dict[int, tuple[FlatValue, set[int]]] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of the messages that one of the stages has still to use."""
        return sum(buffer.nbytes for value, _ in self._values.values() for buffer in value.buffers)

    def put(self, microbatch: int, value: FlatValue) -> None:
        """Keep the value of a microbatch for all consumers."""
        self._values[microbatch] = value, set(self._consumers)

    def send(self, microbatch: int, consumer: int) -> FlatValue:
        """Return the value for a message, which copies it."""
        if self._source is not None and microbatch not in self._values:
            self.put(microbatch, self._source(microbatch))
        value, waiting = self._values[microbatch]
        waiting.remove(consumer)
        if not waiting:
            del self._values[microbatch]
        return value

    def take(self, consumer: int, microbatch: int) -> FlatValue:
        """Return the value for a stage on the same rank, which owns it."""
        value = self.send(microbatch, consumer)
        if microbatch in self._values:
            return value._replace(leaves=[*map(_copy, value.leaves)], buffers=())
        return value

    def clear(self) -> None:
        """Discard all values."""
        self._values.clear()
