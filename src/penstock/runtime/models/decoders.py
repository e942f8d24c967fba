"""Splitting a decoder model of `transformers`, such as Llama or GPT-2, into stages.

A stage is an instance of the model's own class with its own backbone. Placeholders that do nothing replace the
modules that other stages hold:

                     stage 0         stage 1         stage 2
    embed_tokens     Embedding       -               -
    layers.0         DecoderLayer    -               -
    layers.1         -               DecoderLayer    -
    layers.2         -               -               DecoderLayer
    norm             -               -               RMSNorm
    rotary_emb       copy            copy            copy
    lm_head          -               -               Linear

The model's own code therefore computes masks, positions and other arguments of the layers, on every stage again
from the same keyword arguments, and a layer keeps its number. One tensor travels between stages, the hidden
states.
"""

from __future__ import annotations

import copy
import sys
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.arguments import printable
from penstock.errors import PartitionError, PipelineError
from penstock.planning.layout import PipelineLayout, StageLayout
from penstock.runtime.backward.layer_rules import Tensors, register_layer
from penstock.runtime.models.stage_starts import has_hooks
from penstock.runtime.torch_internals.modules import replace_children

_Model: TypeAlias = Any
"""A PreTrainedModel; transformers is optional, so its types are not available here."""

_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "drop")
_NORMS = ("norm", "ln_f")
_REPLICATED = ("rotary_emb",)
_CONTAINERS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)]
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


class _Conv1DRule:
    """The layer rule of `Conv1D`, GPT-2's linear layer, whose weight is transposed."""

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
        weight_gradient = x.view(-1, x.shape[-1]).t() @ flat if wanted[0] else None
        return weight_gradient, flat.sum(0) if wanted[1] else None

    def add_weight_gradients(self, _layer: nn.Module, x: Tensor, gradient: Tensor, totals: Tensors) -> None:
        flat = gradient.reshape(-1, gradient.shape[-1])
        if totals[0] is not None:
            totals[0].addmm_(x.view(-1, x.shape[-1]).t(), flat)
        if totals[1] is not None:
            totals[1].add_(flat.sum(0))


def register_conv1d() -> None:
    """Register the rule, if transformers is loaded."""
    utilities: Any = sys.modules.get("transformers.pytorch_utils")
    if utilities is not None:
        register_layer(utilities.Conv1D, _Conv1DRule())


class _Identity(nn.Module):
    """Replaces a module that another stage holds: returns its first argument and ignores the others."""

    def forward(self, value: Any, *_: object, **__: object) -> Any:
        return value


class _Zero(nn.Module):
    """Replaces an embedding that another stage holds and whose output is added: returns zero."""

    def forward(self, value: Tensor, *_: object, **__: object) -> Tensor:
        return torch.zeros((), device=value.device)  # broadcasts to any shape


class _Stage(nn.Module):
    """A mixin that turns a model class into a stage, from ids or hidden states to hidden states or logits."""

    stage_layout: StageLayout
    base_model: Any

    def forward(self, *inputs: Tensor, **named: Any) -> Tensor:
        unsupported = [f"`{name}`: {why}" for name, why in _UNSUPPORTED_ARGUMENTS.items() if name in named]
        if len(inputs) != 1:
            wrong = f"a stage takes one tensor, ids or hidden states, but {len(inputs)} were passed"
            unsupported.insert(0, wrong)
        if unsupported:
            raise PipelineError("\n".join(unsupported))
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


@cache
def _stage_class(model_class: type[nn.Module]) -> type[nn.Module]:
    # transformers chooses the initialization by the module of the class
    attributes = {"__module__": model_class.__module__}
    return type(f"{model_class.__name__}Stage", (_Stage, model_class), attributes)


def _uninitialized_stage(model_class: type[nn.Module]) -> nn.Module:
    cls = _stage_class(model_class)  # type: ignore[arg-type]
    return cls.__new__(cls)


