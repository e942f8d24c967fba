"""Promise: stages of a decoder of transformers are the decoder, under the names of the decoder."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import PartitionError, PipelineError
from penstock.planning.layout import even_layout
from penstock.runtime import Pipeline, split
from penstock.runtime.backward.deferral import Deferral
from tests.support.deferring import autocasting
from tests.support.grids import small
from tests.support.hub_models import (
    LAYERS,
    MODELS,
    batch,
    decoder,
    gradients_of,
    layer_names,
    next_word,
    trained,
)
from tests.support.reference import differences

transformers: Any = pytest.importorskip("transformers")
LAYOUTS = ("Ett|tt|tL", "E|t*5|L", "Et|t|t|t|tL", "Et*5L", "Et*4|tL")
GIVEN = ("", "mask", "positions")


def run(stages: dict[int, Any], value: Tensor, **named: Any) -> Tensor:
    for stage in stages.values():
        value = stage(value, **named)
    return value


def refusal(model: nn.Module, **how: Any) -> str:
    with pytest.raises(PartitionError) as caught:
        split(model, **how)
    return str(caught.value)


# --- what a split gives ----------------------------------------------------------------------------


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
@small(lambda kind, layout, given: kind == "llama" or (layout, given) == ("Ett|tt|tL", "mask"))
def test_stages_one_after_the_other_give_the_logits_of_the_model(kind: str, layout: str, given: str) -> None:
    whole = decoder(kind)
    ids, _, named = batch(3, given)
    for mode in (True, False):
        whole.train(mode)
        stages = split(whole, layout=layout)
        assert {stage.training for stage in stages.values()} == {mode}
        assert torch.equal(run(stages, ids, **named), whole(ids, **named).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_names_and_tensors_of_all_stages_are_those_of_the_model(kind: str, *, tied: bool) -> None:
    whole = decoder(kind, tied=tied)
    found: dict[str, Tensor] = {}
    for stage in split(whole, layout="Et*3|tt|L").values():
        state = stage.state_dict(keep_vars=True)
        assert not found.keys() & state.keys()
        found |= state
    wanted = whole.state_dict(keep_vars=True)
    assert {name: id(tensor) for name, tensor in found.items()} == {
        name: id(tensor) for name, tensor in wanted.items()
    }


@pytest.mark.parametrize("kind", MODELS)
def test_names_and_layouts_say_the_same(kind: str) -> None:
    whole, layers = decoder(kind), layer_names(kind)
    norm = "transformer.ln_f" if kind == "gpt2" else "model.norm"
    for layout, at in (
        ("Ett|t*3L", [f"{layers}.2"]),
        ("E|t*5|L", [layers, norm]),
        ("E|tt|t*3L", [f"{layers}.0", f"{layers}.2"]),
        ("Et*5L", []),
    ):
        by_layout, by_name = split(whole, layout=layout), split(whole, at=at)
        assert [list(stage.state_dict()) for stage in by_layout.values()] == [
            list(stage.state_dict()) for stage in by_name.values()
        ]


def test_a_stage_is_of_the_class_of_its_model_and_knows_its_layers() -> None:
    whole = decoder("llama")
    first, second = split(whole, layout="Et|t*4L").values()
    assert isinstance(second, transformers.LlamaForCausalLM)
    layers: Any = second.get_submodule("model.layers")
    assert second.own_layers == list(whole.model.layers[1:]) == list(layers[1:])
    assert first.own_layers == [whole.model.layers[0]]
    assert second.get_submodule("lm_head") is whole.lm_head
    assert not list(first.get_submodule("lm_head").parameters())


def test_the_model_itself_is_left_as_it_was() -> None:
    whole = decoder("gpt2")
    before = list(whole.named_modules())
    split(whole, layout="Ett|t*3L")
    assert list(whole.named_modules()) == before
    assert not hasattr(whole, "tied")


def test_stages_can_be_copied_and_pickled() -> None:
    whole = decoder("qwen2")
    ids, _, named = batch(3, "positions")
    stages = split(whole, layout="Ett|t*3L")
    logits = whole(ids, **named).logits
    assert torch.equal(run(copy.deepcopy(stages), ids, **named), logits)
    assert torch.equal(run(pickle.loads(pickle.dumps(stages)), ids, **named), logits)  # noqa: S301


def test_gpt2_drops_out_after_its_embedding_alone() -> None:
    whole = decoder("gpt2", embd_pdrop=0.5).train()
    ids, _, _ = batch(3)
    stages = split(whole, layout="E|t*5|L")
    hidden = stages[0](ids)
    assert (hidden == 0).float().mean() > 0.3
    assert torch.equal(stages[1](hidden), stages[1](hidden))


def test_gpt2_adds_token_types_once() -> None:
    whole = decoder("gpt2")
    ids, _, _ = batch(3)
    types = torch.ones_like(ids)
    found = run(split(whole, layout="Ett|t*3L"), ids, token_type_ids=types)
    assert torch.equal(found, whole(ids, token_type_ids=types).logits)


@pytest.mark.parametrize(
    ("model", "config", "changes"),
    [
        ("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 4, "sliding_window": 3}),
        ("Olmo2ForCausalLM", "Olmo2Config", {}),
        (
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            {"head_dim": 4, "num_experts": 8, "moe_intermediate_size": 8},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "For" in value else "",
)
def test_other_decoders_of_the_same_build_are_cut_too(model: str, config: str, changes: dict[str, Any]) -> None:
    options = decoder("llama").config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    made = getattr(transformers, config)(
        **{name: options[name] for name in names}, num_key_value_heads=2, pad_token_id=None, **changes
    )
    whole = getattr(transformers, model)(made).eval()
    ids, _, named = batch(3, "mask")
    assert torch.equal(
        run(split(whole, layout=even_layout(LAYERS, 3)), ids, **named), whole(ids, **named).logits
    )


# --- training --------------------------------------------------------------------------------------


def differing(
    whole: Any, stages: dict[int, Any], family: str, *, exact: bool, given: str = "mask", low: bool = False
) -> list[str]:
    """Gradients of a pipeline on one rank that are not those of the model."""
    more = {"stages_per_rank": len(stages)} if family == "interleaved-1f1b" else {}
    schedule = penstock.build(family, ranks=1, microbatches=2, **more)
    with autocasting() if low else nullcontext():
        _, wanted = trained(whole, 4, 2, given)
        whole.zero_grad()  # its parameters may be those of the stages
        ids, target, named = batch(4, given)
        Pipeline(stages, schedule, loss=next_word).step(ids, target=target, **named)
    found: dict[str, Tensor] = {}
    for stage in stages.values():
        found |= gradients_of(stage)
    assert found
    return list(differences(family, {name: found.get(name) for name in wanted}, dict(wanted), exact=exact))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_the_model_to_the_last_bit(kind: str, *, tied: bool) -> None:
    whole = decoder(kind, tied=tied)
    stages = split(whole, layout="Ett|tt|tL")
    assert not differing(whole, stages, "interleaved-1f1b", exact=not tied)


@pytest.mark.parametrize("kind", MODELS)
def test_split_backwards_give_the_same_bits(kind: str) -> None:
    whole = decoder(kind)
    assert not differing(whole, split(whole, layout="Et*3|ttL"), "zbv", exact=True)


@pytest.mark.parametrize("family", ["interleaved-1f1b", "zbv"])
@pytest.mark.parametrize("kind", MODELS)
@small(lambda kind, family: kind == "llama" or family == "zbv")
def test_gradients_under_autocast_are_those_of_the_model(kind: str, family: str) -> None:
    whole = decoder(kind)
    assert not differing(whole, split(whole, layout="Et*3|ttL"), family, exact=True, low=True)


@pytest.mark.parametrize("family", ["interleaved-1f1b", "zbv"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_layers_may_be_checkpointed(kind: str, when: str, family: str) -> None:
    whole = decoder(kind).train()
    if when == "before":
        whole.gradient_checkpointing_enable()
    stages: dict[int, Any] = split(whole, layout="Et*3|ttL")
    if when == "after":
        for stage in stages.values():
            stage.gradient_checkpointing_enable()
    calls: list[nn.Module] = []
    norm = "input_layernorm" if kind == "llama" else "ln_1"
    getattr(stages[1].own_layers[0], norm).register_forward_hook(lambda module, *_: calls.append(module))
    assert not differing(decoder(kind), stages, family, exact=True)
    assert len(calls) == 4  # two microbatches, and each once more in its backward


def test_weight_gradients_of_gpt2_are_put_aside() -> None:
    _, second = split(decoder("gpt2"), layout="Et*3|ttL").values()
    kinds = [type(layer).__name__ for layer in Deferral(second).layers]
    assert kinds.count("Conv1D") == 2 * 4
    assert kinds.count("Linear") == 1


# --- what is refused -------------------------------------------------------------------------------


def test_layouts_that_do_not_fit_the_layers_are_refused() -> None:
    whole = decoder("llama")
    assert "has 4 layers (t), the model has 5: layer 4 would be left out" in refusal(whole, layout="Ett|ttL")
    assert "has 6 layers (t), the model has 5: there is no layer 5" in refusal(whole, layout="Et*6|L")


def test_names_that_are_no_beginning_of_a_stage_are_refused_all_at_once() -> None:
    whole = decoder("llama")
    message = refusal(whole, at=["model.layers.9", "model.embed_tokens", "lm_head", "model.layers.2.mlp"])
    assert "no module 'model.layers.9' in the model: did you mean 'model.layers." in message
    assert "'model.embed_tokens' is the very first module" in message
    assert "'lm_head'" in message
    assert "'model.layers.2.mlp'" in message
    message = refusal(whole, at=["model.layers.3", "model.layers.1", "model.layers.1"])
    assert "in the order of the model: 'model.layers.1', 'model.layers.3'" in message
    assert "'model.layers.1' is named twice" in message


def tiny(name: str, **changes: Any) -> Any:
    """A model of another kind, on the meta device."""
    sizes = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, name.replace("ForCausalLM", "Config"))(**sizes, **heads, **changes)
    with torch.device("meta"):
        return getattr(transformers, name)(config)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=29, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
            ),
            "has an encoder",
        ),
        (lambda: decoder("gpt2", add_cross_attention=True), "has an encoder, or attends to one"),
        (lambda: decoder("llama").model, "is a backbone without a head"),
        (
            lambda: transformers.LlamaForSequenceClassification(decoder("llama").config),
            "not one language head beside its backbone, but ['score']",
        ),
        (
            lambda: tiny("GraniteForCausalLM", embedding_multiplier=3.0),
            "computes with the hidden states outside of its layers",
        ),
        (lambda: tiny("NanoChatForCausalLM"), "does more than to run each layer once"),
        (
            lambda: transformers.BloomForCausalLM(
                transformers.BloomConfig(vocab_size=29, hidden_size=8, n_layer=1)
            ),
            "whose stage nobody knows: ['word_embeddings', 'word_embeddings_layernorm']",
        ),
    ],
    ids=["encoder-decoder", "cross attention", "backbone", "classifier", "scaled", "two norms", "other parts"],
)
def test_models_of_another_build_are_refused_with_what_is_supported(make: Callable[[], Any], why: str) -> None:
    message = refusal(make(), layout="Et|tL")
    assert why in message
    assert "LlamaForCausalLM, Qwen2ForCausalLM" in message
    assert "pass them to Pipeline" in message


def test_hooks_and_weights_of_what_is_cut_are_not_lost_silently() -> None:
    whole = decoder("llama")
    whole.register_forward_hook(lambda *_: None)
    whole.model.scale = nn.Parameter(torch.ones(()))
    message = refusal(whole, layout="Et*3|ttL")
    assert "the model is cut and has hooks" in message
    assert "'model' is cut and has parameters or buffers of its own" in message


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"labels": 1, "use_cache": True}, ["`labels`: give them to the pipeline as target=", "`use_cache`"]),
        ({"input_ids": 1}, ["`input_ids`: give the ids as the first argument"]),
    ],
)
def test_arguments_that_make_no_sense_for_a_stage_are_refused(named: dict[str, Any], told: list[str]) -> None:
    first, _ = split(decoder("llama"), layout="Et*3|ttL").values()
    with pytest.raises(PipelineError) as caught:
        first(batch(2)[0], **named)
    assert all(part in str(caught.value) for part in told)


def test_a_stage_takes_one_tensor() -> None:
    first, _ = split(decoder("llama"), layout="Et*3|ttL").values()
    with pytest.raises(PipelineError, match="a stage takes one tensor, ids or hidden states, and is given 0"):
        first(input_ids=batch(2)[0])
