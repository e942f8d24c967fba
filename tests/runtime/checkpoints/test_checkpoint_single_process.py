"""Promise: a checkpoint of one process restores everything that it stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from penstock import CheckpointError
from penstock.runtime import load_checkpoint, save_checkpoint
from tests.support.checkpoints import error_of, same, small


def train(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        model(torch.randn(4, 2, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def same_state(one: Optimizer, other: Optimizer) -> bool:
    ours, theirs = one.state_dict()["state"], other.state_dict()["state"]
    return ours.keys() == theirs.keys() and all(
        same(value, theirs[index].get(key, "nothing")) for index in ours for key, value in ours[index].items()
    )


# --- what is restored ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AdamW, SGD, Adagrad, Adafactor, RMSprop])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_and_option_is_restored_bitwise(tmp_path: Path, kind: Any, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1} | ({"momentum": 0.9} if kind is SGD else {})
    model, again = small(dtype=dtype), small(dtype=dtype)
    optimizer, fresh = kind(model.parameters(), **options), kind(again.parameters())
    train(model, optimizer)
    save_checkpoint(tmp_path / "c", model, optimizer, extra={"step": 2})
    assert load_checkpoint(tmp_path / "c", again, fresh) == {"step": 2}
    assert all(same(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert same_state(optimizer, fresh)
    assert fresh.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_state_keeps_a_higher_precision_than_the_weights(tmp_path: Path) -> None:
    model, again = nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer, fresh = SGD(model.parameters(), momentum=0.9), SGD(again.parameters(), momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "momentum_buffer": torch.rand_like(parameter, dtype=torch.float64),
            "seen": 3,
        }
    save_checkpoint(tmp_path / "c", model, optimizer)
    load_checkpoint(tmp_path / "c", again, fresh)
    for one, other in zip(model.parameters(), again.parameters()):
        assert same(optimizer.state[one]["momentum_buffer"], fresh.state[other]["momentum_buffer"])
        assert fresh.state[other]["seen"] == 3


def test_an_optimizer_without_a_step_is_saved_and_can_load_a_state(tmp_path: Path) -> None:
    model = small()
    optimizer = AdamW(model.parameters(), lr=0.5)
    save_checkpoint(tmp_path / "c", model, optimizer)
    train(model, optimizer)
    load_checkpoint(tmp_path / "c", model, optimizer)
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_options_are_restored_by_name_for_any_parameter_groups(tmp_path: Path) -> None:
    model, again = small(), small()
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    undecayed: dict[str, Any] = {"params": rest, "weight_decay": 0.0, "betas": (0.5, 0.6)}
    optimizer = AdamW([undecayed, {"params": weights}], lr=0.25)
    train(model, optimizer)
    save_checkpoint(tmp_path / "c", model, optimizer)
    fresh = AdamW([{"params": [parameter]} for parameter in again.parameters()], lr=torch.tensor(9.0))
    load_checkpoint(tmp_path / "c", again, fresh)
    for group in fresh.param_groups:
        decays = group["params"][0].dim() > 1
        assert group["weight_decay"] == (0.01 if decays else 0.0)
        assert group["betas"] == ((0.9, 0.999) if decays else (0.5, 0.6))
        assert same(group["lr"], torch.tensor(0.25))
    (problem,) = error_of(tmp_path / "c", again, AdamW(again.parameters()))
    assert problem.startswith(
        "group 0 of the optimizer has parameters that had different options: 'first.weight' and"
    )
    assert "weight_decay 0.01 and 0.0" in problem


def test_extra_is_restored_and_can_hold_a_scheduler_state(tmp_path: Path) -> None:
    model = small()
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = MultiStepLR(optimizer, [2, 4])
    extra = {
        "rng": torch.get_rng_state().tolist(),
        "pair": (1, [2.5, None]),
        7: True,
        "plan": scheduler.state_dict(),
    }
    save_checkpoint(tmp_path / "c", model, optimizer, extra)
    found = load_checkpoint(tmp_path / "c", model, optimizer)
    assert found == extra
    scheduler.load_state_dict(found["plan"])
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    with pytest.raises(CheckpointError, match=r"extra\['a'\]\[1\] is a Tensor, which cannot be stored"):
        save_checkpoint(tmp_path / "c", model, extra={"a": [0, torch.zeros(1)]})
    assert load_checkpoint(tmp_path / "c", model) == extra


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 10),
    "one cycle, which changes momentum too": lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=10),
    "warm-up and decay": lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, lambda step: step / 3), ExponentialLR(optimizer, 0.5)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_learning_rate_scheduler_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path, name: str) -> None:
    def made() -> tuple[Optimizer, LRScheduler]:
        optimizer = SGD(model.parameters(), lr=0.8, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: Optimizer, scheduler: LRScheduler, steps: int) -> list[tuple[float, float]]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        return found

    model = small()
    optimizer, scheduler = made()
    assert len(set(rates(optimizer, scheduler, 2))) == 2
    save_checkpoint(tmp_path / "c", model, optimizer, {"scheduler": scheduler.state_dict()})
    resumed, its_scheduler = made()
    its_scheduler.load_state_dict(load_checkpoint(tmp_path / "c", model, resumed)["scheduler"])
    assert rates(resumed, its_scheduler, 5) == rates(optimizer, scheduler, 5)


def test_a_scheduler_can_continue_from_the_step_alone(tmp_path: Path) -> None:
    model = small()
    optimizer = SGD(model.parameters(), lr=0.8)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    save_checkpoint(tmp_path / "c", model, optimizer, {"step": 3})
    resumed = SGD(model.parameters(), lr=0.8)
    step = load_checkpoint(tmp_path / "c", model, resumed)["step"]
    again = LambdaLR(resumed, lambda step: 1 / (1 + step), last_epoch=step - 1)
    assert again.get_last_lr() == scheduler.get_last_lr()


def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    model, again = small(), small()
    model.first = checkpoint_wrapper(model.first)
    compiled: Any = torch.compile(model, backend="eager")
    save_checkpoint(tmp_path / "c", compiled)
    load_checkpoint(tmp_path / "c", again)
    assert same(again.first.weight, next(model.first.parameters()))
    load_checkpoint(tmp_path / "c", compiled)


def test_a_weight_with_two_names_is_stored_under_both_and_its_state_once(tmp_path: Path) -> None:
    def tied() -> nn.ModuleDict:
        made = nn.ModuleDict({"embed": nn.Linear(3, 3), "head": nn.Linear(3, 3, bias=False)})
        made["head"].weight = made["embed"].weight
        return made

    model, again = tied(), tied()
    optimizer, fresh = AdamW(model.parameters()), AdamW(again.parameters())
    model["head"](model["embed"](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c", model, optimizer)
    load_checkpoint(tmp_path / "c", again, fresh)
    assert same_state(optimizer, fresh)
    assert same(again["head"].weight, model["embed"].weight)
    apart: Any = nn.ModuleDict({"embed": nn.Linear(3, 3), "head": nn.Linear(3, 3, bias=False)})
    alone = AdamW(apart.parameters())
    load_checkpoint(tmp_path / "c", apart, alone)
    assert same(apart["head"].weight, model["embed"].weight)
    states = [alone.state[apart[name].weight]["exp_avg"] for name in ("embed", "head")]
    assert same(states[0], states[1])
    assert states[0] is not states[1]
    save_checkpoint(tmp_path / "c", apart, alone)
    assert error_of(tmp_path / "c", again) == [
        "'embed.weight' and head.weight are one weight in the model, but not in the checkpoint"
    ]
