"""Promise: a pipeline of a single rank works without a process group."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.errors import BatchError, PipelineError
from penstock.runtime import REPLICATE, Pipeline, split

M = 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(4, 4), nn.Tanh()]
    return nn.Sequential(*layers)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def plain(whole: nn.Module) -> list[Tensor]:
    x, y = batch()
    for rows, target in zip(x.chunk(M), y.chunk(M)):
        torch.autograd.backward(mse_loss(whole(rows), target) / M)
    return gradients(whole)


@pytest.mark.parametrize("family", ["1F1B", "GPipe", "interleaved-1f1b", "InterleavedZeroBubble", "looped-bfs"])
def test_a_family_is_built_by_name_for_the_given_stages(family: str) -> None:
    whole = model()
    wanted = plain(copy.deepcopy(whole))
    single = family in ("1F1B", "GPipe")
    stages = split(whole, at=[] if single else ["2", "4"])
    pipeline = Pipeline(stages, family, microbatches=M, loss=mse_loss)
    x, y = batch()
    pipeline.step(x, target=y)
    assert pipeline.schedule.num_stages == len(stages)
    assert all(torch.allclose(*pair, rtol=1e-6) for pair in zip(gradients(whole), wanted, strict=True))


@pytest.mark.parametrize("ending", ["csv", "json"])
def test_a_schedule_is_read_from_a_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"mine.{ending}"
    penstock.build("zb-h1", ranks=1, microbatches=M).write(path)
    whole = model()
    wanted = plain(copy.deepcopy(whole))
    pipeline = Pipeline([whole], path, loss=mse_loss)
    pipeline.step(*batch()[:1], target=batch()[1])
    assert all(map(torch.equal, gradients(whole), wanted))


def test_every_action_is_a_range_of_torchs_profiler() -> None:
    pipeline = Pipeline([model()], "zb-h1", microbatches=2, loss=mse_loss)
    x, y = batch()
    pipeline.step(x, target=y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        pipeline.step(x, target=y)
    seen = {event.key for event in profiler.key_averages() if event.key.startswith("PP:")}
    assert seen == {f"PP:0{kind}{microbatch}" for kind in "FIW" for microbatch in (0, 1)}


def test_a_warning_says_once_that_compiled_modules_are_not_deferred(caplog: pytest.LogCaptureFixture) -> None:
    whole = model()
    whole[0].compile(backend="eager")
    wanted = plain(copy.deepcopy(whole))
    with caplog.at_level(logging.WARNING, "penstock"):
        pipeline = Pipeline([whole], "zb-h1", microbatches=M, loss=mse_loss)
        for _ in range(2):
            pipeline.step(*batch()[:1], target=batch()[1])
    assert [record.message for record in caplog.records] == [
        "stage 0: the weight gradients of compiled modules are computed in I, not in W: 0"
    ]
    assert all(torch.allclose(g, 2 * w) for g, w in zip(gradients(whole), wanted, strict=True))


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.outputs: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class Dropped(nn.Module):
    """A parametrization that draws random numbers."""

    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.dropout(weight, 0.5)


def test_a_parametrized_weight_is_computed_once_per_forward() -> None:
    found = []
    for family in ("1f1b", "zb-h1"):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        nn.utils.parametrize.register_parametrization(layer, "weight", Dropped(), unsafe=True)
        pipeline = Pipeline([layer], family, microbatches=M, loss=mse_loss)
        torch.manual_seed(1)
        found.append(
            (pipeline.step(*batch()[:1], target=batch()[1]).loss, *map(Tensor.tolist, gradients(layer)))
        )
    assert found[0] == found[1]


class InPlace(nn.Module):
    """Changes its input in place, and keeps it for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.sub_(0.5))
        return y


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "zb-h1"])
def test_the_first_stage_may_change_its_input_in_place(family: str) -> None:
    torch.manual_seed(0)
    whole = InPlace()
    wanted = plain(copy.deepcopy(whole))
    pipeline = Pipeline([whole], family, microbatches=M, loss=mse_loss)
    pipeline.step(*batch()[:1], target=batch()[1])
    assert all(map(torch.equal, gradients(whole), wanted))


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.vmap(self.layer)(x)
        return y


def test_vmap_over_a_layer_works_under_a_split_backward() -> None:
    torch.manual_seed(0)
    whole = Mapped()
    wanted = plain(copy.deepcopy(whole))
    Pipeline([whole], "zb-h1", microbatches=M, loss=mse_loss).step(*batch()[:1], target=batch()[1])
    assert all(torch.allclose(*pair) for pair in zip(gradients(whole), wanted, strict=True))


@pytest.mark.parametrize(
    ("loss", "target", "message"),
    [
        (lambda output, target: mse_loss(output, target).detach(), batch()[1], "the loss has no gradient"),
        (mse_loss, None, "called without a target, because this call has none"),
        (lambda output, _: output, batch()[1], "must return a tensor with one element"),
    ],
)
def test_a_loss_that_trains_nothing_is_rejected(loss: Any, target: Any, message: str) -> None:
    pipeline = Pipeline([model()], "1f1b", microbatches=M, loss=loss)
    with pytest.raises(PipelineError, match=message):
        pipeline.step(batch()[0], target=target)