def _shallow_copy(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """A copy of the class `cls` with the same children and attributes, whose children can be replaced."""
    copied = cls.__new__(cls)
    vars(copied).update(vars(module))
    vars(copied).update({name: copy.copy(vars(module)[name]) for name in _CONTAINERS})
    return copied


def is_pretrained(model: nn.Module) -> bool:
    """Return whether this is a model of transformers, which is not imported here."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


class Decoder:
    """A model of transformers that can be split, with its checked structure."""

    def __init__(self, model: nn.Module) -> None:
        self.model: _Model = model
        self._check_kind()
        self._backbone_name = str(self.model.base_model_prefix)
        self._backbone: _Model = self.model.base_model
        self._layers_name, self._norm_name = self._checked_structure()
        self._head_name = next(name for name, _ in model.named_children() if name != self._backbone_name)
        self.layers: int = len(getattr(self._backbone, self._layers_name))
        """The number of layers."""
        self._check_split_modules()
        self._check_forward()

    @property
    def starts(self) -> dict[str, int]:
        """Where stages can begin: the layers, numbered from 1, then the norm; 0 is the start of the model."""
        backbone, layers = self._backbone_name, f"{self._backbone_name}.{self._layers_name}"
        embeddings = [name for name, _ in self._backbone.named_children() if name in _EMBEDDINGS]
        return {
            **{f"{backbone}.{name}": 0 for name in embeddings},
            backbone: 0,
            layers: 1,
            **{f"{layers}.{layer}": layer + 1 for layer in range(self.layers)},
            f"{backbone}.{self._norm_name}": self.layers + 1,
        }

    def stages(self, layout: PipelineLayout) -> dict[int, nn.Module]:
        """Return the stages by number."""
        register_conv1d()
        return {number: self._stage(stage) for number, stage in enumerate(layout)}

    def _stage(self, stage: StageLayout) -> nn.Module:
        cls = _stage_class(type(self.model))  # type: ignore[arg-type]
        model: _Model = _shallow_copy(self.model, cls)
        model.stage_layout = stage
        model.add_module(self._backbone_name, self._backbone_part(stage))
        if not stage.has_head:
            model.add_module(self._head_name, _Identity())
        return model  # type: ignore[no-any-return]

    def _backbone_part(self, stage: StageLayout | None) -> nn.Module:
        """The backbone with the modules of a stage; without any for None."""
        part = _shallow_copy(self._backbone, type(self._backbone))
        for name, child in self._backbone.named_children():
            if name in _REPLICATED:
                config = self.model.config
                own = _Zero() if stage is None else copy.deepcopy(child, {id(config): config})
            elif name == self._layers_name:
                kept = () if stage is None else stage.layers
                own = _shallow_copy(child, type(child))
                layers = enumerate(child)
                replace_children(own, {str(n): layer if n in kept else _Identity() for n, layer in layers})
            elif name in _NORMS:
                own = child if stage is not None and stage.has_head else _Identity()
            elif stage is not None and stage.has_embedding:
                own = child
            else:
                own = _Zero() if isinstance(child, nn.Embedding) else _Identity()
            part.add_module(name, own)
        return part

    # --- checks ------------------------------------------------------------------------------------

    def _check_kind(self) -> None:
        model, why = self.model, ""
        children = dict(model.named_children())
        heads = [name for name in children if name != model.base_model_prefix]
        if model.config.is_encoder_decoder or getattr(model.config, "add_cross_attention", False):
            why = "has an encoder, or cross-attention"
        elif model.base_model is model:
            why = "is a backbone without a head: use the class that ends in ForCausalLM"
        elif len(heads) != 1 or children[heads[0]] is not model.get_output_embeddings():
            why = f"does not have exactly one language head beside its backbone, but {heads}"
        self._raise_if(why)

    def _checked_structure(self) -> tuple[str, str]:
        """The names of the list of layers and of the norm; all other children must be known, too."""
        children = dict(self._backbone.named_children())
        count = self.model.config.num_hidden_layers
        lists = [name for name, child in children.items() if isinstance(child, nn.ModuleList)]
        layers = [name for name in lists if len(children[name]) == count]
        norms = [name for name in children if name in _NORMS]
        known = (*_EMBEDDINGS, *_REPLICATED, *layers, *norms)
        unknown = [name for name in children if name not in known]
        self._raise_if(f"has unknown modules in its backbone: {unknown}" if unknown else "")
        if len(layers) != 1 or len(norms) != 1:
            self._raise_if(f"does not have exactly one list of {count} layers, as in its config, and one norm")
        return layers[0], norms[0]

    def _check_split_modules(self) -> None:
        problems = []
        for what, module in (("the model", self.model), (repr(self._backbone_name), self._backbone)):
            if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                problems.append(
                    f"{what} is split and has parameters or buffers of its own, which would belong to no stage"
                )
            if has_hooks(module):
                problems.append(
                    f"{what} is split and has hooks, which would run in every stage: put them on its layers"
                )
        if problems:
            raise PartitionError("\n".join(problems))

    def _check_forward(self) -> None:
        """A backbone without modules must change nothing: every stage would repeat what it computes."""
        empty: _Model = self._backbone_part(None)
        in_order = [*getattr(empty, self._layers_name), getattr(empty, self._norm_name)]
        called: list[nn.Module] = []
        for module in in_order:
            module.register_forward_hook(lambda module, *_: called.append(module))
        width = self.model.config.hidden_size
        x = torch.linspace(-1, 1, 2 * width, device="cpu").view(1, 2, width)
        why = ""
        try:
            with torch.no_grad():
                y = empty(inputs_embeds=x, use_cache=False, return_dict=True).last_hidden_state
        except Exception as error:  # noqa: BLE001 -- any error means that the backbone is not supported
            why = f"does not run without its layers ({printable(f'{type(error).__name__}: {error}', 100)})"
        else:
            if called != in_order:
                why = "does not run each layer once, in order, and then the norm"
            elif not torch.equal(x, y):
                why = "changes the hidden states outside of its layers"
        self._raise_if(why)

    def _raise_if(self, why: str) -> None:
        if why:
            raise PartitionError(
                f"{printable(type(self.model).__name__)} {why}. Of the models of transformers, split() "
                "supports decoders with a language head whose backbone is embedding, layers and norm: "
                "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MistralForCausalLM, GPT2LMHeadModel and "
                "similar ones. "
                "Otherwise write one module for each stage and pass them to Pipeline"
            )
