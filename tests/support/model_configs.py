"""Model configs of the tests: the committed ones, and GPTs of any size."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from penstock.cost.estimate import ModelConfig, config_of_keys, read_config

__all__ = ["CONFIGS", "config", "gpt_config", "gpt_keys"]

CONFIGS = Path(str(files("penstock.cost.estimate") / "models"))


def config(name: str) -> ModelConfig:
    """A committed config."""
    return read_config(name)


def gpt_keys(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """The keys of a GPT-2 config without tied weights."""
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50_000}
    return {"model_type": "gpt2", "tie_word_embeddings": False, **sizes, **more}


def gpt_config(hidden: int, layers: int, heads: int, **more: Any) -> ModelConfig:
    """A GPT of this size."""
    return config_of_keys(gpt_keys(hidden, layers, heads, **more))
