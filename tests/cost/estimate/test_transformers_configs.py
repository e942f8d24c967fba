"""Promise: a config.json describes the model that transformers builds from it, also without optional keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cost.estimate import parameters, read_config

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
}
EXPERTS = SMALL | {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = EXPERTS | {
    "num_key_value_heads": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mistral": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 128},
    "mixtral": SMALL | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 80},
    "qwen3_moe": EXPERTS | {"num_experts": 8},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
}
CHANGES: dict[str, list[dict[str, Any]]] = {
    "llama": [{"attention_bias": True, "mlp_bias": True}, {"head_dim": 24}, {"tie_word_embeddings": True}],
    "mistral": [{"head_dim": 24}, {"tie_word_embeddings": True}],
    "qwen2": [{"tie_word_embeddings": True}],
    "qwen3": [{"attention_bias": True}, {"head_dim": 24}, {"tie_word_embeddings": True}],
    "gpt2": [{"n_inner": 100}, {"tie_word_embeddings": False}],
    "mixtral": [{"head_dim": 24}, {"tie_word_embeddings": True}],
    "qwen2_moe": [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 3]}, {"qkv_bias": False}],
    "qwen3_moe": [
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [1]},
        {"attention_bias": True},
        {"head_dim": 24},
    ],
    "deepseek_v2": [{"attention_bias": True}, {"q_lora_rank": None}, {"first_k_dense_replace": 0}],
    "deepseek_v3": [{"attention_bias": True}, {"q_lora_rank": None}, {"first_k_dense_replace": 0}],
}
OPTIONAL = (
    *("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias"),
    *("shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "n_inner"),
    *("q_lora_rank", "n_shared_experts", "first_k_dense_replace", "topk_group", "num_nextn_predict_layers"),
)


def built(file: Path) -> int:
    """Return the number of parameters of the model that transformers builds, without allocating it."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 -- takes a second

    config = AutoConfig.from_pretrained(file.parent)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.tie_weights()
    biases = [each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return sum(int(tensor.numel()) for tensor in (*model.parameters(), *biases))


def written(folder: Path, kind: str, keys: dict[str, Any]) -> Path:
    from transformers import AutoConfig  # noqa: PLC0415 -- takes a second

    AutoConfig.for_model(kind, **keys).save_pretrained(folder)
    return folder / "config.json"


@pytest.mark.parametrize("kind", MODELS)
def test_a_config_that_transformers_writes_has_the_parameters_of_its_model(kind: str, tmp_path: Path) -> None:
    for number, changes in enumerate([{}, *CHANGES[kind]]):
        file = written(tmp_path / str(number), kind, MODELS[kind] | changes)
        assert parameters(read_config(file)) == built(file), changes


@pytest.mark.parametrize("kind", MODELS)
def test_a_key_that_a_file_leaves_out_has_the_default_of_transformers(kind: str, tmp_path: Path) -> None:
    full = json.loads(written(tmp_path / "full", kind, MODELS[kind]).read_text())
    for key in sorted(set(OPTIONAL) & set(full)):
        file = tmp_path / key / "config.json"
        file.parent.mkdir()
        file.write_text(json.dumps({name: value for name, value in full.items() if name != key}))
        assert parameters(read_config(file)) == built(file), f"without {key}"
