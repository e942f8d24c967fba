"""Labels of actions for torch's profiler, on stages of torch whose schedule records none (1F1B)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

__all__ = ["label_actions"]


def label_actions(*stages: Any) -> None:
    """Record every forward and backward of these `PipelineStage`s as a range such as `PP:0F3`.

    Torch's multi-stage schedules record them already; `Schedule1F1B` does not, and without ranges a trace has
    no times of a GPU per action. Call it once, before the steps that are profiled.
    """
    for stage in stages:
        stage.forward_one_chunk = _labelled(stage, "forward_one_chunk", "F")
        stage.backward_one_chunk = _labelled(stage, "backward_one_chunk", "B")


def _labelled(stage: Any, method: str, kind: str) -> Callable[..., Any]:
    run = getattr(stage, method)

    @wraps(run)
    def labelled(chunk: int, *args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(f"PP:{stage.stage_index}{kind}{chunk}"):
            return run(chunk, *args, **kwargs)

    return labelled
