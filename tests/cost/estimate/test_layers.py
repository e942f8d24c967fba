"""Promises of the estimated layers: weights, FLOPs and saved bytes equal the published formulas and counts."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cost.estimate.layers import (
    active_parameters,
    layer_operations,
    model_flops,
    parameters,
)
from penstock.cost.estimate.model_config import config_of_keys
from penstock.cost.estimate.parallel_config import ParallelConfig
from tests.support.model_configs import config, gpt_config

PARAMETERS = {
    "gpt2": 124_439_808,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
}
"""Counted in the published checkpoints; of DeepSeek-V3 without its multi-token-prediction block."""

GPT = gpt_config(2048, 4, 16)
S, B, H, A = 1024, 2, 2048, 16


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_equal_those_of_the_published_checkpoints(name: str) -> None:
    assert parameters(config(name)) == PARAMETERS[name]


def test_active_parameters_are_the_published_ones() -> None:
    assert active_parameters(config("mixtral-8x7b")) == pytest.approx(12.9e9, rel=0.005)
    # 37B are activated of DeepSeek-V3; its report does not count the embedding
    active = active_parameters(config("deepseek-v3"))
    assert active - 129280 * 7168 == pytest.approx(36.6e9, rel=0.005)


def test_the_prediction_block_of_deepseek_has_its_published_weights() -> None:
    model = config("deepseek-v3")
    assert parameters(model, with_mtp=True) - parameters(model) == pytest.approx(11.6e9, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 34 + 5 * A * S / H),
        ({"recompute_granularity": "selective"}, 34),
        ({"recompute_granularity": "full"}, 2),
        ({"tensor_parallel": 8, "sequence_parallel": False}, 10 + 24 / 8 + 5 * A * S / (H * 8)),
        ({"tensor_parallel": 8}, (34 + 5 * A * S / H) / 8),
        ({"tensor_parallel": 8, "recompute_granularity": "selective"}, 34 / 8),
        ({"context_parallel": 2, "recompute_granularity": "selective"}, 34 / 2),
    ],
)
def test_saved_bytes_equal_the_formulas_of_megatron(changes: dict[str, Any], factor: float) -> None:
    parallel = ParallelConfig(sequence=S, microbatch_size=B, attention="unfused", **changes)
    block = layer_operations(GPT, parallel)["block"]
    assert block.activation == pytest.approx(S * B * H * factor)


def test_a_deferred_weight_gradient_keeps_what_the_zero_bubble_paper_says() -> None:
    block = layer_operations(GPT, ParallelConfig(sequence=S, attention="unfused"))["block"]
    assert block.kept_for_weight == 32 * S * H


def test_flops_equal_the_formulas_of_megatron() -> None:
    layers = layer_operations(GPT, ParallelConfig(sequence=S, microbatch_size=B, attention="unfused"))
    assert layers["block"].flops.total == B * S * H * (72 * H + 12 * S)
    assert layers["output"].flops.total == 6 * B * S * H * 50_000
    whole = 4 * B * S * H * (72 * H + 12 * S) + 6 * B * S * H * 50_000
    assert model_flops(GPT, S) * B * S == pytest.approx(whole)


def test_flops_of_a_token_are_six_for_each_weight_of_a_product_and_those_of_attention() -> None:
    model = config("llama-3-8b")
    in_products = parameters(model) - model.vocabulary * model.hidden - (2 * 32 + 1) * 4096
    assert model_flops(model, 8192) == pytest.approx(6 * in_products + 12 * 32 * 32 * 128 * 8192)


def test_ranks_of_a_block_share_weights_flops_and_saved_bytes() -> None:
    model = config("mixtral-8x7b")
    whole = layer_operations(model, ParallelConfig(sequence=4096))["expert block"]
    parallel = ParallelConfig(sequence=4096, tensor_parallel=4, data_parallel=2, expert_parallel=8)
    part = layer_operations(model, parallel)["expert block"]
    assert part.weights(expert=True) == whole.weights(expert=True) / 8
    assert part.flops.total == pytest.approx(whole.flops.total / 4)
    assert part.activation == pytest.approx(whole.activation / 4, rel=1e-3)
    (dispatch,) = (each for each in part.collectives if each.group == "expert")
    assert dispatch.bytes.forward == 2 * 2 * (4096 / 4) * 2 * 4096 * 7 / 8


def test_recomputation_repeats_the_forward_it_saves() -> None:
    model = config("llama-3-8b")
    levels = {
        level: layer_operations(model, ParallelConfig(sequence=8192, recompute_granularity=level))["block"]
        for level in ("none", "selective", "pointwise", "full")
    }
    none, full = levels["none"], levels["full"]
    assert levels["selective"].activation == none.activation  # flash attention saves no softmax
    assert full.flops.input_gradient == none.flops.input_gradient + none.flops.forward
    assert none.activation > levels["pointwise"].activation > full.activation == 2 * 8192 * 4096
    assert levels["pointwise"].flops == none.flops
    assert levels["pointwise"].repeated


def test_latent_attention_can_save_low_ranks_only() -> None:
    """As DeepSeek-V3 was trained: 128 heads of 192 + 192 + 128 values are computed again from 1536 + 512."""
    pointwise, latent = (
        layer_operations(config("deepseek-v3"), ParallelConfig(sequence=4096, recompute_granularity=level))[
            "expert block"
        ]
        for level in ("pointwise", "latent")
    )
    assert pointwise.activation - latent.activation == 2 * 4096 * 128 * (192 + 192 + 128)
    again = 2 * 4096 * 128 * (1536 * 192 + 512 * (128 + 128))
    assert latent.flops.input_gradient - pointwise.flops.input_gradient == again
    plain = [
        layer_operations(config("llama-3-8b"), ParallelConfig(sequence=4096, recompute_granularity=level))[
            "block"
        ].activation
        for level in ("pointwise", "latent")
    ]
    assert plain[0] == plain[1]


def test_precision_changes_what_is_saved() -> None:
    sizes = [
        layer_operations(config("llama-3-8b"), ParallelConfig(sequence=8192, precision=each))[
            "block"
        ].activation
        for each in ("fp8", "bf16", "fp32")
    ]
    assert sizes[2] == pytest.approx(2 * sizes[1], rel=0.01)
    assert sizes[0] < sizes[1]


def test_the_output_layer_runs_again_for_each_predicted_token() -> None:
    keys = {
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 0,
    }
    one, two = (
        layer_operations(config_of_keys({**keys, "num_nextn_predict_layers": n}), ParallelConfig(sequence=32))
        for n in (0, 1)
    )
    assert two["output"].flops.total == 2 * one["output"].flops.total
    assert two["output"].weights(expert=False) == one["output"].weights(expert=False)
    assert two["mtp block"].message == 2 * one["expert block"].message
