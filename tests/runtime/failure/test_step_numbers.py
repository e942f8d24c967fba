"""Promise: logs, errors and checkpoints number steps alike: from 1, without evals, and after a resume."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock.errors import PenstockError, PipelineError
from penstock.runtime import Pipeline
from tests.support.pool import Pools


class FailsOnZeros(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not x.any():
            raise ValueError("there are only zeros")
        return super().forward(x)


def first_lines(resumed_at: int) -> list[str]:
    """The first lines of the errors of a step and of an eval, each after two steps and an eval."""
    good, bad = torch.ones(4, 2), torch.zeros(4, 2)
    found = []
    for name in ("step", "eval"):
        stages: dict[int, nn.Module] = {0: FailsOnZeros(2, 2), 1: nn.Linear(2, 2)}
        with closing(Pipeline(stages, "1f1b", microbatches=2, loss=mse_loss)) as pipeline:
            pipeline.completed_steps = resumed_at
            for call in (pipeline.step, pipeline.eval, pipeline.step):
                call(good, target=good)
            assert pipeline.completed_steps == resumed_at + 2
            try:
                getattr(pipeline, name)(bad, target=good)
            except PenstockError as error:
                found.append(str(error).splitlines()[0])
            assert pipeline.completed_steps == resumed_at + 2
    return found


@pytest.mark.parametrize("resumed_at", [0, 100])
def test_errors_count_steps_from_1_without_evals_and_go_on_after_a_resume(
    pools: Pools, resumed_at: int
) -> None:
    where = "failed on rank 0, stage 0, microbatch 0, in 0F0"
    expected = [f"step {resumed_at + 3} {where}", f"the eval after step {resumed_at + 2} {where}"]
    assert pools(2).run(first_lines, resumed_at) == [expected, expected]


def test_ranks_that_resume_at_different_steps_are_told_so(pools: Pools) -> None:
    for message in pools(2).run(resume_apart):
        assert "completed calls of step() and eval(): rank 0: 0; rank 1: 1" in message


def resume_apart() -> str:
    stages: dict[int, nn.Module] = {0: nn.Linear(2, 2), 1: nn.Linear(2, 2)}
    with closing(Pipeline(stages, "1f1b", microbatches=2, loss=mse_loss)) as pipeline:
        pipeline.completed_steps = pipeline.rank
        try:
            pipeline.step(torch.ones(4, 2), target=torch.ones(4, 2))
        except PenstockError as error:
            return str(error)
    return ""


def test_a_number_of_steps_that_cannot_be_is_refused() -> None:
    with closing(Pipeline([nn.Linear(2, 2)], "1f1b", microbatches=2, loss=mse_loss)) as pipeline:
        for wrong in (-1, 1.5):
            with pytest.raises(PipelineError, match=r"completed_steps must be a whole number of at least 0"):
                pipeline.completed_steps = wrong  # type: ignore[assignment]
