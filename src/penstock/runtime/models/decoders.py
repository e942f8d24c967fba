"""Decoder models of `transformers`, such as Llama or GPT-2, come apart into stages.

A stage is the model's own class with the model's own backbone, in which what other stages hold is replaced by
modules that do nothing:

                     stage 0         stage 1         stage 2
    embed_tokens     Embedding       -               -
    layers.0         DecoderLayer    -               -
    layers.1         -               DecoderLayer    -
    layers.2         -               -               DecoderLayer
    norm             -               -               RMSNorm
    rotary_emb       its own         its own         its own
    lm_head          -               -               Linear

So masks, positions and whatever a layer is called with are made by the model's own code, on every stage anew
from the same keyword arguments, and a layer keeps its number. Between stages one tensor travels, the hidden
states.
"""

from __future__ import annotations

import copy
import sys
from typing import Any, TypeAlias

import torch
from torch import nn

from penstock.arguments import printable
from penstock.errors import PartitionError
from penstock.planning.layout import PipelineLayout, StageLayout
from penstock.runtime.models.decoder_stage import (
    Elsewhere,
    Nothing,
    has_hooks,
    register_conv1d,
    shell,
    stage_class,
)

__all__ = ["Decoder", "is_pretrained"]

_Model: TypeAlias = Any
"""A PreTrainedModel; its types are known only where transformers is installed."""

_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "drop")
_NORMS = ("norm", "ln_f")
_EVERYWHERE = ("rotary_emb",)


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of transformers', which is loaded if such a model is there."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


