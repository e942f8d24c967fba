"""Builds the inputs of a step: splits the batch into microbatches and computes the weight of each loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.arguments import listed
from penstock.errors import BatchError, PipelineError
from penstock.runtime.batch import Batcher
from penstock.runtime.config import ExecutionConfig
from penstock.runtime.dtensors import whole
from penstock.runtime.stage.microbatch import StepInputs

_log = logging.getLogger("penstock")


@dataclass
class StepInputBuilder:
    """How one rank prepares batches."""

    config: ExecutionConfig
    batcher: Batcher
    tokens: Callable[[Any], int] | None
    """Counts the tokens of a microbatch's target."""
    average: bool
    """Whether the loss of a step is the mean of the microbatches' losses, or else their sum."""
    _has_warned: bool = field(default=False, init=False)

    @property
    def loss_options(self) -> dict[str, object]:
        """What all ranks that compute a loss must have in common: how the losses are weighted."""
        if not any(sink in self.config.modules for sink in self.config.schedule.graph.sinks):
            return {}
        return {"average=": self.average, "tokens=": "none" if self.tokens is None else "given"}

    def build(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: object,
        *,
        scale: float,
        training: bool,
        keep_outputs: bool,
    ) -> StepInputs:
        """The inputs of one call of `step` or `eval`."""
        if training and not torch.is_grad_enabled():
            raise PipelineError("step() computes gradients, but gradients are disabled here: use eval()")
        schedule, modules = self.config.schedule, self.config.modules
        has_source, has_sink = (
            any(stage in modules for stage in ends) for ends in (schedule.graph.sources, schedule.graph.sinks)
        )
        if training and not self.config.losses and has_sink:
            raise PipelineError("step() needs a loss: give `loss=` to Pipeline, or use eval()")
        args = args if has_source else ()
        if has_source:
            self._check_count(args)
        rows: dict[str, int] = {}
        split_args, split_kwargs = self.batcher.split_arguments(args, kwargs, rows)
        all_rows, targets = dict(rows), None
        if target is not None and has_sink:
            targets = self.batcher.split_target(target, all_rows)
        weights = [1 / schedule.microbatches if self.average else 1.0] * len(split_args)
        if self.tokens is not None and targets is not None:
            weights = self._token_weights([int(whole(self.tokens(part))) for part in targets])
        elif targets is not None:
            self._warn_if_uneven(all_rows)
        return StepInputs(
            self._by_source(split_args),
            split_kwargs,
            targets,
            weights,
            scale=scale,
            training=training,
            keep_outputs=keep_outputs,
            rows=rows,
            target_rows={path: count for path, count in all_rows.items() if path not in rows},
        )

    def _warn_if_uneven(self, rows: Mapping[str, int]) -> None:
        """Say once that the mean over microbatches of different sizes is not that over the batch."""
        microbatches = self.config.schedule.microbatches
        uneven = [count for count in rows.values() if count % microbatches]
        if uneven and self.average and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%d rows are split into %d microbatches of %d and %d rows, and each microbatch counts alike: "
                "the loss and its gradients are not those of the whole batch. Give tokens=len to Pipeline to "
                "weigh microbatches by their rows, or another number of rows",
                *(uneven[0], microbatches, uneven[0] // microbatches + 1, uneven[0] // microbatches),
            )

    def _check_count(self, args: tuple[Any, ...]) -> None:
        sources = self.config.schedule.graph.sources
        if len(sources) > 1 and len(args) != len(sources):
            raise BatchError(
                f"{len(args)} positional arguments are given, but there must be {len(sources)}, one for each "
                f"stage that takes the batch: stage {listed(sources)}, in this order. A tuple is several "
                "arguments of a stage, and None stands for those of a stage on another rank"
            )

    def _by_source(self, args: list[tuple[Any, ...]]) -> dict[int, list[tuple[Any, ...]]]:
        """The arguments of each source on this rank: all of them if there is only one, else one each."""
        sources = self.config.schedule.graph.sources
        own = [(place, stage) for place, stage in enumerate(sources) if stage in self.config.modules]
        if len(sources) == 1:
            return {stage: args for _, stage in own}
        return {stage: [_as_arguments(each[place]) for each in args] for place, stage in own}

    def _token_weights(self, counts: list[int]) -> list[float]:
        """Token counts as weights. Gradients are averaged over replicas, which may have other counts."""
        replication = self.config.replication
        local = torch.tensor(sum(counts), dtype=torch.float64)
        total = float(replication.total(local, self.config.device))
        if total <= 0 or min(counts) < 0:
            raise PipelineError(
                f"the targets of the microbatches have {counts} tokens: a loss weighted by tokens needs a "
                "positive total and no negative count"
            )
        return [count * replication.count / total for count in counts]


def _as_arguments(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)
