"""The model or the stages, the loss and the batch that a user's function returns for verification."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.arguments import printable, some
from penstock.errors import PipelineError
from penstock.ir.graph import StageGraph
from penstock.runtime.data_parallel.wrappers import split_graph
from penstock.runtime.models.decoders import is_pretrained
from penstock.runtime.models.even_split import split_evenly
from penstock.runtime.pytree import flatten
from penstock.runtime.setup import losses_by_sink
from penstock.runtime.verification.user_function import Source, find_function, one_line

__all__ = ["UserModel", "load_user_model"]

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
