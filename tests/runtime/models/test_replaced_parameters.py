"""Promise: an optimizer that was created before `materialize` raises at its first step."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW

from penstock.errors import PipelineError
from penstock.runtime import Pipeline, materialize
from penstock.runtime.models.materialize import _replaced


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_an_optimizer_created_before_materialize_raises_at_its_first_step(kind: type[SGD]) -> None:
    stage, other = on_meta(), nn.Linear(2, 2)
    optimizer = kind([*stage.parameters(), *other.parameters()], lr=0.1)
    pipeline = Pipeline([materialize(stage)], "1f1b", microbatches=2, loss=mse_loss)
    pipeline.step(torch.ones(2, 4), target=torch.ones(2, 4))
    with pytest.raises(PipelineError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        f"4 of 6 parameters of this {kind.__name__} were replaced by materialize() after it was created, and "
        "would not be trained: '0.weight', '0.bias', '1.weight', '1.bias'. Create the optimizer after "
        "materialize(), as with pipeline.parameters()"
    )


def test_other_optimizers_step_and_nothing_is_kept() -> None:
    stage = materialize(on_meta())
    optimizer = SGD(stage.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in stage.parameters()]
    stage(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(*pair) for pair in zip(before, stage.parameters()))
    gc.collect()
    assert not len(_replaced)


def test_parameters_that_stay_are_not_remembered() -> None:
    stage = nn.Linear(2, 2)
    optimizer = SGD(stage.parameters(), lr=0.1)
    materialize(stage)
    stage(torch.ones(2)).sum().backward()
    optimizer.step()
