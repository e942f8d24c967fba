"""What a step is given, made ready for the stages of a rank: microbatches, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import PipelineError
from penstock.runtime.data_parallel.replica_group import ReplicaGroup
from penstock.runtime.dtensors import whole
from penstock.runtime.execution.microbatch_state import StepInputs
from penstock.runtime.execution.microbatches import Batcher

__all__ = ["Intake"]


@dataclass(frozen=True)
class Intake:
    """How a rank takes batches in."""

    batcher: Batcher
    replication: ReplicaGroup
    device: torch.device
    has_first: bool
    has_last: bool
    has_loss: bool
    tokens: Callable[[Any], int] | None
    share: float
    """What a microbatch counts where tokens are not counted."""

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: object,
        *,
        scale: float,
        training: bool,
        keep_outputs: bool,
    ) -> StepInputs:
        """The batch in microbatches."""
        if training and not torch.is_grad_enabled():
            raise PipelineError("step() computes gradients, but they are switched off here; use eval()")
        if training and not self.has_loss and self.has_last:
            raise PipelineError("step() needs a loss: give `loss=` to Pipeline, or use eval()")
        split_args, split_kwargs = self.batcher.arguments(args if self.has_first else (), kwargs)
        targets = None if target is None or not self.has_last else self.batcher.target(target)
        weights = [self.share] * len(split_args)
        if self.tokens is not None and targets is not None:
            weights = self._token_shares([int(whole(self.tokens(part))) for part in targets])
        return StepInputs(
            split_args,
            split_kwargs,
            targets,
            weights,
            scale=scale,
            training=training,
            keep_outputs=keep_outputs,
        )

    def _token_shares(self, counts: list[int]) -> list[float]:
        """What each microbatch counts; gradients are averaged over replicas, whose targets may be longer."""
        total = torch.tensor(sum(counts), dtype=torch.float64)
        everywhere = float(self.replication.total(total, self.device))
        if everywhere <= 0 or min(counts) < 0:
            raise PipelineError(f"the microbatches' targets have {counts} tokens: there is nothing to weigh")
        return [count * self.replication.count / everywhere for count in counts]
