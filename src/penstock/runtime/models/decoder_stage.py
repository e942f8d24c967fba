"""The parts of a decoder stage: its class, the placeholders for modules of other stages, and shallow copies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.planning.layout import StageLayout

__all__ = ["Identity", "Zero", "stage_class"]

_UNSUPPORTED_ARGUMENTS = {
    "input_ids": "pass the ids as the first positional argument",
    "inputs_embeds": "the first stage takes only ids",
    "labels": "pass them to the pipeline as target=, and the loss function as loss=",
    "past_key_values": "a pipeline trains and evaluates whole sequences",
    "use_cache": "a pipeline trains and evaluates whole sequences, and never uses a cache",
    "output_hidden_states": "they stay in the stages; use a forward hook on a layer",
    "output_attentions": "they stay in the stages; use a forward hook on a layer",
    "return_dict": "a stage returns one tensor",
    "logits_to_keep": "the last stage returns all logits",
}


class Identity(nn.Module):
    """Replaces a module that another stage holds: returns its first argument and ignores the others."""

    def forward(self, value: Any, *_: object, **__: object) -> Any:
        """The value itself."""
        return value


class Zero(nn.Module):
    """Replaces an embedding that another stage holds and whose output is added: returns zero."""

    def forward(self, value: Tensor, *_: object, **__: object) -> Tensor:
        """A scalar zero, which broadcasts to any shape."""
        return torch.zeros((), device=value.device)


class _Stage(nn.Module):
    """A mixin that turns a model class into a stage, from ids or hidden states to hidden states or logits."""

    stage_layout: StageLayout
    base_model: Any

    def forward(self, *inputs: Tensor, **named: Any) -> Tensor:
        """This stage's part of the model's forward."""
        if len(inputs) != 1 or not named.keys().isdisjoint(_UNSUPPORTED_ARGUMENTS):
            raise PipelineError(_argument_problems(len(inputs), named))
        stage = self.stage_layout
        named |= {"input_ids" if stage.has_embedding else "inputs_embeds": inputs[0]}
        run = super().forward if stage.has_head else self.base_model
        output = run(**named, use_cache=False, return_dict=True)
        return output.logits if stage.has_head else output.last_hidden_state  # type: ignore[no-any-return]

    @property
    def own_layers(self) -> list[nn.Module]:
        """The layers of this stage, in order, for example to shard or compile one by one."""
        layers: Any = next(child for child in self.base_model.children() if isinstance(child, nn.ModuleList))
        return [layers[number] for number in self.stage_layout.layers]

    def __reduce__(self) -> tuple[Any, ...]:
        model_class = next(base for base in type(self).__bases__ if base is not _Stage)
        return _uninitialized_stage, (model_class,), self.__dict__


def _argument_problems(count: int, named: Iterable[str]) -> str:
    problems = [f"`{name}`: {_UNSUPPORTED_ARGUMENTS[name]}" for name in named if name in _UNSUPPORTED_ARGUMENTS]
    if count != 1:
        problems.insert(0, f"a stage takes one tensor, ids or hidden states, but {count} were passed")
    return "\n".join(problems)


_STAGE_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def stage_class(model_class: type[nn.Module]) -> type[nn.Module]:
    """The class of the stages of a model of this class; the same object on every call."""
    if model_class not in _STAGE_CLASSES:
        # transformers chooses the initialization by the module of the class
        _STAGE_CLASSES[model_class] = type(
            f"{model_class.__name__}Stage", (_Stage, model_class), {"__module__": model_class.__module__}
        )
    return _STAGE_CLASSES[model_class]


def _uninitialized_stage(model_class: type[nn.Module]) -> nn.Module:
    cls = stage_class(model_class)
    return cls.__new__(cls)