class Decoder:
    """A model of transformers that can be cut, and how it is built."""

    def __init__(self, model: nn.Module) -> None:
        self._model: _Model = model
        self._check_kind()
        self._backbone_name = str(self._model.base_model_prefix)
        self._backbone: _Model = self._model.base_model
        self._layers_name, self._norm_name = self._checked_structure()
        self._head_name = next(name for name, _ in model.named_children() if name != self._backbone_name)
        self.layers: int = len(getattr(self._backbone, self._layers_name))
        """How many layers there are."""
        self._check_what_is_cut()
        self._check_forward()

    @property
    def places(self) -> dict[str, tuple[int, ...]]:
        """Where stages can begin: the layers by number from 1 on, then the norm; () is the very beginning."""
        inside = f"{self._backbone_name}."
        layers = f"{inside}{self._layers_name}"
        names: dict[str, tuple[int, ...]] = {}
        for name, _ in self._backbone.named_children():
            if name in _EMBEDDINGS:
                names[inside + name] = ()
        names[self._backbone_name] = ()
        names[layers] = (1,)
        names |= {f"{layers}.{layer}": (layer + 1,) for layer in range(self.layers)}
        return names | {f"{inside}{self._norm_name}": (self.layers + 1,)}

    def stages(self, layout: PipelineLayout) -> dict[int, nn.Module]:
        """The stages by their numbers."""
        register_conv1d()
        return {number: self._stage(stage) for number, stage in enumerate(layout)}

    def _stage(self, stage: StageLayout) -> nn.Module:
        model: _Model = shell(self._model, stage_class(type(self._model)))
        model.stage_layout = stage
        model.add_module(self._backbone_name, self._part_of_backbone(stage))
        if not stage.has_head:
            model.add_module(self._head_name, Elsewhere())
        return model  # type: ignore[no-any-return]

    def _part_of_backbone(self, stage: StageLayout | None) -> nn.Module:
        """The backbone with what a stage has; with nothing at all for None."""
        part = shell(self._backbone, type(self._backbone))
        for name, child in self._backbone.named_children():
            if name in _EVERYWHERE:
                config = self._model.config
                own = Nothing() if stage is None else copy.deepcopy(child, {id(config): config})
            elif name == self._layers_name:
                kept = () if stage is None else stage.layers
                own = shell(child, type(child))
                own._modules = {  # noqa: SLF001 -- ModuleList has no way to take its modules with their names
                    str(number): layer if number in kept else Elsewhere() for number, layer in enumerate(child)
                }
            elif name in _NORMS:
                own = child if stage is not None and stage.has_head else Elsewhere()
            elif stage is not None and stage.has_embedding:
                own = child
            else:
                own = Nothing() if isinstance(child, nn.Embedding) else Elsewhere()
            part.add_module(name, own)
        return part

    # --- what cannot be split ----------------------------------------------------------------------

    def _check_kind(self) -> None:
        model = self._model
        if model.config.is_encoder_decoder or getattr(model.config, "add_cross_attention", False):
            raise _refusal(model, "has an encoder, or attends to one")
        if model.base_model is model:
            raise _refusal(model, "is a backbone without a head: take the class that ends in ForCausalLM")
        children = dict(model.named_children())
        heads = [name for name in children if name != model.base_model_prefix]
        if len(heads) != 1 or children[heads[0]] is not model.get_output_embeddings():
            raise _refusal(model, f"has not one language head beside its backbone, but {heads}")

    def _checked_structure(self) -> tuple[str, str]:
        """The names of the list of layers and of the norm; every other child must be known too."""
        children = dict(self._backbone.named_children())
        count = self._model.config.num_hidden_layers
        layers = [
            name for name, child in children.items() if isinstance(child, nn.ModuleList) and len(child) == count
        ]
        norms = [name for name in children if name in _NORMS]
        known = (*_EMBEDDINGS, *_EVERYWHERE, *layers, *norms)
        if unknown := [name for name in children if name not in known]:
            raise _refusal(self._model, f"has parts in its backbone whose stage nobody knows: {unknown}")
        if len(layers) != 1 or len(norms) != 1:
            raise _refusal(self._model, f"has not one list of {count} layers, as its config says, and one norm")
        return layers[0], norms[0]

    def _check_what_is_cut(self) -> None:
        faults = []
        for called, module in (("the model", self._model), (repr(self._backbone_name), self._backbone)):
            if any(True for _ in module.parameters(recurse=False)) or any(
                True for _ in module.buffers(recurse=False)
            ):
                faults.append(
                    f"{called} is cut and has parameters or buffers of its own, which would belong to no stage"
                )
            if has_hooks(module):
                faults.append(
                    f"{called} is cut and has hooks, which would run in every stage: put them on its layers"
                )
        if faults:
            raise PartitionError("\n".join(faults))

    def _check_forward(self) -> None:
        """A backbone without modules must change nothing: its own work would be done again on each stage."""
        hollow: _Model = self._part_of_backbone(None)
        in_order = [*getattr(hollow, self._layers_name), getattr(hollow, self._norm_name)]
        called: list[nn.Module] = []
        for module in in_order:
            module.register_forward_hook(lambda module, *_: called.append(module))
        width = self._model.config.hidden_size
        x = torch.linspace(-1, 1, 2 * width, device="cpu").view(1, 2, width)
        why = ""
        try:
            with torch.no_grad():
                y = hollow(inputs_embeds=x, use_cache=False, return_dict=True).last_hidden_state
        except Exception as error:  # noqa: BLE001 -- whatever it is, this backbone is not what we know
            why = f"does not run without its layers ({printable(f'{type(error).__name__}: {error}', 100)})"
        else:
            if called != in_order:
                why = "does more than to run each layer once, in order, and the norm after them"
            elif not torch.equal(x, y):
                why = "computes with the hidden states outside of its layers"
        if why:
            raise _refusal(self._model, why)


def _refusal(model: nn.Module, why: str) -> PartitionError:
    return PartitionError(
        f"{printable(type(model).__name__)} {why}. Of the models of transformers, split() cuts decoders with a "
        "language head whose backbone is embedding, layers and norm: LlamaForCausalLM, Qwen2ForCausalLM, "
        "Qwen3ForCausalLM, MistralForCausalLM, GPT2LMHeadModel and others like them. Otherwise write a module "
        "for each stage yourself, and pass them to Pipeline"
    )
