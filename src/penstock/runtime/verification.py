"""`verify_gradients`: whether pipelines train a model as one process does.

    def parts():
        model = nn.Sequential(...)
        return model, nn.functional.mse_loss, torch.randn(16, 8), torch.randn(16, 2)

    verdicts = verify_gradients(parts, [penstock.build("zbv", ranks=2, microbatches=4)])

Every process calls the function, each time with the same seeds. It returns the model, the loss, the arguments
of the model (a tuple if there are several) and the target, or a dict with these and more. One process trains
with the whole batch, every schedule with its microbatches, on processes of this machine. Loss, gradients,
their norm, and the weights after all steps are compared. An error is the largest difference in a tensor,
relative to the largest value in it, or to a thousandth of the largest value of all tensors if that is
larger: some gradients are only rounding errors.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from importlib import import_module
from inspect import signature
from itertools import chain
from math import inf, isfinite
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from penstock.arguments import printable, some, whole_number
from penstock.errors import BatchError, PenstockError, PipelineError, StepFailedError
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.batch import Batcher
from penstock.runtime.config import losses_by_sink
from penstock.runtime.data_parallel.wrappers import split_graph
from penstock.runtime.local_ranks import LocalRanks
from penstock.runtime.models.decoders import is_pretrained
from penstock.runtime.models.partition import split_evenly
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.pytree import flatten

__all__ = ["Deviation", "Verdict", "verdicts", "verify_gradients"]

Source: TypeAlias = str | Callable[..., Any]
"""A top-level function of a module, or its path as in `package.module:function`."""

_FLOOR = 1e-3  # as a share of the largest value of all tensors: errors are relative to at least that
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_RETURNS = "(model, loss, inputs, target)"
_NAMES = ("model", "stages", "loss", "inputs", "kwargs", "target", "tokens")


@dataclass(frozen=True)
class Deviation:
    """The error of one tensor: of a gradient in one step, or of a parameter after all steps."""

    name: str
    stage: int
    step: int
    """The step, from 1."""
    error: float


@dataclass(frozen=True)
class Verdict:
    """The result for one schedule; errors are relative, `inf` where a value is missing or not finite."""

    schedule: str
    ranks: int
    stages: int
    microbatches: int
    tolerance: float
    loss: float = inf
    """The largest error of the loss over all steps."""
    norm: float = inf
    """The largest error of the gradient norm over all steps."""
    gradient: Deviation | None = None
    """The gradient with the largest error over all parameters and steps; None if there is none."""
    parameter: Deviation | None = None
    """The parameter with the largest error after all steps."""
    rejected: str = ""
    """Why the schedule could not run; empty if it did."""
    cause: str = ""
    """The likely cause of a mismatch."""

    @property
    def equal(self) -> bool:
        """Whether everything is within the tolerance."""
        return not self.rejected and self.worst <= self.tolerance

    @property
    def worst(self) -> float:
        """The largest error."""
        errors = [each.error for each in (self.gradient, self.parameter) if each is not None]
        return max(self.loss, self.norm, *errors)


def verify_gradients(
    source: Source, schedules: Sequence[Schedule], *, steps: int = 2, tolerance: float | None = None
) -> list[Verdict]:
    """Train with every schedule on processes of this machine, and compare with one process.

    `source` is a top-level function of a module, or its path as in `package.module:function`. The default
    tolerance depends on the dtype of the model: 1e-4 for float32, 1e-9 for float64.
    """
    return list(verdicts(source, schedules, steps=steps, tolerance=tolerance))


def verdicts(
    source: Source,
    schedules: Sequence[Schedule],
    *,
    steps: int = 2,
    tolerance: float | None = None,
    ranks: LocalRanks | None = None,
) -> Iterator[Verdict]:
    """Yield the verdicts of `verify_gradients` one by one; `ranks` are started ranks to use."""
    problems = []
    if (whole_number(steps) or 0) < 1:
        problems.append(f"steps must be a whole number of at least 1 (given {printable(repr(steps))})")
    if tolerance is not None and not 0 < tolerance < inf:
        problems.append(f"the tolerance must be a relative error above 0, such as 1e-4 (given {tolerance!r})")
    if not isinstance(source, str) and "<" in getattr(source, "__qualname__", "<"):
        problems.append("the function must be at the top level of a module, not inside another function")
    if not schedules:
        problems.append("no schedule is given")
    if problems:
        raise PipelineError("; ".join(problems))
    count = max(schedule.num_ranks for schedule in schedules)
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory, ExitStack() as entered:
        started = ranks or entered.enter_context(LocalRanks(count))
        for schedule in schedules:
            yield _verdict(started, Path(directory), source, schedule, steps, tolerance)


def _verdict(
    ranks: LocalRanks, directory: Path, source: Source, schedule: Schedule, steps: int, tolerance: float | None
) -> Verdict:
    """Verify one schedule; reference runs are kept in files, one per stage graph and number of microbatches."""
    graph = schedule.graph  # the function may depend on its number of stages
    digest = sha256(repr(graph.edges).encode()).hexdigest()

    def train_reference(microbatches: int) -> Path:
        file = directory / f"reference-{graph.num_stages}-{digest}-{microbatches}.pt"
        if not file.exists():
            ranks.run(_train_reference, source, steps, graph, microbatches, file)
        return file

    def compare(verdict: Verdict, file: Path) -> Verdict:
        results = ranks.run(_train_in_pipeline, source, schedule, steps, file)
        found = [errors for errors in results if errors is not None]
        losses, norms, gradients, parameters = (list(chain(*errors)) for errors in zip(*found))
        return replace(
            verdict,
            loss=max(losses),
            norm=max(norms),
            gradient=max(gradients, default=None, key=_error_of),
            parameter=max(parameters, default=None, key=_error_of),
        )

    whole_batch = train_reference(1)
    reference = _Reference.load(whole_batch)
    verdict = Verdict(
        schedule.name,
        schedule.num_ranks,
        schedule.num_stages,
        schedule.microbatches,
        reference.tolerance if tolerance is None else tolerance,
    )
    if not schedule.table.has(Kind.B, Kind.I):
        return replace(verdict, rejected="it has no backward, so there are no gradients")
    try:
        verdict = compare(verdict, whole_batch)
    except PenstockError as error:
        return replace(verdict, rejected=_short_message(error))
    if verdict.equal:
        return verdict
    same_split = compare(verdict, train_reference(schedule.microbatches))
    return replace(verdict, cause=_cause(verdict, reference, equal_if_split=same_split.equal))


def _short_message(error: PenstockError) -> str:
    """The message without the traceback, but with the last line of the user's code."""
    if not isinstance(error, StepFailedError):
        return str(error)
    frames = [line.strip() for line in error.details.splitlines() if line.lstrip().startswith("File ")]
    return "\n  ".join([*map(str.strip, error.report.splitlines()[:2]), *frames[-1:]])


