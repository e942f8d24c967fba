"""Small decoders of transformers made from configs, their batches, and training them in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import next_word, seeded

__all__ = [
    "LAYERS",
    "MODELS",
    "batch",
    "decoder",
    "gradients_of",
    "layer_names",
    "library",
    "trained",
]

WORDS = 29
LENGTH = 7
LAYERS = 5
_COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {
    "vocab_size": WORDS,
    "n_embd": 16,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 32,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = 3  # shorter than a sequence
_CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _COMMON),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**_COMMON, "use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_COMMON, "head_dim": 4}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_COMMON, "head_dim": 4, "sliding_window": _WINDOW}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
}
MODELS = tuple(_CONFIGS)


def library() -> Any:
    """The module `transformers`, which is loaded only in the processes that need it."""
    import transformers  # noqa: PLC0415

    return transformers


def decoder(kind: str, *, tied: bool = False, **changes: Any) -> Any:
    """A model with the same weights in every process, none of them zero."""
    transformers = library()
    transformers.logging.set_verbosity_error()
    model_name, config_name, options = _CONFIGS[kind]
    config = getattr(transformers, config_name)(**{**options, **changes}, tie_word_embeddings=tied)
    model = getattr(transformers, model_name)(config)
    for number, parameter in enumerate(model.parameters()):
        if not parameter.is_meta:
            nn.init.normal_(parameter, mean=0.1, std=0.2, generator=seeded(number))
    return model


def layer_names(kind: str) -> str:
    return "transformer.h" if kind == "gpt2" else "model.layers"


def batch(rows: int, given: str = "") -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Ids, targets and keyword arguments: none, a mask with padding on both sides, or positions too."""
    text = torch.randint(WORDS, (rows, LENGTH + 1), generator=seeded(rows))
    ids, target = text[:, :-1], text[:, 1:].clone()
    if not given:
        return ids, target, {}
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    mask[-1, 4:] = 0
    named: dict[str, Any] = {"attention_mask": mask}
    if given == "positions":
        named["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return ids, target, named


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """By all names that a parameter has."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


def trained(model: Any, rows: int, m: int, given: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients in one process, microbatch by microbatch."""
    ids, target, named = batch(rows, given)
    logits = []
    for k in range(m):
        parts = {name: value.tensor_split(m)[k] for name, value in named.items()}
        logits.append(model(ids.tensor_split(m)[k], **parts, use_cache=False).logits)
        (next_word(logits[-1], target.tensor_split(m)[k]) / m).backward()  # type: ignore[no-untyped-call]
    return torch.cat(logits).detach(), gradients_of(model)
