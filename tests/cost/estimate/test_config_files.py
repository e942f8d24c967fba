"""Promises of model configs: what is wrong is said at once, with what would be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cost.estimate.layers import layer_operations
from penstock.cost.estimate.model_config import ARCHITECTURES, config_of_keys, is_config, read_config
from penstock.cost.estimate.parallel_config import ParallelConfig
from penstock.errors import EstimateError, FormatError
from tests.support.model_configs import CONFIGS, config, gpt_keys

LLAMA = json.loads((CONFIGS / "llama-3-8b.json").read_text())


def test_the_name_is_that_of_the_file_or_of_its_directory(tmp_path: Path) -> None:
    (tmp_path / "My-7B").mkdir()
    path = tmp_path / "My-7B" / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert read_config(path).name == "My-7B"
    assert config("llama-3-8b").name == "llama-3-8b"


def test_configs_are_told_from_costs() -> None:
    assert is_config(LLAMA)
    assert not is_config({"forward_seconds": 1})
    assert not is_config([LLAMA])


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_missing_key_is_named(kind: str) -> None:
    with pytest.raises(FormatError) as failure:
        config_of_keys({"model_type": kind})
    hidden = "n_embd" if kind == "gpt2" else "hidden_size"
    assert any(problem.startswith(f"missing {hidden}:") for problem in failure.value.problems)
    assert any(problem.startswith("missing vocab_size:") for problem in failure.value.problems)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "llama4_text"},
            "unknown architecture: model_type 'llama4_text'.*change the line: .model_type.: .llama.",
        ),
        ({"model_type": None}, "missing model_type; known are llama"),
        ({"hidden_size": "4096"}, "hidden_size: must be an integer from 1 to 1e9 .given '4096'."),
        ({"hidden_size": 4097}, "num_attention_heads: 32 does not divide hidden_size 4097"),
        ({"num_key_value_heads": 5}, "32 heads and 5 key-value heads"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: must be true or false"),
    ],
)
def test_errors_name_the_key_and_what_it_must_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        config_of_keys(LLAMA | changes)


def test_a_multimodal_config_says_which_part_to_use() -> None:
    with pytest.raises(FormatError, match="text_config"):
        config_of_keys({"model_type": "llava", "text_config": LLAMA})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama-3-8b",
            {"tensor_parallel": 5},
            "tensor_parallel=5 does not divide 32 .attention.*try tensor_parallel=4",
        ),
        ("llama-3-8b", {"expert_parallel": 2}, "llama-3-8b has no experts; leave it out"),
        ("llama-3-8b", {"sequence": 0}, "sequence must be an integer above 0 .given 0"),
        ("llama-3-8b", {"sequence": 4100, "context_parallel": 8}, "sequence=4100 must be a multiple of 16"),
        (
            "llama-3-8b",
            {"recompute_granularity": "all"},
            "recompute_granularity must be one of none, selective, pointwise, lat",
        ),
        (
            "mixtral-8x7b",
            {"expert_parallel": 3, "data_parallel": 3},
            "expert_parallel=3 does not divide the 8 experts",
        ),
        (
            "mixtral-8x7b",
            {"expert_parallel": 8},
            "expert_parallel=8 does not divide tensor_parallel x .* = 1.*try data_parallel=8",
        ),
    ],
)
def test_settings_that_do_not_fit_a_model_say_what_would(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EstimateError, match=message):
        layer_operations(config(name), ParallelConfig(**{"sequence": 4096, **changes}))


def test_gpt2_ties_its_weights_unless_the_config_says_otherwise() -> None:
    keys = gpt_keys(64, 2, 4)
    assert not config_of_keys(keys).tied
    del keys["tie_word_embeddings"]
    assert config_of_keys(keys).tied
