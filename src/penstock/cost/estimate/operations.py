"""Operations of a layer on one rank: FLOPs, bytes moved, weights, and bytes saved for the backward.

Everything that is estimated of a layer is a sum over its operations and collectives. So the list of them is
also the explanation of every number (`penstock estimate --explain`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

RECOMPUTATION = ("none", "selective", "pointwise", "latent", "full")
"""What is recomputed in the backward instead of saved, each level including the one before:

    selective   softmax and dropout of unfused attention, as Megatron's `--recompute-activations`
    pointwise   outputs of norms and activation functions: operations without a matrix product
    latent      queries, keys and values from the low ranks of latent attention, as DeepSeek-V3 was trained
    full        everything but the input of each layer
"""


class Passes(NamedTuple):
    """A number for each pass over a layer."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0

    @property
    def total(self) -> float:
        """Of all three."""
        return sum(self)

    @staticmethod
    def sum(every: Iterable[Passes]) -> Passes:
        """Return the sum over each pass."""
        return Passes(*map(sum, zip(*every)))

    def times(self, factor: float) -> Passes:
        """Return each number times a factor."""
        return Passes(*(factor * each for each in self))


class Saved(NamedTuple):
    """A tensor that the forward saves for the backward."""

    what: str
    bytes: float
    for_weight: bool = False
    """Whether the weight gradient needs it; otherwise the input gradient frees it."""
    recomputed_at: str = "full"
    """The level of recomputation from which on it is not saved."""


@dataclass(frozen=True)
class Operation:
    """One operation, which is a matrix product, attention, or bound by memory bandwidth."""

    name: str
    resource: str
    """`matmul`, `attention` or `memory`."""
    flops: Passes = Passes()
    moved: Passes = Passes()
    """Bytes read from and written to the device's memory."""
    weights: float = 0.0
    """Number of weights on this rank."""
    saved: tuple[Saved, ...] = ()
    output_gradient: float = 0.0
    """Bytes of the gradient of its output, which a deferred weight gradient keeps."""
    repeated_at: str = "full"
    """The level of recomputation from which on its forward is repeated in the backward."""
    is_expert: bool = False
    """Whether its weights belong to experts, which are replicated by fewer ranks."""
    kernels: int = 1


@dataclass(frozen=True)
class Collective:
    """Communication within a layer: bytes that a rank sends and receives in each pass."""

    name: str
    group: str
    """`tensor`, `context` or `expert` parallel."""
    bytes: Passes
    messages: Passes = Passes(1, 1, 0)
    """Number of collective calls of each pass."""
    network_share: float = 1.0
    """Of what goes to other nodes: the share that remains if a token is sent once to each node."""


@dataclass(frozen=True)
class LayerOperations:
    """One layer on one rank, for one microbatch."""

    kind: str
    operations: tuple[Operation, ...]
    collectives: tuple[Collective, ...] = ()
    input_bytes: float = 0.0
    """What full recomputation saves."""
    message: float = 0.0
    """Bytes of its output, which a rank sends to the next stage."""
    recompute: str = "none"

    @cached_property
    def repeated(self) -> tuple[Operation, ...]:
        """Operations whose forward is repeated in the backward."""
        level = _level(self.recompute)
        return tuple(each for each in self.operations if _level(each.repeated_at) <= level)

    @cached_property
    def model_flops(self) -> Passes:
        """FLOPs without recomputation."""
        return Passes.sum(each.flops for each in self.operations)

    @property
    def flops(self) -> Passes:
        """FLOPs of the operations that are run, recomputation included in the input gradient."""
        again = sum(each.flops.forward for each in self.repeated)
        return Passes.sum((self.model_flops, Passes(0, again, 0)))

    def weights(self, *, expert: bool) -> float:
        """Number of weights on this rank: those of experts, or the others."""
        return sum(each.weights for each in self.operations if each.is_expert is expert)

    @cached_property
    def saved(self) -> list[Saved]:
        """What is saved at this level of recomputation."""
        if not self.operations or self.recompute == "full":
            return [Saved("input of the layer", self.input_bytes)] if self.input_bytes else []
        level = _level(self.recompute)
        every = (saved for operation in self.operations for saved in operation.saved)
        return [each for each in every if _level(each.recomputed_at) > level]

    @cached_property
    def activation(self) -> float:
        """Bytes saved for the backward of one microbatch."""
        return sum(each.bytes for each in self.saved)

    @cached_property
    def working(self) -> float:
        """Bytes besides while the layer's backward runs: what is recomputed, and the two largest gradients."""
        whole = sum(saved.bytes for operation in self.operations for saved in operation.saved)
        gradients = sorted(each.output_gradient for each in self.operations)[-2:]
        return max(0.0, whole - self.activation) + sum(gradients)

    @cached_property
    def kept_for_weight(self) -> float:
        """Bytes that a weight gradient needs after the input gradient: inputs and output gradients."""
        inputs = sum(s.bytes for each in self.operations for s in each.saved if s.for_weight)
        return inputs + sum(each.output_gradient for each in self.operations)

    @property
    def freed_by_input(self) -> float:
        """Bytes of the activation that the input gradient frees."""
        return max(0.0, self.activation - self.kept_for_weight)


def _level(name: str) -> int:
    return RECOMPUTATION.index(name)
