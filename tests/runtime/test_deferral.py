"""Promises of the split backward: the gradients of a plain one to the last bit, and no trace left behind."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from penstock.errors import PipelineError
from penstock.runtime.deferral import Deferral, register_layer
from penstock.runtime.layer_rules import _KNOWN, Tensors

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

Inputs = list[Tensor]
Run = Callable[[nn.Module, Inputs], None]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def upstream(output: Tensor) -> Tensor:
    return numbers(*output.shape, seed=1).to(output.dtype)


def plainly(module: nn.Module, inputs: Inputs) -> None:
    for x in inputs:
        output = module(x)
        output.backward(upstream(output))


def split(module: nn.Module, inputs: Inputs) -> None:
    deferral = Deferral(module)
    for x in inputs:
        with deferral.installed():
            output = module(x)
        with deferral.put_aside() as jobs:
            output.backward(upstream(output))
        jobs.run()


def whole(module: nn.Module, inputs: Inputs) -> None:
    with Deferral(module).installed():
        plainly(module, inputs)


def gradients(module: nn.Module, inputs: Inputs, run: Run) -> dict[str, Tensor | None]:
    """What `run` leaves in the parameters of a copy of the module, and in the inputs."""
    module = copy.deepcopy(module)
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    run(module, inputs)
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    found.update({f"input {place}": x.grad for place, x in enumerate(inputs)})
    return found


def assert_as_plain(module: nn.Module, *inputs: Tensor, runs: tuple[Run, ...] = (split, whole)) -> None:
    wanted = gradients(module, list(inputs), plainly)
    assert any(gradient is not None for gradient in wanted.values())
    for run in runs:
        for name, gradient in gradients(module, list(inputs), run).items():
            expected = wanted[name]
            if gradient is None or expected is None:
                assert gradient is expected, name
            else:
                assert gradient.dtype is expected.dtype, name
                assert torch.equal(gradient, expected), name


@contextmanager
def without_onednn() -> Iterator[None]:
    # its kernels for bfloat16 crash on machines that announce AMX and do not grant it
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        yield


@contextmanager
def autocasting() -> Iterator[None]:
    with without_onednn(), torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def jobs_of(module: nn.Module, x: Tensor) -> int:
    deferral = Deferral(module)
    with deferral.put_aside() as jobs:
        output = module(x)
        output.backward(upstream(output))
    return len(jobs)


class Chain(nn.Sequential):
    """Runs its layers, then whatever `last` does with their output."""

    def __init__(self, *layers: nn.Module, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__(*layers)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))  # type: ignore[no-untyped-call]


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + functional.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y))
        output: Tensor = x + self.down(functional.gelu(self.up(x)))
        return output


# --- bit for bit -----------------------------------------------------------------------------------

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@DTYPES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape", [(33, 24), (5, 7, 24), (2, 3, 5, 24), (1, 24), (1, 1, 24), (24,), (0, 24)], ids=str
)
def test_a_linear_layer_gets_the_gradients_of_a_plain_backward(
    shape: tuple[int, ...], dtype: torch.dtype, *, bias: bool
) -> None:
    assert_as_plain(nn.Linear(24, 40, bias=bias, dtype=dtype), numbers(*shape, dtype=dtype).requires_grad_())


@DTYPES
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_takes_inputs_of_any_layout(dtype: torch.dtype, *, bias: bool) -> None:
    layer = nn.Linear(24, 40, bias=bias, dtype=dtype)
    for x in (
        numbers(24, 33, dtype=dtype).t(),
        numbers(5, 24, 7, dtype=dtype).transpose(1, 2),
        numbers(7, 5, 24, dtype=dtype).transpose(0, 1),
        numbers(5, 7, 48, dtype=dtype)[..., ::2],
        numbers(5, 1, 24, dtype=dtype).expand(5, 7, 24),
    ):
        inner = Chain(nn.Identity(), layer, last=lambda y: y * 2)
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        assert_as_plain(inner, leaf)
        assert_as_plain(
            nn.Sequential(View(x.shape, x.stride()), layer), numbers(5 * 7 * 48, dtype=dtype).requires_grad_()
        )


class View(nn.Module):
    def __init__(self, shape: torch.Size, stride: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.stride = shape, stride

    def forward(self, x: Tensor) -> Tensor:
        return x.as_strided(self.shape, self.stride)


def test_gradients_of_any_layout_are_taken() -> None:
    for last in (
        Tensor.sum,
        lambda y: y.transpose(0, 1).reshape(-1),
        lambda y: y[..., ::2],
        lambda y: y.mean(1),
    ):
        assert_as_plain(Chain(nn.Linear(8, 6), last=last), numbers(4, 5, 8).requires_grad_())
        assert_as_plain(Chain(nn.Linear(8, 6), last=last), numbers(4, 8).requires_grad_())


def test_a_linear_layer_whose_weight_is_stored_by_columns() -> None:
    layer = nn.Linear(24, 40)
    layer.weight = nn.Parameter(numbers(24, 40).t())
    assert_as_plain(layer, numbers(5, 7, 24).requires_grad_())


CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3), (2, 4, 11)),
    "1d same": (nn.Conv1d(4, 6, 3, padding="same", dilation=2), (2, 4, 11)),
    "1d even same": (nn.Conv1d(4, 6, 4, padding="same"), (2, 4, 11)),
    "2d": (nn.Conv2d(4, 6, 3), (2, 4, 9, 11)),
    "2d without bias": (nn.Conv2d(4, 6, 3, bias=False), (2, 4, 9, 11)),
    "2d strided": (nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(2, 1)), (2, 4, 13, 11)),
    "2d valid": (nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 9, 11)),
    "2d half even same": (nn.Conv2d(4, 6, (2, 3), padding="same"), (2, 4, 9, 11)),
    "2d grouped": (nn.Conv2d(4, 8, 3, groups=4), (2, 4, 9, 11)),
    "2d reflecting": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 11)),
    "2d without batch": (nn.Conv2d(4, 6, 3), (4, 9, 11)),
    "3d": (nn.Conv3d(2, 3, 3, padding=1, stride=2), (2, 2, 5, 6, 7)),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3, stride=3, output_padding=2), (2, 4, 11)),
    "transposed 2d": (
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        (2, 4, 5, 6),
    ),
    "transposed 3d": (nn.ConvTranspose3d(2, 3, 2, dilation=2, bias=False), (2, 2, 4, 4, 4)),
}


@DTYPES
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_gets_the_gradients_of_a_plain_backward(name: str, dtype: torch.dtype) -> None:
    layer, shape = CONVOLUTIONS[name]
    assert_as_plain(copy.deepcopy(layer).to(dtype), numbers(*shape, dtype=dtype).requires_grad_())


def test_convolutions_are_put_aside_unless_they_pad_with_other_than_zeros_or_lopsidedly() -> None:
    alone = {name for name, (layer, shape) in CONVOLUTIONS.items() if jobs_of(layer, numbers(*shape)) == 0}
    assert alone == {"1d even same", "2d half even same", "2d reflecting"}


def test_a_convolution_keeps_its_memory_format() -> None:
    layer = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert_as_plain(layer, numbers(2, 4, 9, 11).contiguous(memory_format=torch.channels_last).requires_grad_())


@DTYPES
@pytest.mark.parametrize(
    ("options", "jobs"),
    [
        ({}, 1),
        ({"padding_idx": 3}, 1),
        ({"scale_grad_by_freq": True}, 1),
        ({"max_norm": 1.0}, 0),
        ({"sparse": True}, 0),
    ],
    ids=str,
)
def test_an_embedding_gets_the_gradients_of_a_plain_backward(
    options: dict[str, Any], jobs: int, dtype: torch.dtype
) -> None:
    layer = nn.Embedding(10, 6, dtype=dtype, **options)
    words = torch.randint(0, 10, (4, 7), generator=torch.Generator().manual_seed(0))
    assert jobs_of(copy.deepcopy(layer), words) == jobs
    if not options.get("sparse"):
        assert_as_plain(layer, words)


@pytest.mark.parametrize(
    "model", [nn.Linear(24, 40), nn.Linear(24, 40, bias=False), Block(24)], ids=["bias", "no", "block"]
)
def test_under_autocast_the_gradients_are_those_of_a_plain_backward(model: nn.Module) -> None:
    with autocasting():
        assert_as_plain(model, numbers(5, 7, 24).requires_grad_(), numbers(5, 7, 24, seed=2).requires_grad_())


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_under_autocast_convolutions_get_the_gradients_of_a_plain_backward(name: str) -> None:
    layer, shape = CONVOLUTIONS[name]
    with autocasting():
        assert_as_plain(layer, numbers(*shape).requires_grad_())


def test_a_backward_after_the_autocast_region_of_its_forward_is_the_same() -> None:
    with without_onednn():
        assert_as_plain(Autocast(Block()), numbers(3, 5, 16).requires_grad_())


class Autocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output: Tensor = self.inner(x)
        return output


def test_under_autocast_a_weight_used_again_elsewhere_keeps_both_its_gradients() -> None:
    model, inputs = UsedTwice(), [numbers(3, 5, 8).requires_grad_()]
    with autocasting():
        plain = gradients(model, inputs, plainly)
        for run in (split, whole):
            # autograd adds the two in bfloat16, because it casts the weight once for both
            torch.testing.assert_close(gradients(model, inputs, run), plain, rtol=0.01, atol=0.02)


# --- whole models ----------------------------------------------------------------------------------


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return -x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return -gradient


def negated(x: Tensor) -> Tensor:
    y: Tensor = Negated.apply(x)  # type: ignore[no-untyped-call]
    return y


MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "blocks": (nn.Sequential(Block(), Block()), (3, 5, 16)),
    "chunks of an output": (
        Chain(nn.Linear(8, 12), last=lambda y: y.chunk(3, -1)[0] * y.chunk(3, -1)[2]),
        (4, 5, 8),
    ),
    "one chunk alone": (Chain(nn.Linear(8, 12), last=lambda y: y.chunk(3, -1)[1]), (4, 5, 8)),
    "view as output": (Chain(nn.Linear(8, 12), last=lambda y: y.view(2, -1)), (4, 5, 8)),
    "own function": (nn.Sequential(nn.Linear(8, 8), Chain(last=negated), nn.Linear(8, 4)), (4, 5, 8)),
    "in place after linear": (
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)),
        (4, 5, 8),
    ),
    "in place after 2d": (nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)), (4, 8)),
    "in place after convolution": (nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU(inplace=True)), (4, 8, 9)),
    "in place without batch": (nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU(inplace=True)), (8, 9)),
    "encoder layer": (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), (3, 5, 16)),
    "batch norm": (nn.Sequential(nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3)), (4, 8, 9)),
    "layer called twice": (nn.Sequential(*[nn.Linear(8, 8)] * 3), (4, 5, 8)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("first", [False, True], ids=["inner stage", "first stage"])
def test_a_model_gets_the_gradients_of_a_plain_backward(name: str, *, first: bool) -> None:
    model, shape = MODELS[name]
    inputs = [numbers(*shape, seed=seed).requires_grad_(not first) for seed in range(3)]
    assert_as_plain(model, *inputs)


def test_attention_is_split_as_far_as_it_is_made_of_layers() -> None:
    assert jobs_of(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), numbers(3, 5, 16)) == 2


def test_the_first_layer_of_the_first_stage_computes_no_input_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(8, 4)
    monkeypatch.setattr(type(_KNOWN[nn.Linear.forward].rule), "input_gradient", None)
    assert jobs_of(layer, numbers(3, 8)) == 1
    assert layer.weight.grad is None


def test_i_computes_no_weight_gradient_of_a_deferred_layer() -> None:
    model, x = nn.Sequential(Block(), Block()), numbers(3, 5, 16).requires_grad_()
    assert jobs_of(model, x) == 10
    assert x.grad is not None
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("norm" in name), name


@pytest.mark.parametrize(
    "frozen", [["0.weight"], ["0.bias"], ["2.weight"], ["2.bias"], ["0.weight", "0.bias"]], ids=str
)
@pytest.mark.parametrize("first", [False, True], ids=["inner stage", "first stage"])
def test_frozen_parameters_get_none(frozen: list[str], *, first: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    for name in frozen:
        model.get_parameter(name).requires_grad = False
    assert_as_plain(model, numbers(4, 5, 8).requires_grad_(not first))


def test_a_layer_that_is_frozen_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(requires_grad=False), nn.Linear(8, 8))
    assert Deferral(model).layers == (model[1],)


def test_two_microbatches_in_flight() -> None:
    def interleaved(module: nn.Module, inputs: Inputs) -> None:
        deferral = Deferral(module)
        with deferral.installed():
            outputs = [module(x) for x in inputs]
            aside = []
            for output in outputs:
                with deferral.put_aside() as jobs:
                    output.backward(upstream(output))
                aside.append(jobs)
            for jobs in reversed(aside):
                jobs.run()

    # two terms, so that the order of W does not show in the rounding
    assert_as_plain(
        nn.Sequential(Block(), Block()),
        *(numbers(3, 5, 16, seed=s).requires_grad_() for s in (0, 1)),
        runs=(interleaved,),
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("run", [split, whole])
def test_a_checkpointed_region_is_recomputed_once(run: Run, *, reentrant: bool) -> None:
    calls = 0

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def region(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            y: Tensor = self.block(x)
            return y

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.region, x, use_reentrant=reentrant)
            return y

    model = nn.Sequential(nn.Linear(16, 16), Counted(), nn.Linear(16, 16))
    assert_as_plain(model, numbers(3, 5, 16).requires_grad_(), runs=())
    calls = 0
    assert_as_plain(model, numbers(3, 5, 16).requires_grad_(), runs=(run,))
    assert calls == 4  # forward and recomputation, plainly and then deferred


# --- hooks and shared weights ----------------------------------------------------------------------


class UsedTwice(nn.Module):
    """A weight that its layer uses, and somebody else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.other(self.layer(x)), self.layer.weight)