def _cause(verdict: Verdict, reference: _Reference, *, equal_if_split: bool) -> str:
    rounding = "that may be rounding: model.double() and inputs in float64 would show it"
    if verdict.worst <= reference.tolerance:  # the default for the dtype; the given tolerance is smaller
        return rounding
    if reference.draws:
        return (
            "the model draws random numbers, as dropout does, and every process draws its own: set its rate to "
            "0, or call model.eval()"
        )
    if equal_if_split:
        return (
            f"one process computes the same as the pipeline if it also splits the batch into "
            f"{verdict.microbatches} microbatches: the model or the loss depends on how a batch is split, as "
            "BatchNorm does, or a mean over something other than rows"
        )
    if isfinite(verdict.worst) and verdict.worst < 100 * verdict.tolerance and reference.tolerance > 1e-9:
        return rounding
    return (
        "one process that computes the same microbatches gets different numbers, too: a wrong or "
        "nondeterministic backward, state that is kept from one microbatch to the next, or a bug in Penstock"
    )


# --- training in a pipeline, on each rank ----------------------------------------------------------


_Errors: TypeAlias = tuple[list[float], list[float], list[Deviation], list[Deviation]]
"""Of one rank: of the losses and norms of all steps, of gradients, and of parameters."""
_error_of = attrgetter("error")