def test_a_microbatch_without_tokens_passes_the_check_for_finite_numbers() -> None:
    whole = nn.Linear(4, 3)
    targets = torch.tensor([0, 1, -100, -100, 2, 0, 1, 2])
    pipeline = Pipeline(
        [whole],
        "1f1b",
        microbatches=M,
        loss=nn.functional.cross_entropy,
        tokens=lambda part: int((part != -100).sum()),
        check_finite=True,
    )
    result = pipeline.step(batch()[0], target=targets)
    wanted = nn.functional.cross_entropy(whole(batch()[0]), targets)
    assert result.loss == pytest.approx(wanted.item())


def test_outputs_that_cannot_be_merged_can_be_returned_as_a_list() -> None:
    with Pipeline([model()], "1f1b", microbatches=2, loss=mse_loss, merge=REPLICATE) as pipeline:
        outputs = pipeline.eval([torch.ones(1, 4), torch.ones(3, 4)], return_outputs=True).outputs
    assert [len(output) for output in outputs] == [1, 3]
    assert repr(pipeline) == "<Pipeline 1f1b: rank 0 of 1, stage 0>"


def test_an_exception_is_raised_unchanged() -> None:
    def bad(_output: Tensor, _target: Tensor) -> Tensor:
        raise KeyError("mine")

    pipeline = Pipeline([model()], "1f1b", microbatches=M, loss=bad)
    with pytest.raises(KeyError, match="mine"):
        pipeline.step(*batch()[:1], target=batch()[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedule": "1f1b", "microbatches": None}, "give microbatches= as well"),
        ({"timeout": 0}, r"timeout= must be a finite number of seconds above 0 \(given 0\)"),
        ({"timeout": -1.5}, r"timeout= must be .*\(given -1.5\)"),
        ({"timeout": "60"}, r"timeout= must be .*\(given '60'\)"),
        ({"timeout": True}, r"timeout= must be .*\(given True\)"),
        ({"timeout": float("nan")}, r"timeout= must be .*\(given nan\)"),
        ({"timeout": float("inf")}, r"timeout= must be .*\(given inf\)"),
        ({"schedule": None}, "a schedule is the name of a family"),
        ({"functions": {"SEND_F": print}}, "a function cannot replace 'SEND_F'"),
        ({"functions": {"Q": print}}, "only F, I, W, B"),
        ({"schedule": penstock.build("1f1b", ranks=2, microbatches=M)}, "is for 2 ranks, but .* has 1"),
        ({"schedule": penstock.build("1f1b", ranks=1, microbatches=8)}, "8 microbatches, but microbatches=4"),
    ],
)
def test_wrong_arguments_are_rejected(given: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": M, "loss": mse_loss} | given
    with pytest.raises(PipelineError, match=message):
        Pipeline([model()], **options)


def test_one_module_is_not_a_list_of_stages() -> None:
    with pytest.raises(
        PipelineError, match=r"`stages` is one module: .* as \[module\], or the result of split"
    ):
        Pipeline(model(), "1f1b", microbatches=M, loss=mse_loss)  # type: ignore[arg-type]


def test_modules_on_the_meta_device_are_rejected() -> None:
    with pytest.raises(PipelineError, match=r"on the meta device: .*materialize"):
        Pipeline([model().to("meta")], "1f1b", microbatches=M, loss=mse_loss)


def test_a_profile_of_one_stage_has_no_link_costs() -> None:
    pipeline = Pipeline([model()], "zb-h1", microbatches=2, loss=mse_loss)
    with pipeline.profile() as profile:
        with pytest.raises(PipelineError, match="nothing was recorded"):
            _ = profile.timeline
        pipeline.step(*batch()[:1], target=batch()[1])
    assert profile.costs.bandwidth is None
    assert penstock.simulate(profile.timeline.schedule, profile.costs).makespan > 0


@pytest.mark.parametrize("how", ["closed", "failed"])
def test_weight_gradients_are_deferred_after_a_new_connection_too(how: str) -> None:
    whole = Both()
    weights_in_i: list[bool] = []

    def look(custom: Any) -> None:
        custom.run()
        weights_in_i.append(whole.layer.weight.grad is not None)

    functions: dict[Any, Any] = {"I": look}
    pipeline = Pipeline([whole], "zb-h1", microbatches=1, loss=mse_loss, functions=functions)
    if how == "closed":
        pipeline.close()
    else:
        with pytest.raises(BatchError):
            pipeline.step(torch.ones(0, 4), target=batch()[1])
    for _ in range(2):
        pipeline.step(*batch()[:1], target=batch()[1])
        whole.zero_grad()
    assert weights_in_i == [True, False]  # the first microbatch shows which weights can be deferred


def test_a_step_connects_once() -> None:
    pipeline = Pipeline([model()], "1f1b", microbatches=M, loss=mse_loss)
    runner = pipeline._runner
    x, y = batch()
    with mock.patch.object(runner, "connect", wraps=runner.connect) as connect:
        pipeline.step(x, target=y)
        assert connect.call_count == 1
        pipeline.eval(x, target=y)
        assert connect.call_count == 2
