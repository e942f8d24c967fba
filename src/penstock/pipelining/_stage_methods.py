"""The methods of torch's stages during a step: those that run an action in torch run ours.

A function for an action, or an override in a subclass of a stage, calls them as it would call torch's. During a
step a stage has a class in which `_StepMethods` comes between the user's classes and torch's base class.
"""

# mypy: disable-error-code="misc"

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeAlias

from torch import nn

from penstock.errors import PipelineError
from penstock.ir.kinds import Kind
from penstock.pipelining.stage import _PipelineStageBase
from penstock.runtime.batch import Value

KINDS: Mapping[str, tuple[Kind, ...]] = {
    "forward_one_chunk": (Kind.F,),
    "backward_one_chunk": (Kind.B, Kind.I),
    "backward_weight_one_chunk": (Kind.W,),
    "perform_reduce_grad": (Kind.REDUCE_GRAD,),
}
"""The methods that run actions of these kinds."""

FORWARD = "forward_maybe_with_nosync"
"""The method that calls the module."""

_UNUSED = (
    "backward_maybe_with_nosync",
    "scale_grads",
    "get_fwd_recv_ops",
    "get_fwd_send_ops",
    "get_bwd_recv_ops",
    "get_bwd_send_ops",
    "set_local_fwd_input",
    "get_local_bwd_output",
    "set_local_bwd_input",
    "_retrieve_recv_activations",
    "_retrieve_recv_grads",
)
"""The methods for which the runtime has its own way."""

Stages: TypeAlias = Iterable[_PipelineStageBase]


class Driver(Protocol):
    """Runs the actions of a step when they are called for."""

    def drive(self, kind: Kind, stage: int, microbatch: int | None) -> None:
        """Run this action, which is the current one."""

    def drive_forward(self, stage: _PipelineStageBase, microbatch: int, args: Value, kwargs: Value) -> Value:
        """Run a forward with the arguments of the step; gives the output of the module."""


class _StepMethods(_PipelineStageBase):
    _driver: Driver

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: Value = (),
        kwargs: Value = None,
        save_forward_output: bool = True,  # noqa: ARG002, FBT001, FBT002 -- torch's signature
    ) -> Value:
        return self._driver.drive_forward(self, fwd_chunk_id, args, kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Value = None,  # noqa: ARG002
        full_backward: bool = True,  # noqa: FBT001, FBT002
        last_backward: bool = False,  # noqa: ARG002, FBT001, FBT002
    ) -> None:
        self._driver.drive(Kind.B if full_backward else Kind.I, self.stage_index, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        self._driver.drive(Kind.W, self.stage_index, bwd_chunk_id)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:  # noqa: ARG002
        self._driver.drive(Kind.REDUCE_GRAD, self.stage_index, None)

    # the runtime passes values between stages of one rank

    def set_local_fwd_input(self, prev_stage_outputs: Value, mb_index: int) -> None:
        pass

    def get_local_bwd_output(self, mb_index: int) -> Value:
        pass

    def set_local_bwd_input(self, next_stage_bwd_outputs: Value, mb_index: int) -> None:
        pass


class StageForward(nn.Module):
    """A stage's module, called by the stage's own `forward_maybe_with_nosync`."""

    def __init__(self, stage: _PipelineStageBase) -> None:
        super().__init__()
        self.submod = stage.submod
        self._stage = stage

    def forward(self, *args: Value, **kwargs: Value) -> Value:
        """What the stage makes of the module's output."""
        return self._stage.forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]


def overrides(stage: _PipelineStageBase, name: str) -> bool:
    """Whether a subclass of torch's stages has a method of its own."""
    torchs = next(each for each in type(stage).__mro__ if each.__module__ == _PipelineStageBase.__module__)
    return getattr(type(stage), name) is not getattr(torchs, name)


def check_methods(stages: Stages) -> None:
    """Raise if methods of a stage were replaced in a way that would be ignored."""
    for stage in stages:
        unused = [name for name in _UNUSED if overrides(stage, name) or name in vars(stage)]
        if unused:
            raise PipelineError(
                f"stage {stage.stage_index} overrides {', '.join(unused)}, which would be ignored: Penstock "
                "sends messages, runs backwards and scales gradients itself; change the module instead, or "
                "register a function for an action"
            )
        if vars(stage).get("_forward_contexts"):  # torch 2.15
            raise PipelineError(
                f"stage {stage.stage_index} has a context of register_forward_context, which would be ignored: "
                "remove it, and enter the context in the module"
            )
        patched = [name for name in (*KINDS, FORWARD) if name in vars(stage)]
        if patched:
            raise PipelineError(
                f"{', '.join(patched)} of stage {stage.stage_index} is replaced on the object, which would be "
                "ignored: override it in a subclass of PipelineStage that calls super()"
            )


@contextmanager
def stages_driven_by(driver: Driver, stages: Stages) -> Iterator[None]:
    """During a step, methods of these stages that run an action run that of the driver."""
    classes = [(stage, type(stage)) for stage in stages]
    for stage, own in classes:
        stage.__class__ = type(own.__name__, (own, _StepMethods), {"__module__": own.__module__})
        vars(stage)["_driver"] = driver
    try:
        yield
    finally:
        for stage, own in classes:
            stage.__class__ = own
            del vars(stage)["_driver"]