def _train_in_pipeline(source: Source, schedule: Schedule, steps: int, file: Path) -> _Errors | None:
    """Train with a schedule and compare with the reference; None on a rank that the schedule does not use."""
    group = _first_ranks(schedule.num_ranks)
    if group is None:
        return None
    user_model = _load_user_model(source, schedule.graph)
    reference = _Reference.load(file)
    reference.check_same_model(user_model, group)
    rows = None if user_model.tokens is not None else user_model.rows
    if rows is not None and rows % schedule.microbatches:
        raise BatchError(
            f"{rows} rows cannot be split into {schedule.microbatches} microbatches of the same size, and the "
            "mean of their losses would not be that of the batch: change the batch or the number of "
            "microbatches, or return tokens, a function that counts the tokens of a target"
        )
    stages = user_model.stages(schedule.graph)
    traced = split_graph(stages.values())
    if schedule.graph.is_chain and traced is not None and not traced.is_chain:
        schedule = schedule.over(traced)
    gradients, losses, norms = [], [], []
    pipeline = Pipeline(stages, schedule, loss=user_model.losses, tokens=user_model.tokens, group=group)
    with closing(pipeline):
        weights = [
            (stage, name, weight)
            for stage, module in pipeline.modules.items()
            for name, weight in _named_parameters(user_model.named(stage, module))
        ]
        optimizer = _optimizer_for(pipeline.parameters())
        for step in range(steps):
            result = pipeline.step(*user_model.args, target=user_model.target, **user_model.kwargs)
            losses.append(_relative_error(result.loss, reference.losses[step]))
            norms.append(_relative_error(float(pipeline.clip_grad_norm_(inf)), reference.norms[step]))
            for stage, name, weight in weights:
                error = reference.error(step, name, weight.grad)
                gradients.append(Deviation(name, stage, pipeline.completed_steps, error))
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    parameters = [
        Deviation(name, stage, steps, reference.error(steps, name, weight)) for stage, name, weight in weights
    ]
    return losses, norms, gradients, parameters


@cache
def _first_ranks(count: int) -> dist.ProcessGroup | None:
    """A group of the first `count` ranks, None on all others; every rank must call this."""
    group = dist.new_group(list(range(count)))
    return group if dist.get_rank() < count else None


# --- the reference run, in one process -------------------------------------------------------------


@dataclass
class _Reference:
    """A run of the user's model without a pipeline."""

    fingerprint: str
    losses: list[float]
    norms: list[float]
    draws: bool
    """Whether the model draws random numbers."""
    tolerance: float
    """The default tolerance, for the least precise dtype of the parameters."""
    tensors: list[dict[str, Tensor]]
    """By name: the gradients of each step, then the parameters after all steps."""
    largest: list[float]
    """The largest value of all tensors, for each entry of `tensors`."""

    @classmethod
    def load(cls, file: Path) -> _Reference:
        return cls(**torch.load(file, mmap=True, weights_only=True))

    def check_same_model(self, user_model: _UserModel, group: dist.ProcessGroup) -> None:
        """Raise on all ranks if one has another model or batch than the reference."""
        fingerprints: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(fingerprints, user_model.fingerprint, group)
        if set(fingerprints) != {self.fingerprint}:
            raise PipelineError(
                "the function returns other weights or another batch each time it is called, so there is "
                "nothing to compare: seed its random generators. torch, numpy and random are seeded before "
                "it is called"
            )

    def error(self, step: int, name: str, tensor: Tensor | None) -> float:
        """Return the error of a gradient of a step, or of a parameter after all steps."""
        expected = self.tensors[step].get(name)
        if tensor is None or expected is None:
            return 0.0 if tensor is expected else inf
        difference = _max_abs(tensor.detach().double() - expected.double())
        return _share(difference, max(_max_abs(expected.double()), _FLOOR * self.largest[step]))


