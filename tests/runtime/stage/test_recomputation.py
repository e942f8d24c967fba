"""Promise: a schedule that recomputes trains as one process does, bit for bit, and holds fewer activations."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock import Kind, PipelineError, Schedule, simulate
from penstock.lowering import Recompute
from penstock.runtime import Pipeline

# --- on one rank -----------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Uses every kind of random numbers, and counts its calls in a buffer that it uses."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        drawn = random.random() + float(np.random.random())  # noqa: NPY002
        return torch.nn.functional.dropout(self.layer(x) * self.calls, 0.3) * drawn


def train(schedule: Schedule, *modules: nn.Module) -> tuple[list[Any], int]:
    """Two steps on one rank: losses, gradients, buffers, random numbers; and the peak of live activations."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    batch = torch.randn(8, 4)
    for module in modules:
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    with closing(Pipeline(dict(enumerate(modules)), schedule, loss=nn.functional.mse_loss)) as pipeline:
        found: list[Any] = [pipeline.step(batch, target=batch).loss for _ in range(2)]
        found += [p.grad for module in modules for p in module.parameters()]
        found += [buffer for module in modules for buffer in module.buffers()]
        return [*found, torch.rand(2), random.random()], pipeline.peak_live_activations


ORDER = Schedule.parse("0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2 0F3 1F3 1B3 0B3")


def test_random_numbers_and_buffers_are_those_of_the_first_forward() -> None:
    plain, most = train(ORDER, Noisy(), Noisy())
    recomputed, fewest = train(Recompute()(ORDER), Noisy(), Noisy())
    for left, right in zip(plain, recomputed, strict=True):
        assert torch.equal(torch.as_tensor(left), torch.as_tensor(right))
    assert most == max(simulate(ORDER).peak_memory) == 4
    assert fewest == max(simulate(Recompute()(ORDER)).peak_memory) == 1


class CountsSaved(nn.Module):
    """Remembers its intermediate result weakly, to see whether it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.alive: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).exp()
        self.alive.append(StorageWeakRef(hidden.untyped_storage()))  # type: ignore[no-untyped-call]
        return torch.add((hidden * hidden).sum(-1, keepdim=True), x)

    def living(self) -> list[bool]:
        return [not each.expired() for each in self.alive]


def test_what_f_computes_is_freed_until_it_is_recomputed() -> None:
    module, seen = CountsSaved(), []

    def look(custom: Any) -> None:
        custom.run()
        seen.append(module.living())

    schedule = Schedule.parse("0F0 0F1 0RECOMPUTE0 0B0 0B1")
    functions: dict[Kind | str, Any] = dict.fromkeys(("F", "RECOMPUTE", "B"), look)
    with closing(Pipeline({0: module}, schedule, loss=nn.functional.mse_loss, functions=functions)) as pipeline:
        pipeline.step(torch.randn(4, 4), target=torch.randn(4, 4))
    assert seen == [[False], [False, True], [False, True, True], [False, True, False], [False, False, False]]


class InPlace(nn.Module):
    """Changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x.mul_(2)))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_changes_its_input_in_place_cannot_be_recomputed(stage: int) -> None:
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    modules[stage] = InPlace()  # type: ignore[call-overload]
    with pytest.raises(PipelineError, match=f"stage {stage} changes its input in place"):
        train(Recompute()(ORDER), *modules)


class Counting(nn.Linear):
    """Multiplies its output by the number of its calls, which is no buffer."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class OwnGenerator(nn.Linear):
    """Drops elements by random numbers of its own generator."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.random = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(x.shape, generator=self.random)


@pytest.mark.parametrize("kind", [Counting, OwnGenerator])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_forward_that_gives_another_result_when_it_is_repeated_is_rejected(
    kind: type[nn.Linear], stage: int
) -> None:
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    modules[stage] = kind(4, 4)
    train(ORDER, *modules)
    with pytest.raises(PipelineError, match=f"stage {stage}: RECOMPUTE of microbatch 0 gives another result"):
        train(Recompute()(ORDER), *modules)


class CallNumber(nn.Module):
    """Returns the number of its calls beside its output, as a number or as a tensor without a gradient."""

    def __init__(self, *, as_tensor: bool) -> None:
        super().__init__()
        self.layer, self.calls, self.as_tensor = nn.Linear(4, 4), 0, as_tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | int]:
        self.calls += 1
        return self.layer(x), torch.tensor(self.calls) if self.as_tensor else self.calls


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: Tensor | int) -> Tensor:
        return x * scale


@pytest.mark.parametrize("as_tensor", [False, True])
def test_so_is_one_whose_values_without_a_gradient_differ(*, as_tensor: bool) -> None:
    modules = CallNumber(as_tensor=as_tensor), Scaled()
    train(ORDER, *modules)
    with pytest.raises(PipelineError, match="stage 0: RECOMPUTE of microbatch 0 gives another result"):
        train(Recompute()(ORDER), *modules)


class Conjugated(nn.Linear):
    """Returns a complex tensor that is conjugated lazily."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(super().forward(x), x).conj()


class Real(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.real + x.imag


def test_a_lazily_conjugated_output_is_recomputed() -> None:
    plain, _ = train(ORDER, Conjugated(4, 4), Real())
    recomputed, _ = train(Recompute()(ORDER), Conjugated(4, 4), Real())
    assert [torch.as_tensor(each).tolist() for each in plain] == [
        torch.as_tensor(each).tolist() for each in recomputed
    ]


class AveragedLoss(nn.Module):
    """A loss that divides by its moving average, which is a buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(output, target)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss / self.average


def test_buffers_of_a_loss_are_those_of_the_first_forward() -> None:
    found = []
    for schedule in (ORDER, Recompute()(ORDER)):
        torch.manual_seed(0)
        modules, loss, x = {0: nn.Linear(4, 4), 1: nn.Linear(4, 4)}, AveragedLoss(), torch.randn(8, 4)
        with closing(Pipeline(modules, schedule, loss=loss)) as pipeline:
            result = pipeline.step(x, target=x)
            average = loss.average
            pipeline.eval(x, target=x)
            assert (loss.average is average, loss.training) == (True, True)
        found.append((result.loss, loss.average, modules[0].weight.grad))
    assert all(torch.equal(torch.as_tensor(one), torch.as_tensor(other)) for one, other in zip(*found))


def test_evaluation_leaves_recomputation_out() -> None:
    modules = {0: Noisy(), 1: Noisy()}
    with closing(Pipeline(modules, Recompute()(ORDER), loss=nn.functional.mse_loss)) as pipeline:
        assert pipeline.eval(torch.randn(8, 4), target=torch.randn(8, 4)).loss is not None
    assert modules[0].calls == 4