def count_hooks(module: nn.Module) -> dict[str, list[str]]:
    seen: dict[str, list[str]] = {name: [] for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        events = seen[name]
        parameter.register_hook(lambda gradient, to=events: to.append(f"hook {tuple(gradient.shape)}"))  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(
            lambda leaf, to=events: to.append(f"after {leaf.grad.sum()}")
        )  # type: ignore[no-untyped-call]
    return seen


@pytest.mark.parametrize("run", [split, whole])
def test_hooks_fire_once_per_microbatch_as_in_a_plain_backward(run: Run) -> None:
    tied = nn.Linear(16, 16)
    model = nn.Sequential(tied, Block(), nn.Linear(16, 16), tied)
    model[2].weight = tied.weight
    inputs = [numbers(3, 5, 16, seed=seed).requires_grad_() for seed in range(2)]
    seen = []
    for way in (plainly, run):
        module = copy.deepcopy(model)
        seen.append(count_hooks(module))
        way(module, inputs)
    assert seen[0] == seen[1]
    assert all(len(events) == 4 for events in seen[1].values())


def test_no_hook_of_a_deferred_weight_fires_in_i() -> None:
    model = nn.Linear(8, 8)
    seen = count_hooks(model)
    jobs_of(model, numbers(3, 8))
    assert seen == {"weight": [], "bias": []}


def test_what_a_hook_makes_of_a_gradient_is_accumulated() -> None:
    model = nn.Linear(8, 8)
    expected = gradients(model, [numbers(3, 8)], plainly)
    model.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    split(model, [numbers(3, 8)])
    assert expected["weight"] is not None
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, expected["weight"] * 2)


