"""What a connected pipeline has built in: a schedule object must not change it after the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch.distributed.pipelining.schedules import _PipelineSchedule

from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.pipelining.stage import _PipelineStageBase
from penstock.runtime.batch import Value

Settings: TypeAlias = Mapping[str, Value]

_UNUSED = ("_initialize_stage", "_initialize_stages", "_maybe_compute_loss", "_maybe_get_loss")
"""The methods of schedules that torch calls in every step and we do not."""

_PACKAGES = ("torch.distributed.pipelining", "penstock.pipelining")


def settings_of(owner: _PipelineSchedule, stages: Sequence[_PipelineStageBase]) -> Settings:
    """The settings by name; objects count as changed if they are replaced."""
    return {
        "_n_microbatches": owner._n_microbatches,
        "scale_grads": owner.scale_grads,
        "_output_merge_spec": owner._output_merge_spec,
        "_loss_fn": owner._loss_fn is None,
        **{f"submod of stage {stage.stage_index}": stage.submod for stage in stages},
        **{f"dw_builder of stage {stage.stage_index}": stage.dw_builder is None for stage in stages},
    }


def check_unchanged(before: Settings, owner: _PipelineSchedule, stages: Sequence[_PipelineStageBase]) -> None:
    """Raise if a setting differs from the first step, or a method was overridden that would be ignored."""
    now = settings_of(owner, stages)
    changed = [
        name for name, value in now.items() if value is not before[name] and not _equal(value, before[name])
    ]
    if changed:
        raise PipelineError(
            f"{listed(changed)} changed after the first step, which would be ignored: create another schedule "
            "object with these stages"
        )
    own = [name for name in _UNUSED if name in vars(owner) or not _is_known(getattr(type(owner), name, None))]
    if own:
        raise PipelineError(
            f"{type(owner).__name__} overrides {', '.join(own)}, which would be ignored: Penstock needs no "
            "trial step, and computes losses in the last stage's forward; override _compute_loss, or "
            "_step_microbatches to run steps on torch's stages"
        )


def _equal(one: Value, other: Value) -> bool:
    return isinstance(one, int) and isinstance(other, int) and one == other


def _is_known(method: Value) -> bool:
    return method is None or method.__module__.startswith(_PACKAGES)
