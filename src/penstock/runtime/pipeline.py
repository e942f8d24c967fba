"""`Pipeline`: trains and evaluates the stages of this rank by a schedule, with the ranks of a process group.

Every rank of the group creates one, with the same schedule, and calls `step` and `eval` in the same order:

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
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.batch import Batcher, Splitter
from penstock.runtime.config import (
    CustomFunction,
    ExecutionConfig,
    Stages,
    check_options,
    check_replicas_outside,
    device_of,
    functions_by_kind,
    losses_by_sink,
    modules_of_rank,
    resolve_schedule,
    verify_schedule,
    with_losses,
)
from penstock.runtime.data_parallel.gradient_norm import clip_grad_norm, model_groups
from penstock.runtime.data_parallel.replica_group import ReplicaGroup
from penstock.runtime.data_parallel.tied_weights import TiedNames, TiedWeights, find_tied_weights
from penstock.runtime.session.profile import Profile, Recorder
from penstock.runtime.session.step_runner import StepInputBuilder, StepResult, StepRunner
from penstock.runtime.stage.memory import eval_mode, preserved_rng_state
from penstock.runtime.states.writer import state_folder
from penstock.runtime.torch_internals.data_parallel import fsdp_shards_by_stage
from penstock.runtime.torch_internals.registry import warn_if_untested
from penstock.runtime.transport.process_groups import Group, group_timeout, members_of, process_group
from penstock.runtime.transport.transport_errors import transport_errors


class Pipeline:
    """One rank's part of a pipeline.

    `stages`      the modules of this rank's stages in the order of the stages, or a mapping from stage number
                  to module, which may contain all stages, as the result of `split` does: each rank uses its own
    `schedule`    the name of a family, a `.csv` or `.json` file, or a `Schedule`, lowered or not
    `microbatches`  their number; required with the name of a family
    `loss`        called with the last stage's output and, if there is one, the target; returns one number. If
                  several stages feed no other, it is called for each of them, or is a mapping from stage to
                  loss; the losses are added up
    `tokens`      counts the tokens of a microbatch's target; the loss is then weighted by them
    `average`     whether the loss of a step is the mean of the microbatches' losses, or else their sum
    `group`       a process group or one dimension of a DeviceMesh; all ranks by default
    `replicas`    the same for the ranks that train copies of this rank's stages on other data; not needed for
                  modules that are wrapped in DistributedDataParallel, replicate or fully_shard
    `tied`        weights that several stages share, each a mapping from stage to its name in that stage; not
                  needed for those that `split` finds
    `device`      the device of the messages; by default that of the first parameter
    `split`, `merge`  how arguments are split and outputs are merged, see `Batcher`
    `functions`   functions that run in place of actions of a kind, see `ActionCall`
    `check_finite`  raise at the first value that is not finite, with the place where it appeared
    `gradient_accumulation_fusion`  W adds products of `Linear` layers to `.grad` without a temporary tensor:
                  faster, but rounded differently than a full backward
    `timeout`     seconds that a rank waits for another; by default the timeout of the process group
    `state_dir`   a folder for this rank's state if a step hangs, for `penstock diagnose`; by default that of
                  the environment variable PENSTOCK_STATE_DIR, if it is set
    """

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule | str | PathLike[str],
        *,
        microbatches: int | None = None,
        loss: Callable[..., Tensor] | Mapping[int, Callable[..., Tensor]] | None = None,
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
        gradient_accumulation_fusion: bool = False,
        timeout: float | None = None,
        state_dir: str | PathLike[str] | None = None,
    ) -> None:
        warn_if_untested()
        check_options(timeout, tokens, average=average)
        ranks = process_group(group, "group=", "pp")
        members, self.rank = members_of(ranks)
        """This rank's number in the pipeline."""
        verified = verify_schedule(resolve_schedule(schedule, stages, len(members), microbatches))
        self.schedule = verified.schedule
        """The schedule that runs, with all its communication."""
        losses = losses_by_sink(loss, self.schedule.graph)
        modules = modules_of_rank(stages, self.schedule, self.rank)
        all_tied = find_tied_weights(tied, stages, self.schedule.num_stages)
        self.device = torch.device(device) if device is not None else device_of(modules.values())
        """The device of the messages."""
        trained = with_losses(modules, losses)
        shards = fsdp_shards_by_stage(trained)
        self._ties = TiedWeights(all_tied, modules, shards, self.schedule, self.rank)
        self._replication = ReplicaGroup(trained, shards, replicas, self.schedule, self.rank)
        check_replicas_outside(members, self._replication.groups)
        self._config = ExecutionConfig(
            verified,
            self.rank,
            members,
            self.device,
            group_timeout(ranks, self.device) if timeout is None else timedelta(seconds=float(timeout)),
            modules,
            trained,
            losses,
            functions_by_kind(functions),
            self._replication,
            check_finite,
            gradient_accumulation_fusion,
            group if isinstance(group, DeviceMesh) else None,
            state_folder(state_dir),
        )
        self.scaler: torch.amp.GradScaler | None = None
        """Scales the loss; set by a `GradScaler` of this pipeline."""
        self._reduces = True
        batcher = Batcher(self.schedule.microbatches, split, merge)
        self._runner = StepRunner(
            self._config, self._ties, StepInputBuilder(self._config, batcher, tokens, average)
        )
        self._runner.connect()

    def step(self, *args: Any, target: Any = None, return_outputs: bool = False, **kwargs: Any) -> StepResult:
        """Forward and backward of one batch; gradients are accumulated in `.grad` of the parameters.

        `args` are used on the rank of the first stage, `target` on that of the last, keyword arguments on every
        stage of the rank that gets them. A list is a list of microbatches. Every rank may get all arguments.
        If several stages take the batch, `args` has one argument for each of them, in the order of the stages.
        """
        if not self.schedule.table.has(Kind.B, Kind.I):
            return self.eval(*args, target=target, return_outputs=return_outputs, **kwargs)
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        return self._runner.run(
            "step", args, kwargs, target, scale=scale, reduces=self._reduces, keep_outputs=return_outputs
        )

    def eval(self, *args: Any, target: Any = None, return_outputs: bool = False, **kwargs: Any) -> StepResult:
        """Forward of one batch with the modules in eval mode; with a target, also the loss.

        It builds no autograd graph and changes no gradient, buffer or random state.
        """
        # parameters that FSDP gathers in inference mode cannot be trained later
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            eval_mode(self._config.evaluated),
            preserved_rng_state(self.device),
        ):
            return self._runner.run("eval", args, kwargs, target, keep_outputs=return_outputs)

    def fail(self, error: BaseException, *, training: bool = True) -> None:
        """Announce that this rank cannot make its next call of `step`, or of `eval`.

        The call then fails on the other ranks, which name this rank. The caller raises `error` itself.
        """
        with_backward = self.schedule.table.has(Kind.B, Kind.I)
        self._runner.fail(error, "step" if training and with_backward else "eval")

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Steps inside accumulate gradients without reducing them; the next step outside reduces them all."""
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients of all ranks so that their total norm is at most `max_norm`.

        Every rank must call it. It returns the norm before scaling, equal to that of one process: tied weights
        count once, sharded ones as a whole.
        """
        self.check_gradients_complete()
        name, largest, power = "clip_grad_norm_()", float(max_norm), float(norm_type)
        options = {"max_norm": largest, "norm_type": power, "error_if_nonfinite": bool(error_if_nonfinite)}
        model = self._config.trained, self._ties.counted_elsewhere
        with self._runner.collective(name, options) as connection:
            return clip_grad_norm(
                *model, connection.communicator, largest, power, error_if_nonfinite=error_if_nonfinite
            )

    def check_gradients_complete(self) -> None:
        """Raise if there are gradients that are not reduced over all ranks yet."""
        if self._replication.unreduced or self._ties.unsummed:
            raise PipelineError(
                "the gradients are not complete: the last step was inside accumulate(), and only the next step "
                "outside of it reduces them over all ranks"
            )

    def all_reduce_max(self, compute: Callable[[], Tensor]) -> Tensor:
        """The maximum of what each rank that trains this model computes: other stages, shards and replicas."""
        with self._runner.collective("unscale_() of a GradScaler") as connection:
            largest = compute().clone()
            for group in model_groups(self._config.trained.values(), self._replication.groups):
                with transport_errors():
                    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            if connection.communicator is not None:
                all_ranks = connection.communicator.all_gather(largest.cpu())
                largest = torch.stack(all_ranks).amax(0).to(largest.device)
        return largest

    @contextmanager
    def profile(self, *, memory: bool = False) -> Iterator[Profile]:
        """Record the timelines of the steps inside, and the costs derived from them; all ranks must call it.

        With `memory` also the bytes that each rank holds, which takes some time after each action.
        """
        if self._runner.recorder is not None:
            raise PipelineError("this pipeline is already being profiled")
        name = "profile(memory=True)" if memory else "profile()"
        with self._runner.collective(name, with_replica_peers=False) as connection:
            recorder = Recorder(connection, memory=memory)
        self._runner.recorder = recorder
        try:
            yield recorder.profile
        finally:
            self._runner.recorder = None

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """The modules of this rank by stage number."""
        return self._config.modules

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages and of the loss, each once, for an optimizer."""
        return iter(dict.fromkeys(p for module in self._config.trained.values() for p in module.parameters()))

    @property
    def ties(self) -> tuple[TiedNames, ...]:
        """The weights that several stages share: for each, the stages and its name in them."""
        return self._ties.all

    @property
    def completed_steps(self) -> int:
        """The number of completed steps, which numbers those in error messages; set it after a resume."""
        return self._runner.completed_steps

    @completed_steps.setter
    def completed_steps(self, steps: int) -> None:
        self._runner.completed_steps = steps

    @property
    def peak_live_activations(self) -> int:
        """The most microbatches whose activations this rank held at once in its last step."""
        return self._runner.activations.peak

    @property
    def peak_buffers(self) -> int:
        """The most message buffers this rank used at once in its last step."""
        return self._runner.pool.peak

    def __enter__(self) -> Pipeline:  # noqa: PYI034 -- Self comes with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.schedule.num_ranks}, stage {listed(self.modules)}"
        return f"<Pipeline {self.schedule.name}: {place}>"

    def close(self) -> None:
        """Close the connections. The pipeline connects again when it is used again."""
        self._runner.close()