def test_a_weight_used_elsewhere_too_is_exact_without_being_looked_for() -> None:
    assert_as_plain(UsedTwice(), numbers(3, 5, 8).requires_grad_())


@pytest.mark.parametrize("edges", [False, True], ids=["tensors", "edges"])
def test_a_weight_found_to_be_used_elsewhere_is_left_to_autograd(*, edges: bool) -> None:
    model, x = UsedTwice(), numbers(3, 5, 8)
    deferral = Deferral(model)
    with deferral.installed():
        output = model(x)
        root = torch.autograd.graph.get_gradient_edge(output) if edges else output
        assert [id(each) for each in deferral.find_shared([root])] == [id(model.layer.weight)]
        assert deferral.find_shared([root]) == ()
        seen = count_hooks(model)
        with deferral.put_aside() as jobs:
            model(x).sum().backward()
    assert len(jobs) == 1
    assert {name: len(events) for name, events in seen.items() if events} == {
        "layer.weight": 2,
        "layer.bias": 2,
    }
    jobs.run()
    assert all(len(events) == 2 for events in seen.values())


def test_in_an_ordinary_model_no_weight_is_found_to_be_shared() -> None:
    tied = nn.Linear(16, 16)
    model = nn.Sequential(tied, Block(), tied)
    deferral = Deferral(model)
    with deferral.installed():
        assert deferral.find_shared([model(numbers(3, 5, 16))]) == ()


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),  # type: ignore[no-untyped-call]
    ],
    ids=["weight norm", "spectral norm", "pruned"],
)
def test_a_weight_that_is_computed_is_not_put_aside(change: Callable[[nn.Module], nn.Module]) -> None:
    layer = change(nn.Linear(8, 6))
    assert jobs_of(layer, numbers(4, 5, 8)) == 0
    assert layer.bias.grad is not None


