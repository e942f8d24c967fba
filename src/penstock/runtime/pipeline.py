"""`Pipeline`: the stages of this rank, a schedule, and a process group, ready to train and to evaluate.

Every rank of the group makes one, with the same schedule, and calls `step` and `eval` in the same order:

    schedule = penstock.build("1f1b", ranks=2, microbatches=8)
    pipeline = Pipeline(split(model, at=["4"]), schedule, loss=cross_entropy)
    for x, y in batches:
        result = pipeline.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime import setup
from penstock.runtime.data_parallel.fsdp import fsdp_shards_by_stage
from penstock.runtime.data_parallel.gradient_norm import clip_grad_norm, model_groups
from penstock.runtime.data_parallel.replica_group import ReplicaGroup
from penstock.runtime.data_parallel.tied_names import TiedNames, find_tied_weights
from penstock.runtime.data_parallel.tied_weights import TiedWeights
from penstock.runtime.execution.connections import Plan
from penstock.runtime.execution.engine import Engine
from penstock.runtime.execution.grad_scaler import GradScaler
from penstock.runtime.execution.microbatches import Batcher
from penstock.runtime.execution.module_state import evaluating, kept_random_state
from penstock.runtime.execution.profile import Profile, Recorder
from penstock.runtime.execution.program import CustomFunction
from penstock.runtime.execution.result import StepResult
from penstock.runtime.execution.splitters import Splitter
from penstock.runtime.execution.step_inputs import Intake
from penstock.runtime.transport.process_groups import Group, members_of, process_group

__all__ = ["Pipeline"]


class Pipeline:
    """This rank's part of a pipeline.

    `stages`      the modules of this rank's stages in the order of the stages, or a mapping from the number of
                  a stage to its module, which may name all stages, as `split` does: each rank takes its own
    `schedule`    a family's name, a `.csv` or `.json` file, or a `Schedule`, lowered or not
    `microbatches`  how many; needed with a family's name
    `loss`        called with the last stage's output and, if there is one, the target; gives one number
    `tokens`      counts the tokens of a microbatch's target; the loss is then weighted by them
    `average`     whether the loss of a step is the mean of the microbatches' losses, or else their sum
    `group`       a process group or one dimension of a DeviceMesh; all ranks unless given
    `replicas`    the same: the ranks that train copies of this rank's stages on other data; not needed for
                  modules that are wrapped in DistributedDataParallel, replicate or fully_shard
    `tied`        weights that several stages hold, each a mapping from stage to the name in that stage; those
                  that `split` finds need not be named
    `device`      where the messages are; that of the first parameter unless given
    `split`, `merge`  how arguments come apart and outputs go together, see `Batcher`
    `functions`   called in place of actions of a kind, see `Custom`
    `check_finite`  fail at the first number that is not finite, and name where it arose
    `timeout`     seconds that a rank waits for another
    """

    def __init__(
        self,
        stages: Sequence[nn.Module] | Mapping[int, nn.Module],
        schedule: Schedule | str | PathLike[str],
        *,
        microbatches: int | None = None,
        loss: Callable[..., Tensor] | None = None,
        tokens: Callable[[Any], int] | None = None,
        average: bool = True,
        group: Group = None,
        replicas: Group = None,
        tied: Sequence[TiedNames] = (),
        device: torch.device | str | None = None,
        split: Mapping[int | str, int | Splitter] | None = None,
        merge: int | Splitter = 0,
        functions: Mapping[Kind | str, CustomFunction] | None = None,
        check_finite: bool = False,
        timeout: float = 300,
    ) -> None:
        if not timeout > 0:
            raise PipelineError(f"a timeout is a number of seconds above 0 (given {timeout!r})")
        if tokens is not None and not average:
            raise PipelineError("average=False adds losses up, but tokens= weighs them for a mean: give one")
        members, rank = members_of(process_group(group, "group=", "pp"))
        self.schedule = setup.lowered(setup.chosen_schedule(schedule, stages, len(members), microbatches))
        """The schedule that runs, with all its communication."""
        self.rank = rank
        """This rank's number in the pipeline."""
        modules = setup.modules_of_rank(stages, self.schedule, rank)
        ties = find_tied_weights(tied, stages, self.schedule.num_stages)
        self.device = torch.device(device) if device is not None else setup.device_of(modules.values())
        """Where the messages are."""
        self._trained = setup.with_loss(modules, loss, self.schedule.num_stages - 1)
        shards = fsdp_shards_by_stage(self._trained)
        self._ties = TiedWeights(ties, modules, shards, self.schedule, rank)
        self._replication = ReplicaGroup(self._trained, shards, replicas, self.schedule, rank)
        setup.refuse_own_ranks(members, self._replication.groups)
        self._plan = Plan(
            self.schedule,
            rank,
            members,
            self.device,
            timedelta(seconds=timeout),
            setup.functions_by_kind(functions),
            self._replication,
            group if isinstance(group, DeviceMesh) else None,
        )
        self.scaler: GradScaler | None = None
        """Scales the loss; a `GradScaler` puts itself here."""
        self._reduces = True
        self._modules = modules
        intake = Intake(
            Batcher(self.schedule.microbatches, split, merge),
            self._replication,
            self.device,
            has_first=0 in modules,
            has_last=self.schedule.num_stages - 1 in modules,
            has_loss=loss is not None,
            tokens=tokens,
            share=1 / self.schedule.microbatches if average else 1.0,
        )
        self._engine = Engine(
            self._plan, modules, self._ties, intake, loss=loss, checks=check_finite, trained=self._trained
        )
        self._engine.connect()

    # --- steps -------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Forward and backward of one batch: gradients are added to the parameters' `.grad`.

        `args` matter on the rank of the first stage, `target` on that of the last, keyword arguments on every
        stage of the rank they are given on. A list is taken as ready microbatches. Every rank may be given all.
        """
        if not self.schedule.table.has(Kind.B, Kind.I):
            return self.eval(*args, target=target, return_outputs=return_outputs, **kwargs)
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        return self._engine.step(
            args, kwargs, target, scale=scale, reduces=self._reduces, keep_outputs=return_outputs
        )

    def eval(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Forward of one batch, with the modules in eval mode; with a target, the loss too.

        It builds no graph and changes no gradient, no buffer and no random state.
        """
        # parameters that are gathered in inference mode could not be trained later
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            evaluating(self._modules.values()),
            kept_random_state(self._plan.device),
        ):
            return self._engine.eval(args, kwargs, target, keep_outputs=return_outputs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Steps in here add to the gradients and reduce nothing; the next step outside reduces them all."""
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    # --- what ranks do together between steps ------------------------------------------------------

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients of all ranks so that the norm of them all is at most `max_norm`.

        Every rank calls it and gets the norm they had, which is that of one process: tied weights count once,
        sharded ones as a whole.
        """
        self.refuse_incomplete()
        with self._all_calling("clip_grad_norm_()"):
            return clip_grad_norm(
                self._trained,
                self._ties.counted_elsewhere,
                self._engine.connect().links,
                float(max_norm),
                float(norm_type),
                error_if_nonfinite=error_if_nonfinite,
            )

    @contextmanager
    def _all_calling(self, what: str) -> Iterator[None]:
        """What ranks do together outside of steps: one that does not makes the others wait."""
        try:
            yield
        except RuntimeError as error:
            self.close()
            raise PipelineError(
                f"{what} failed on rank {self.rank}: every rank must call it, and another has not within "
                f"{self._plan.timeout.total_seconds():g} s, or is gone ({str(error).splitlines()[0]})"
            ) from error

    def refuse_incomplete(self) -> None:
        """Raise if there are gradients that are not summed over all ranks yet."""
        if self._replication.unreduced or self._ties.unsummed:
            raise PipelineError(
                "the gradients are not complete: the last step was inside accumulate(), and only the next step "
                "outside of it sums them over all ranks"
            )

    def largest_anywhere(self, numbers: Tensor) -> Tensor:
        """The largest of these on all ranks that train this model, be it other stages, shards or replicas."""
        found = numbers.clone()
        for group in model_groups(self._trained.values(), self._replication.groups):
            dist.all_reduce(found, dist.ReduceOp.MAX, group)
        links = self._engine.connect().links
        if links is not None:
            with self._all_calling("unscaling by a GradScaler"):
                found = torch.stack(links.all_gather(found.cpu(), links.size)).amax(0).to(numbers.device)
        return found

    @contextmanager
    def profile(self) -> Iterator[Profile]:
        """Record the steps inside: their timelines, on every rank, and the costs that follow from them."""
        if self._engine.recorder is not None:
            raise PipelineError("this pipeline is being profiled already")
        self._engine.recorder = Recorder(self._engine.connect())
        try:
            yield self._engine.recorder.profile
        finally:
            self._engine.recorder = None

    # --- what it is, and its end -------------------------------------------------------------------

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """The modules of this rank by the number of their stage."""
        return self._modules

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages and of the loss, each once: what to give to an optimizer."""
        return iter(dict.fromkeys(p for module in self._trained.values() for p in module.parameters()))

    @property
    def ties(self) -> tuple[TiedNames, ...]:
        """The weights that several stages hold: for each, the stages and its name in them."""
        return self._ties.all

    @property
    def peak_live_activations(self) -> int:
        """The most microbatches' activations this rank held at once in its last step."""
        return self._engine.live.peak

    @property
    def peak_buffers(self) -> int:
        """The most message buffers this rank used at once in its last step."""
        return self._engine.pool.peak

    def __enter__(self) -> Pipeline:  # noqa: PYI034 -- Self comes with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.schedule.num_ranks}, stage {listed(self._modules)}"
        return f"<Pipeline {self.schedule.name}: {place}>"

    def close(self) -> None:
        """Hang up. The pipeline connects again when it is used again."""
        self._engine.close()
