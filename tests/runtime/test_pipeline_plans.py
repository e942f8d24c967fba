"""Promise: the planner takes measured costs, and the runtime runs its plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import penstock
from penstock import Costs
from penstock.planning import Layer, Model
from penstock.runtime import Pipeline, split


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)))
    return nn.Sequential(nn.Linear(3, 4), blocks, nn.Linear(4, 2))


def test_costs_profiled_on_one_device_are_used_to_plan_for_several(tmp_path: Path) -> None:
    stages = split(model(), layout="E|(t|)*6L")
    pipeline = Pipeline(stages, "interleaved-1f1b", microbatches=4, loss=mse_loss)
    with pipeline.profile() as profile:
        pipeline.step(torch.randn(8, 3), target=torch.randn(8, 2))
    profile.costs.write(tmp_path / "costs.toml")
    plan = penstock.plan(tmp_path / "costs.toml", ranks=2, samples=8, seconds=0)
    assert sum(plan.best.configuration.counts) == len(stages)
    measured = profile.costs.forward
    assert isinstance(measured, tuple)
    planned = plan.best.configuration.costs.per_stage("forward", plan.best.schedule.num_stages)
    assert sum(planned) == pytest.approx(sum(measured) * plan.best.configuration.samples)


def test_a_written_plan_splits_the_model_and_runs(tmp_path: Path) -> None:
    costs = Costs(activation=1)
    ends = Layer("embedding", costs, "embedding"), Layer("head", costs, "head")
    layers = (ends[0], *(Layer("block", costs) for _ in range(6)), ends[1])
    penstock.plan(Model(layers), ranks=1, samples=8, seconds=0).write(tmp_path)
    best = json.loads((tmp_path / "plan.json").read_text())
    stages = split(model(), layout=best["layout"])
    pipeline = Pipeline(stages, penstock.read(tmp_path / "schedule.json"), loss=mse_loss)
    result = pipeline.step(torch.randn(8, 3), target=torch.randn(8, 2))
    assert result.loss is not None


def test_the_layout_of_a_plan_splits_the_model_into_its_stages() -> None:
    block = Layer("block", Costs())
    layers = (Layer("embedding", Costs(forward=0), "embedding"), *[block] * 6, Layer("head", Costs(), "head"))
    plan = penstock.plan(Model(layers), ranks=3, samples=6, stages_per_rank=2, seconds=0)
    stages = split(model(), layout=plan.request.model.layout(plan.best.configuration.counts))
    assert len(stages) == plan.best.schedule.num_stages == 6