def test_a_normed_weight_gets_the_gradients_of_a_plain_backward() -> None:
    assert_as_plain(parametrizations.weight_norm(nn.Linear(8, 6)), numbers(4, 5, 8).requires_grad_())


# --- which layers ----------------------------------------------------------------------------------


def test_a_layer_is_known_by_its_forward() -> None:
    made_on_the_fly = nn.Linear(8, 8)
    made_on_the_fly.__class__ = type("ShardedLinear", (nn.Linear,), {})

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight) * 2

    class Reversed(nn.Conv1d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return functional.conv1d(x.flip(0), weight, bias)

    model = nn.ModuleList([made_on_the_fly, Doubled(8, 8), Reversed(8, 8, 1)])
    assert Deferral(model).layers == (made_on_the_fly,)


def test_the_weight_is_read_when_the_layer_runs() -> None:
    layer = nn.Linear(8, 8)
    deferral = Deferral(layer)
    layer.weight = nn.Parameter(torch.zeros(8, 8))
    with deferral.installed():
        output = layer(numbers(3, 8))
    output.sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias is not None
    assert torch.equal(output, layer.bias.expand(3, 8))


def test_a_layer_called_with_more_than_one_tensor_runs_plainly() -> None:
    class Sized(nn.ConvTranspose1d):
        pass

    layer = Sized(4, 4, 3, stride=2)
    deferral = Deferral(layer)
    with deferral.put_aside() as jobs:
        layer(numbers(2, 4, 5), output_size=[12]).sum().backward()
        layer(input=numbers(2, 4, 5)).sum().backward()
    assert len(jobs) == 0
    assert layer.weight.grad is not None


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(numbers(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class ScaleRule:
    weights = ("factor",)

    def forward(self, _layer: Scale, x: Tensor, *weights: Tensor | None) -> Tensor:
        assert weights[0] is not None
        return x * weights[0]

    def input_gradient(self, _layer: Scale, _x: Tensor, weights: Tensors, gradient: Tensor) -> Tensor:
        assert weights[0] is not None
        return gradient * weights[0]

    def weight_gradients(
        self, _layer: Scale, x: Tensor, _weights: Tensors, gradient: Tensor, _wanted: tuple[bool, ...]
    ) -> Tensors:
        return ((gradient * x).sum((0, 1)),)


def test_a_layer_type_of_ones_own_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Scale(), nn.Linear(8, 8))
    x = numbers(4, 5, 8).requires_grad_()
    monkeypatch.setitem(_KNOWN, Scale.forward, None)
    del _KNOWN[Scale.forward]
    assert jobs_of(model, x) == 2
    register_layer(Scale, ScaleRule())
    assert jobs_of(model, x) == 3
    assert_as_plain(model, x)
    del _KNOWN[Scale.forward]


def test_a_type_without_a_forward_of_its_own_cannot_take_over_anothers_rule() -> None:
    class Named(nn.Linear):
        pass

    with pytest.raises(PipelineError, match="Named has the forward of Linear"):
        register_layer(Named, _KNOWN[nn.Linear.forward].rule)


def test_compiled_modules_are_left_alone_and_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8)))
    model[1].compile(backend="eager")
    model.register_module("2", torch.compile(model[2], backend="eager"))  # type: ignore[arg-type]
    deferral = Deferral(nn.ModuleDict({"model": model}))
    assert deferral.layers == (model[0],)
    assert deferral.compiled == ("model.1", "model.2")


