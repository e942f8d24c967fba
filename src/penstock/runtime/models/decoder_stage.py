"""What a stage of a decoder of transformers is made of; how it is put together is told in `decoders`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.planning.layout import StageLayout
from penstock.runtime.backward.layer_rules import Tensors, register_layer

__all__ = ["Elsewhere", "Nothing", "has_hooks", "register_conv1d", "shell", "stage_class"]

_NOT_FOR_STAGES = {
    "input_ids": "give the ids as the first argument, without a name",
    "inputs_embeds": "only ids go into the first stage",
    "labels": "give them to the pipeline as target=, and compute the loss there with loss=",
    "past_key_values": "a pipeline trains and evaluates whole sequences",
    "use_cache": "a pipeline trains and evaluates whole sequences, and never uses a cache",
    "output_hidden_states": "they stay in the stages; a forward hook on a layer sees them",
    "output_attentions": "they stay in the stages; a forward hook on a layer sees them",
    "return_dict": "a stage gives one tensor",
    "logits_to_keep": "the last stage gives all logits",
}


class Elsewhere(nn.Module):
    """In place of a module that another stage holds: hands on what it is given."""

    def forward(self, value: Any, *_: object, **__: object) -> Any:
        """The very same."""
        return value


class Nothing(nn.Module):
    """In place of an embedding that another stage holds, where its output would be added: adds nothing."""

    def forward(self, value: Tensor, *_: object, **__: object) -> Tensor:
        """A zero that goes with any shape and type."""
        return torch.zeros((), device=value.device)


class _Stage(nn.Module):
    """What makes a stage of a model class: ids or hidden states go in, hidden states or logits come out."""

    stage_layout: StageLayout
    base_model: Any

    def forward(self, *given: Tensor, **named: Any) -> Tensor:
        """The part of the model's forward that this stage has."""
        if len(given) != 1 or not named.keys().isdisjoint(_NOT_FOR_STAGES):
            raise PipelineError(_told_arguments(len(given), named))
        stage = self.stage_layout
        named |= {"input_ids" if stage.has_embedding else "inputs_embeds": given[0]}
        run = super().forward if stage.has_head else self.base_model
        output = run(**named, use_cache=False, return_dict=True)
        return output.logits if stage.has_head else output.last_hidden_state  # type: ignore[no-any-return]

    @property
    def own_layers(self) -> list[nn.Module]:
        """The layers that this stage holds, in order: what to shard or to compile one by one."""
        layers: Any = next(child for child in self.base_model.children() if isinstance(child, nn.ModuleList))
        return [layers[number] for number in self.stage_layout.layers]

    def __reduce__(self) -> tuple[Any, ...]:
        model_class = next(base for base in type(self).__bases__ if base is not _Stage)
        return _blank, (model_class,), self.__dict__


def _told_arguments(count: int, named: Iterable[str]) -> str:
    faults = [f"`{name}`: {_NOT_FOR_STAGES[name]}" for name in named if name in _NOT_FOR_STAGES]
    if count != 1:
        faults.insert(0, f"a stage takes one tensor, ids or hidden states, and is given {count}")
    return "\n".join(faults)


_STAGE_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def stage_class(model_class: type[nn.Module]) -> type[nn.Module]:
    """The class of the stages of a model of this class, always the same one."""
    if model_class not in _STAGE_CLASSES:
        # where the class says it is from decides how transformers initialises it
        _STAGE_CLASSES[model_class] = type(
            f"{model_class.__name__}Stage", (_Stage, model_class), {"__module__": model_class.__module__}
        )
    return _STAGE_CLASSES[model_class]


def _blank(model_class: type[nn.Module]) -> nn.Module:
    made_of = stage_class(model_class)
    return made_of.__new__(made_of)


_FRESH = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)]
_HOOKS = [name for name in _FRESH if name.endswith("hooks")]


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody has registered a hook on the module itself."""
    return any(vars(module)[hooks] for hooks in _HOOKS)


def shell(module: nn.Module, made_of: type[nn.Module]) -> nn.Module:
    """A copy that has the module's very children and other attributes, and can be given other children."""
    shell = made_of.__new__(made_of)
    vars(shell).update(vars(module))
    vars(shell).update({name: copy.copy(vars(module)[name]) for name in _FRESH})
    return shell


# --- split backward --------------------------------------------------------------------------------


class _Conv1DRule:
    """GPT-2's linear layer, whose weight lies the other way round."""

    weights = ("weight", "bias")

    def forward(self, _layer: nn.Module, x: Tensor, *weights: Tensor | None) -> Tensor:
        weight, bias = weights
        assert weight is not None
        assert bias is not None
        y = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
        return y.view(*x.shape[:-1], weight.shape[1])

    def input_gradient(self, _layer: nn.Module, x: Tensor, weights: Tensors, gradient: Tensor) -> Tensor:
        weight = weights[0]
        assert weight is not None
        flat = gradient.reshape(-1, weight.shape[1])
        return (flat @ weight.to(gradient.dtype).t()).view(x.shape)

    def weight_gradients(
        self, _layer: nn.Module, x: Tensor, _weights: Tensors, gradient: Tensor, wanted: tuple[bool, ...]
    ) -> Tensors:
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_weight = x.view(-1, x.shape[-1]).t() @ flat if wanted[0] else None
        return of_weight, flat.sum(0) if wanted[1] else None


def register_conv1d() -> None:
    """Put aside the weight gradients of GPT-2's layers too."""
    utilities: Any = sys.modules.get("transformers.pytorch_utils")
    if utilities is not None:
        register_layer(utilities.Conv1D, _Conv1DRule())