def _train_reference(source: Source, steps: int, graph: StageGraph, microbatches: int, file: Path) -> None:
    """On rank 0: train without a pipeline and write the reference to a file."""
    user_model = _load_user_model(source, graph)
    if dist.get_rank():
        return
    fingerprint, modules = user_model.fingerprint, user_model.modules
    batcher = Batcher(microbatches)
    args, kwargs = batcher.split_arguments(user_model.args, user_model.kwargs)
    batches = list(zip(args, kwargs, batcher.split_target(user_model.target)))
    optimizer = _optimizer_for(modules.parameters())
    tensors: list[dict[str, Tensor]] = []
    losses, norms, random_state = [], [], torch.get_rng_state()
    for _ in range(steps):
        losses.append(_accumulate_gradients(user_model, batches))
        gradients = [weight.grad for weight in modules.parameters() if weight.grad is not None]
        norms.append(float(get_total_norm(gradients)))
        named = _named_parameters(modules)
        tensors.append({name: weight.grad.clone() for name, weight in named if weight.grad is not None})
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    tensors.append({name: weight.detach() for name, weight in _named_parameters(modules)})
    reference = _Reference(
        fingerprint,
        losses,
        norms,
        draws=not torch.equal(random_state, torch.get_rng_state()),
        tolerance=max((_TOLERANCES.get(p.dtype, 1e-4) for p in modules.parameters()), default=1e-4),
        tensors=tensors,
        largest=[max(map(_max_abs, each.values()), default=0.0) for each in tensors],
    )
    torch.save(vars(reference), file)


def _accumulate_gradients(user_model: _UserModel, batches: list[tuple[Any, Any, Any]]) -> float:
    """Accumulate the gradients of all microbatches; return the mean loss, weighted by tokens if counted."""
    count = user_model.tokens
    weights = [1.0 if count is None else float(count(target)) for _, _, target in batches]
    total = 0.0
    for weight, (args, kwargs, target) in zip(weights, batches):
        loss = user_model(args, kwargs, target) * (weight / sum(weights))
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def _named_parameters(modules: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with all their names: a tied weight has several."""
    for name, weight in modules.named_parameters(remove_duplicate=False):
        yield name.removeprefix("model."), weight


def _optimizer_for(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """SGD: an optimizer that divides by the size of gradients would amplify rounding errors."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.01, momentum=0.9) if trained else None


def _max_abs(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _relative_error(value: float | None, expected: float) -> float:
    return inf if value is None else _share(abs(value - expected), abs(expected))


def _share(difference: float, scale: float) -> float:
    """`difference` as a share of `scale`; `inf` if either is not finite."""
    if not difference < inf or not scale < inf:
        return inf
    return difference / scale if scale else (inf if difference else 0.0)


# --- the model, loss and batch that the user's function returns ------------------------------------


@dataclass
class _UserModel:
    """A model or its stages, the loss, and one batch: the arguments of the model, and the target."""

    model: nn.Module | tuple[nn.Module, ...]
    graph: StageGraph
    """Which stage feeds which."""
    losses: dict[int, Callable[..., Tensor]]
    """The loss of each stage that feeds no other."""
    args: tuple[Any, ...]
    target: Any
    kwargs: dict[str, Any] = field(default_factory=dict)
    tokens: Callable[[Any], int] | None = None
    """Counts the tokens of a target; the loss is weighted by them."""

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: object) -> Tensor:
        """The loss for these arguments, computed without a pipeline."""
        try:
            outputs = self._outputs(args, kwargs)
            losses = [self.losses[sink](output, target) for sink, output in outputs.items()]
        except Exception as error:
            raise PipelineError(
                f"in one process, without a pipeline, the model or the loss raised {_one_line(error)}"
            ) from error
        for each in losses:
            if not isinstance(each, Tensor) or each.numel() != 1:
                tensor = isinstance(each, Tensor)
                actual = f"shape {list(each.shape)}" if tensor else f"type {type(each).__name__}"
                raise PipelineError(f"the loss must be a tensor with one number, but it has {actual}")
        loss = torch.stack([each.reshape(()) for each in losses]).sum() if losses[1:] else losses[0]
        if not loss.requires_grad:
            raise PipelineError("the loss depends on no trained parameter, so there is no gradient")
        return loss

    def _outputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Any]:
        """The outputs by sink; stages run one after the other, called as in a pipeline."""
        if isinstance(self.model, nn.Module):
            output = self.model(*args, **kwargs)
            return dict.fromkeys(self.losses, output.logits if is_pretrained(self.model) else output)
        sources, values = self.graph.sources, dict[int, Any]()
        given = {sources[0]: args} if len(sources) == 1 else dict(zip(sources, map(_as_arguments, args)))
        for stage in self.graph.forward_order:
            inputs = (values[other] for other in self.graph.inputs(stage))
            arguments = given.get(stage) or [each for value in inputs for each in _as_arguments(value)]
            values[stage] = self.model[stage](*arguments, **kwargs)
        return {sink: values[sink] for sink in self.graph.sinks}

    def stages(self, graph: StageGraph) -> dict[int, nn.Module]:
        if isinstance(self.model, nn.Module):
            if not graph.is_chain:
                raise PipelineError(
                    "the stages of the schedule are not a chain, so the model cannot be divided over them: let "
                    "the function return stages, one module for each stage, instead of a model"
                )
            return split_evenly(self.model, graph.num_stages)
        if len(self.model) != graph.num_stages:
            raise PipelineError(
                f"the function returns {len(self.model)} stages, but the schedule has {graph.num_stages}: "
                "change the ranks or the stages per rank, or give the function the parameter `stages`: this "
                "number"
            )
        return dict(enumerate(self.model))

    @property
    def modules(self) -> nn.ModuleDict:
        """Everything that is trained: the model, and the losses that are modules."""
        model = self.model
        if not isinstance(model, nn.Module):
            model = nn.ModuleDict({str(stage): module for stage, module in enumerate(model)})
        return nn.ModuleDict({"model": model} | self._loss_modules(*self.losses))

    def named(self, stage: int, module: nn.Module) -> nn.ModuleDict:
        """Return a stage and its loss with the names that they have in `modules`."""
        model = module if isinstance(self.model, nn.Module) else nn.ModuleDict({str(stage): module})
        return nn.ModuleDict({"model": model} | self._loss_modules(stage))

    def _loss_modules(self, *sinks: int) -> dict[str, nn.Module]:
        """The losses of these sinks that are modules, named `loss`, or `loss 3` if there are several."""
        found = {sink: loss for sink in sinks if isinstance(loss := self.losses.get(sink), nn.Module)}
        return {f"loss {sink}" if len(self.losses) > 1 else "loss": loss for sink, loss in found.items()}

    @property
    def rows(self) -> int | None:
        return next((len(leaf) for leaf in self._leaves() if isinstance(leaf, Tensor) and leaf.dim()), None)

    @property
    def fingerprint(self) -> str:
        """A checksum of weights and batch, to compare between processes."""
        checksum = 0
        for leaf in (*self.modules.state_dict().values(), *self._leaves()):
            if isinstance(leaf, Tensor):
                data = leaf.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data
                checksum = zlib.crc32(data, checksum)
        return f"{checksum:08x}"

    def _leaves(self) -> list[Any]:
        return flatten((self.args, self.kwargs, self.target))[0]