def test_the_compiler_is_not_loaded_to_look_for_compiled_modules() -> None:
    program = (
        "import sys, torch, penstock.runtime.deferral as d\n"
        "d.Deferral(torch.nn.Linear(1, 1))\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)  # noqa: S603


# --- what is left behind ---------------------------------------------------------------------------


def test_nothing_of_it_stays_on_the_module() -> None:
    model = Block()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    deferral = Deferral(model)
    with deferral.installed(), deferral.installed():
        assert all("forward" in layer.__dict__ for layer in deferral.layers)
    with pytest.raises(ZeroDivisionError), deferral.installed():
        raise ZeroDivisionError
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before


def test_a_layer_with_a_forward_somebody_else_put_there_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def mine(x: Tensor) -> Tensor:
        return x

    model[0].__dict__["forward"] = mine
    assert jobs_of(model, numbers(3, 8)) == 1
    assert model[0].__dict__["forward"] is mine


def test_without_gradients_a_layer_runs_plainly() -> None:
    layer = nn.Linear(8, 8)
    with Deferral(layer).installed(), torch.no_grad():
        assert not layer(numbers(3, 8)).requires_grad


def test_the_jobs_run_once() -> None:
    layer = nn.Linear(8, 8)
    with Deferral(layer).put_aside() as jobs:
        layer(numbers(3, 8)).sum().backward()
    assert len(jobs) == 1
    jobs.run()
    assert len(jobs) == 0
    with pytest.raises(PipelineError, match="already"):
        jobs.run()


def test_two_backwards_do_not_put_aside_at_once() -> None:
    deferral = Deferral(nn.Linear(8, 8))
    with deferral.put_aside(), pytest.raises(PipelineError, match="another backward"), deferral.put_aside():
        pass


def test_jobs_run_also_where_nothing_is_recorded() -> None:
    layer = nn.Linear(8, 8)
    with Deferral(layer).put_aside() as jobs:
        layer(numbers(3, 8)).sum().backward()
    with torch.no_grad():
        jobs.run()
    assert layer.weight.grad is not None


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        raise ZeroDivisionError


@pytest.mark.parametrize("aside", [True, False])
def test_a_backward_that_fails_leaves_it_usable(*, aside: bool) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.Sequential(first, second)
    deferral, x = Deferral(model), numbers(3, 8)

    with deferral.installed():
        output = second(Failing.apply(first(x)))  # type: ignore[no-untyped-call]
        with pytest.raises(ZeroDivisionError), deferral.put_aside() if aside else nullcontext():
            output.sum().backward()
        model.zero_grad()
        output = model(x)
        with deferral.put_aside() as jobs:
            output.backward(upstream(output))
        jobs.run()
    wanted = gradients(model, [x], plainly)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=0, atol=0)


