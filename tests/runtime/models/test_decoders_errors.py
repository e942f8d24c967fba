"""Promise: models, layouts, names and arguments that a decoder stage cannot take are rejected with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import PartitionError, PipelineError
from penstock.runtime import split
from tests.support.hub_models import batch, decoder, library


def error_of(model: nn.Module, **how: Any) -> str:
    with pytest.raises(PartitionError) as caught:
        split(model, **how)
    return str(caught.value)


def test_layouts_with_another_number_of_layers_are_rejected() -> None:
    whole = decoder("llama")
    message = error_of(whole, layout="Ett|ttL")
    assert "has 4 layers (t), but the model has 5: layer 4 would be left out" in message
    assert "has 6 layers (t), but the model has 5: layer 5 does not exist" in error_of(whole, layout="Et*6|L")


def test_all_names_at_which_no_stage_can_begin_are_reported_at_once() -> None:
    whole = decoder("llama")
    message = error_of(whole, at=["model.layers.9", "model.embed_tokens", "lm_head", "model.layers.2.mlp"])
    assert "no module 'model.layers.9' in the model: did you mean 'model.layers." in message
    assert "'model.embed_tokens' is the very first module" in message
    assert "'lm_head'" in message
    assert "'model.layers.2.mlp'" in message
    message = error_of(whole, at=["model.layers.3", "model.layers.1", "model.layers.1"])
    assert "in the order of the model: 'model.layers.1', 'model.layers.3'" in message
    assert "'model.layers.1' is a duplicate" in message


def tiny(name: str, **changes: Any) -> Any:
    """A model of another kind, on the meta device."""
    sizes = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(library(), name.replace("ForCausalLM", "Config"))(**sizes, **heads, **changes)
    with torch.device("meta"):
        return getattr(library(), name)(config)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: library().T5ForConditionalGeneration(
                library().T5Config(vocab_size=29, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
            ),
            "has an encoder",
        ),
        (lambda: decoder("gpt2", add_cross_attention=True), "has an encoder, or cross-attention"),
        (lambda: decoder("llama").model, "is a backbone without a head"),
        (
            lambda: library().LlamaForSequenceClassification(decoder("llama").config),
            "not have exactly one language head beside its backbone, but ['score']",
        ),
        (
            lambda: tiny("GraniteForCausalLM", embedding_multiplier=3.0),
            "changes the hidden states outside of its layers",
        ),
        (lambda: tiny("NanoChatForCausalLM"), "does not run each layer once"),
        (
            lambda: library().BloomForCausalLM(library().BloomConfig(vocab_size=29, hidden_size=8, n_layer=1)),
            "has unknown modules in its backbone: ['word_embeddings', 'word_embeddings_layernorm']",
        ),
    ],
    ids=["encoder-decoder", "cross attention", "backbone", "classifier", "scaled", "two norms", "other parts"],
)
def test_unsupported_models_are_rejected_with_a_list_of_supported_ones(
    make: Callable[[], Any], why: str
) -> None:
    message = error_of(make(), layout="Et|tL")
    assert why in message
    assert "LlamaForCausalLM, Qwen2ForCausalLM" in message
    assert "pass them to Pipeline" in message


def test_hooks_and_weights_of_split_modules_are_rejected() -> None:
    whole = decoder("llama")
    whole.register_forward_hook(lambda *_: None)
    whole.model.scale = nn.Parameter(torch.ones(()))
    message = error_of(whole, layout="Et*3|ttL")
    assert "the model is split and has hooks" in message
    assert "'model' is split and has parameters or buffers of its own" in message


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"labels": 1, "use_cache": True}, ["`labels`: pass them to the pipeline as target=", "`use_cache`"]),
        ({"input_ids": 1}, ["`input_ids`: pass the ids as the first positional argument"]),
    ],
)
def test_unsupported_arguments_of_a_stage_are_rejected(named: dict[str, Any], expected: list[str]) -> None:
    first, _ = split(decoder("llama"), layout="Et*3|ttL").values()
    with pytest.raises(PipelineError) as caught:
        first(batch(2)[0], **named)
    assert all(part in str(caught.value) for part in expected)


def test_a_stage_takes_one_tensor() -> None:
    first, _ = split(decoder("llama"), layout="Et*3|ttL").values()
    with pytest.raises(
        PipelineError, match="a stage takes one tensor, ids or hidden states, but 0 were passed"
    ):
        first(input_ids=batch(2)[0])