def _load_user_model(source: Source, graph: StageGraph) -> _UserModel:
    """Call the function with fixed random seeds, for these stages if it asks, and check what it returns."""
    function, name = _find_function(source)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 -- the global generator, which a user's function may use
    torch.manual_seed(0)
    try:
        asks = "stages" in signature(function).parameters
        returned = function(stages=graph.num_stages) if asks else function()
    except Exception as error:
        raise PipelineError(f"{name}() raised {_one_line(error)}") from error
    if isinstance(returned, tuple) and len(returned) == 4:
        returned = dict(zip(("model", "loss", "inputs", "target"), returned))
    if not isinstance(returned, dict):
        what = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise PipelineError(
            f"{name}() must return the four values {_RETURNS}, or a dict of them, but it returned {what}"
        )
    if problems := list(_name_problems(returned)) or list(_problems(returned)):
        raise PipelineError(f"{name}() must return {_RETURNS}, or a dict of them: " + "; ".join(problems))
    return _user_model(returned, graph)


def _user_model(parts: dict[str, Any], graph: StageGraph) -> _UserModel:
    model, inputs = parts.get("model", parts.get("stages")), parts.get("inputs", ())
    args, kwargs = inputs if isinstance(inputs, tuple) else (inputs,), dict(parts.get("kwargs") or {})
    if isinstance(model, nn.Module):
        graph = StageGraph.chain(graph.num_stages)
        if is_pretrained(model) and not args and "input_ids" in kwargs:
            args = (kwargs.pop("input_ids"),)  # of the first stage only
    else:
        model = tuple(_listed_stages(model))
        fits = graph.num_stages == len(model)
        graph = split_graph(model) or (graph if fits else StageGraph.chain(len(model)))
    losses = losses_by_sink(parts["loss"], graph)
    return _UserModel(model, graph, losses, args, parts.get("target"), kwargs, parts.get("tokens"))