def test_a_backward_on_another_thread_puts_aside_too() -> None:
    model = Block()
    deferral = Deferral(model)
    with deferral.put_aside() as jobs:
        thread = threading.Thread(target=lambda: model(numbers(3, 5, 16)).sum().backward())
        thread.start()
        thread.join()
    assert len(jobs) == 5


def test_running_the_jobs_lets_go_of_all_they_held() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Linear(8, 8))
    held: list[weakref.ref[Tensor]] = []
    model[2].register_forward_pre_hook(lambda _, inputs: held.append(weakref.ref(inputs[0])))
    model[2].register_full_backward_hook(lambda *given: held.append(weakref.ref(given[2][0])))
    with Deferral(model).put_aside() as jobs:
        model(numbers(3, 8)).sum().backward()
    gc.collect()
    assert all(each() is not None for each in held)
    gc.disable()
    try:
        jobs.run()
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(8, 8), (3, 8)), (nn.Conv1d(4, 6, 3), (2, 4, 9)), (nn.ConvTranspose1d(4, 6, 3), (2, 4, 9))],
)
def test_w_needs_the_shape_of_a_weight_but_not_its_numbers(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer, x = copy.deepcopy(layer), numbers(*shape)
    expected = gradients(layer, [x], plainly)["weight"]
    with Deferral(layer).put_aside() as jobs:
        plainly(layer, [x])
    weight = layer.get_parameter("weight")
    weight.untyped_storage().resize_(0)  # as sharding does once a layer's I is over
    jobs.run()
    assert weight.grad is not None
    assert expected is not None
    assert torch.equal(weight.grad, expected)


def test_nothing_of_a_microbatch_outlives_a_backward_at_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    held: list[weakref.ref[Tensor]] = []
    model[2].register_forward_pre_hook(lambda _, inputs: held.append(weakref.ref(inputs[0])))
    gc.disable()
    try:
        with Deferral(model).installed():
            model(numbers(3, 8)).sum().backward()
            assert [each() for each in held] == [None]
    finally:
        gc.enable()


def test_a_backward_to_be_differentiated_is_refused() -> None:
    layer, x = nn.Linear(8, 8), numbers(3, 8).requires_grad_()
    with Deferral(layer).installed(), pytest.raises(PipelineError, match="create_graph"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_a_weight_changed_between_forward_and_backward_is_noticed_as_in_a_plain_backward() -> None:
    layer, x = nn.Linear(8, 8), numbers(3, 8).requires_grad_()
    with Deferral(layer).installed():
        output = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
