"""The model, loss and batch that a user's function returns, and their reference run in one process."""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from penstock.arguments import printable, some
from penstock.errors import PipelineError
from penstock.ir.graph import StageGraph
from penstock.runtime.batch import Batcher
from penstock.runtime.data_parallel.wrappers import split_graph
from penstock.runtime.models.decoders import is_pretrained
from penstock.runtime.models.partition import split_evenly
from penstock.runtime.pipeline_arguments import losses_by_sink
from penstock.runtime.pytree import flatten

# The user's function that returns the model to verify: found as `module:function`, its errors in one line.


Source: TypeAlias = str | Callable[..., Any]
"""A top-level function of a module, or its path as in `package.module:function`."""


def find_function(source: Source) -> tuple[Callable[..., Any], str]:
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
        raise PipelineError(f"importing {printable(path)} raised {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An error of the user's code in one line, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename[0] != "<"]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own[1:] else ""
    return printable(f"{type(error).__name__}: {error}", 300) + place


# The model or the stages, the loss and the batch that a user's function returns for verification.


_RETURNS = "(model, loss, inputs, target)"
_NAMES = ("model", "stages", "loss", "inputs", "kwargs", "target", "tokens")


@dataclass
class UserModel:
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
                f"in one process, without a pipeline, the model or the loss raised {one_line(error)}"
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
        """The stages of a pipeline."""
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

    def named(self, stage: int, module: nn.Module) -> nn.Module:
        """A stage with the names that `modules` has: those of the model, or else of the numbered stages."""
        return module if isinstance(self.model, nn.Module) else nn.ModuleDict({str(stage): module})

    @property
    def modules(self) -> nn.ModuleDict:
        """Everything that is trained: the model, and the loss if it is a module."""
        model = self.model
        if not isinstance(model, nn.Module):
            model = nn.ModuleDict({str(stage): module for stage, module in enumerate(model)})
        return nn.ModuleDict({"model": model} | self.loss_modules(*self.losses))

    def loss_modules(self, *sinks: int) -> dict[str, nn.Module]:
        """The losses of these sinks that are modules, named `loss`, or `loss 3` if there are several."""
        found = {sink: loss for sink in sinks if isinstance(loss := self.losses.get(sink), nn.Module)}
        return {f"loss {sink}" if len(self.losses) > 1 else "loss": loss for sink, loss in found.items()}

    @property
    def rows(self) -> int | None:
        """The number of rows of the batch."""
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


def load_user_model(source: Source, graph: StageGraph) -> UserModel:
    """Call the function with fixed random seeds, for these stages if it asks, and check what it returns."""
    function, name = find_function(source)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 -- the global generator, which a user's function may use
    torch.manual_seed(0)
    try:
        asks = "stages" in signature(function).parameters
        returned = function(stages=graph.num_stages) if asks else function()
    except Exception as error:
        raise PipelineError(f"{name}() raised {one_line(error)}") from error
    if isinstance(returned, tuple) and len(returned) == 4:
        returned = dict(zip(("model", "loss", "inputs", "target"), returned))
    if not isinstance(returned, dict):
        what = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise PipelineError(
            f"{name}() must return the four values {_RETURNS}, or a dict of them, but it returned {what}"
        )
    if problems := _name_problems(returned) or _problems(returned):
        raise PipelineError(f"{name}() must return {_RETURNS}, or a dict of them: " + "; ".join(problems))
    return _user_model(returned, graph)


def _user_model(parts: dict[str, Any], graph: StageGraph) -> UserModel:
    model, inputs = parts.get("model", parts.get("stages")), parts.get("inputs", ())
    args, kwargs = inputs if isinstance(inputs, tuple) else (inputs,), dict(parts.get("kwargs") or {})
    if not isinstance(model, nn.Module):
        model = tuple(_listed_stages(model))
        graph = _graph_of(model, graph)
    else:
        graph = StageGraph.chain(graph.num_stages)
        if is_pretrained(model) and not args and "input_ids" in kwargs:
            args = (kwargs.pop("input_ids"),)  # of the first stage only
    losses = losses_by_sink(parts["loss"], graph)
    return UserModel(model, graph, losses, args, parts.get("target"), kwargs, parts.get("tokens"))


def _graph_of(stages: Sequence[nn.Module], graph: StageGraph) -> StageGraph:
    """The graph that `split` found, or else that of the schedule if it is for as many stages."""
    of_schedule = graph if graph.num_stages == len(stages) else StageGraph.chain(len(stages))
    return split_graph(stages) or of_schedule


def _as_arguments(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)


def _listed_stages(stages: Any) -> list[Any]:
    """Stages in their order, of a list or of a mapping from number to module."""
    if isinstance(stages, Mapping) and sorted(stages) == list(range(len(stages))):
        return [stages[stage] for stage in range(len(stages))]
    return list(stages) if isinstance(stages, list | tuple) else [stages]


def _name_problems(parts: dict[str, Any]) -> list[str]:
    problems = []
    if unknown := [printable(str(name)) for name in parts if name not in _NAMES]:
        problems.append(f"unknown: {some(unknown)}; the names are {', '.join(_NAMES)}")
    if ("model" in parts) == ("stages" in parts):
        problems.append("it must have either model or stages")
    if "loss" not in parts:
        problems.append("it has no loss")
    if "inputs" not in parts and not parts.get("kwargs"):
        problems.append("it has neither inputs nor kwargs")
    return problems


def _problems(parts: dict[str, Any]) -> list[str]:
    problems = []
    loss, inputs = parts["loss"], parts.get("inputs")
    what = "model" if "model" in parts else "stages"
    modules = _listed_stages(parts[what])
    wrong = next((each for each in modules if not isinstance(each, nn.Module)), None if modules else ())
    if wrong is not None:
        problems.append(
            f"the {what} must be an nn.Module or a list of stages, but there is a {type(wrong).__name__}"
        )
    elif devices := {tensor.device.type for each in modules for tensor in each.parameters()} - {"cpu"}:
        problems.append(f"the {what} must be on the CPU, for verification, but there is {', '.join(devices)}")
    if not isinstance(parts.get("kwargs") or {}, dict):
        problems.append(
            f"kwargs must be a dict from names to values, but are a {type(parts['kwargs']).__name__}"
        )
    if parts.get("tokens") is not None and not callable(parts["tokens"]):
        problems.append("tokens must be a function that counts the tokens of a target")
    if not all(map(callable, loss.values() if isinstance(loss, Mapping) else [loss])):
        problems.append(
            "the loss must be a function of output and target that returns one number, but is a "
            f"{type(loss).__name__}"
        )
    if isinstance(inputs, list):
        problems.append("the inputs must be a tensor or a tuple of the model's arguments, but are a list")
    return problems


# The reference run: the user's model trained in one process without a pipeline, stored in a file.


_FLOOR = 1e-3  # as a share of the largest value of all tensors: errors are relative to at least that
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def train_reference(source: Source, steps: int, graph: StageGraph, microbatches: int, file: Path) -> None:
    """On rank 0: train without a pipeline and write losses, norms, gradients and parameters to a file."""
    user_model = load_user_model(source, graph)
    if dist.get_rank():
        return
    fingerprint, modules = user_model.fingerprint, user_model.modules
    batcher = Batcher(microbatches)
    args, kwargs = batcher.split_arguments(user_model.args, user_model.kwargs)
    batches = list(zip(args, kwargs, batcher.split_target(user_model.target)))
    optimizer = optimizer_for(modules.parameters())
    tensors: dict[str, Tensor] = {}
    losses, norms, random_state = [], [], torch.get_rng_state()
    for step in range(steps):
        losses.append(_accumulate_gradients(user_model, batches))
        gradients = [weight.grad for weight in modules.parameters() if weight.grad is not None]
        norms.append(float(get_total_norm(gradients)))
        for name, weight in named_parameters(modules):
            if weight.grad is not None:
                tensors[f"gradient {step} {name}"] = _copy(weight.grad)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    tensors |= {f"parameter {name}": _copy(weight) for name, weight in named_parameters(modules)}
    header = {
        "fingerprint": fingerprint,
        "losses": losses,
        "norms": norms,
        "draws": not torch.equal(random_state, torch.get_rng_state()),
        "largest": [_largest(tensors, f"gradient {step} ") for step in range(steps)],
        "largest parameter": _largest(tensors, "parameter "),
        "tolerance": _tolerance(modules),
    }
    from safetensors.torch import save_file  # noqa: PLC0415 -- an extra

    save_file(tensors, file, {"header": json.dumps(header)})


def _accumulate_gradients(user_model: UserModel, batches: list[tuple[Any, Any, Any]]) -> float:
    """Forward and backward of all microbatches; gives the mean loss, weighted by tokens if they are counted."""
    count = user_model.tokens
    weights = [1.0 if count is None else float(count(target)) for _, _, target in batches]
    total = 0.0
    for weight, (args, kwargs, target) in zip(weights, batches):
        loss = user_model(args, kwargs, target) * (weight / sum(weights))
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def _tolerance(modules: nn.Module) -> float:
    """The default tolerance, for the least precise dtype of the parameters."""
    return max((_TOLERANCES.get(p.dtype, 1e-4) for p in modules.parameters()), default=1e-4)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def named_parameters(modules: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with all their names: a tied weight has several."""
    for name, weight in modules.named_parameters(remove_duplicate=False):
        yield name.removeprefix("model."), weight


def optimizer_for(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """SGD: an optimizer that divides by the size of gradients would amplify rounding errors."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.01, momentum=0.9) if trained else None


def _largest(tensors: Mapping[str, Tensor], prefix: str) -> float:
    return max((_max_abs(tensor) for name, tensor in tensors.items() if name.startswith(prefix)), default=0.0)


def _max_abs(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


class Reference:
    """The file of a reference run."""

    def __init__(self, file: Path) -> None:
        from safetensors import safe_open  # noqa: PLC0415 -- an extra

        opener: Any = safe_open  # it has no types
        self._file = opener(file, "pt")
        self.header: dict[str, Any] = json.loads(self._file.metadata()["header"])
        self._names = set(self._file.keys())

    def check_same_model(self, user_model: UserModel, group: dist.ProcessGroup) -> None:
        """Raise on all ranks if one has another model or batch than the reference."""
        fingerprints: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(fingerprints, user_model.fingerprint, group)
        if set(fingerprints) != {self.header["fingerprint"]}:
            raise PipelineError(
                "the function returns other weights or another batch each time it is called, so there is "
                "nothing to compare: seed its random generators. torch, numpy and random are seeded before "
                "it is called"
            )

    def gradient_error(self, step: int, name: str, gradient: Tensor | None) -> float:
        """The error of one gradient after the backward of a step."""
        return self._error(f"gradient {step} {name}", gradient, self.header["largest"][step])

    def parameter_error(self, name: str, parameter: Tensor) -> float:
        """The error of one parameter after all steps."""
        return self._error(f"parameter {name}", parameter, self.header["largest parameter"])

    def _error(self, name: str, tensor: Tensor | None, largest: float) -> float:
        if tensor is None or name not in self._names:
            return 0.0 if tensor is None and name not in self._names else inf
        expected = self._file.get_tensor(name).to(torch.float64)
        difference = _max_abs(tensor.detach().to(torch.float64) - expected)
        return _share(difference, max(_max_abs(expected), _FLOOR * largest))


def relative_error(value: float | None, expected: float) -> float:
    """The relative error of a number; `inf` if it is missing."""
    return inf if value is None else _share(abs(value - expected), abs(expected))


def _share(difference: float, scale: float) -> float:
    """`difference` as a share of `scale`; `inf` if either is not finite."""
    if not difference < inf or not scale < inf:
        return inf
    return difference / scale if scale else (inf if difference else 0.0)