def _as_arguments(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)


def _listed_stages(stages: Any) -> list[Any]:
    """Stages in their order, of a list or of a mapping from number to module."""
    if isinstance(stages, Mapping) and sorted(stages) == list(range(len(stages))):
        return [stages[stage] for stage in range(len(stages))]
    return list(stages) if isinstance(stages, list | tuple) else [stages]


def _name_problems(parts: dict[str, Any]) -> Iterator[str]:
    if unknown := [printable(str(name)) for name in parts if name not in _NAMES]:
        yield f"unknown: {some(unknown)}; the names are {', '.join(_NAMES)}"
    if ("model" in parts) == ("stages" in parts):
        yield "it must have either model or stages"
    if "loss" not in parts:
        yield "it has no loss"
    if "inputs" not in parts and not parts.get("kwargs"):
        yield "it has neither inputs nor kwargs"


def _problems(parts: dict[str, Any]) -> Iterator[str]:
    loss, kwargs = parts["loss"], parts.get("kwargs") or {}
    what = "model" if "model" in parts else "stages"
    modules = _listed_stages(parts[what])
    wrong = next((each for each in modules if not isinstance(each, nn.Module)), None if modules else ())
    if wrong is not None:
        yield f"the {what} must be an nn.Module or a list of stages, but there is a {type(wrong).__name__}"
    elif devices := {tensor.device.type for each in modules for tensor in each.parameters()} - {"cpu"}:
        yield f"the {what} must be on the CPU, for verification, but there is {', '.join(devices)}"
    if not isinstance(kwargs, dict):
        yield f"kwargs must be a dict from names to values, but are a {type(kwargs).__name__}"
    if parts.get("tokens") is not None and not callable(parts["tokens"]):
        yield "tokens must be a function that counts the tokens of a target"
    if not all(map(callable, loss.values() if isinstance(loss, Mapping) else [loss])):
        yield (
            "the loss must be a function of output and target that returns one number, but is a "
            f"{type(loss).__name__}"
        )
    if isinstance(parts.get("inputs"), list):
        yield "the inputs must be a tensor or a tuple of the model's arguments, but are a list"


# --- the user's function ---------------------------------------------------------------------------


def _find_function(source: Source) -> tuple[Callable[..., Any], str]:
    """The function, and its name for messages."""
    if not isinstance(source, str):
        return source, source.__name__
    path, colon, name = source.partition(":")
    if not (path and colon and name) or "/" in path or path.endswith(".py"):
        guess = path.removesuffix(".py").replace("/", ".").strip(".") or "module"
        raise PipelineError(
            f"{printable(source)} is not of the form module:function: write {guess}:{name or 'function'}"
        )
    module = _import(path)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            each
            for each, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == path and each[0] != "_"
        ]
        problem = f"{path} has no function {printable(name)}"
        if hasattr(module, name):
            problem = f"{path}.{name} is not a function"
        raise PipelineError(f"{problem}; the functions of {path} are: {some(functions) or 'none'}")
    return function, source


def _import(path: str) -> ModuleType:
    if (directory := os.getcwd()) not in sys.path:  # noqa: PTH109 -- as `python -m` does
        sys.path.insert(0, directory)
    try:
        return import_module(path)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (path == missing or path.startswith(f"{missing}.")):
            raise PipelineError(
                f"there is no module {printable(path)} in {directory} or in the installed packages"
            ) from None
        raise PipelineError(f"importing {printable(path)} raised {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    """An error of the user's code in one line, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename[0] != "<"]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own[1:] else ""
    return printable(f"{type(error).__name__}: {error}", 300) + place
