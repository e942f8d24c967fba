"""Promise: the stages of a decoder of transformers compute what the decoder does, under its names."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
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
    library,
    trained,
)
from tests.support.models import next_word
from tests.support.reference import differences

LAYOUTS = ("Ett|tt|tL", "E|t*5|L", "Et|t|t|t|tL", "Et*5L", "Et*4|tL")
GIVEN = ("", "mask", "positions")


def run(stages: dict[int, Any], value: Tensor, **named: Any) -> Tensor:
    for stage in stages.values():
        value = stage(value, **named)
    return value


# --- what a split gives ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
@small(lambda kind: kind == "llama")
def test_stages_in_sequence_give_the_logits_of_the_model(kind: str, layout: str) -> None:
    whole = decoder(kind)
    given = GIVEN[(MODELS.index(kind) + LAYOUTS.index(layout)) % len(GIVEN)]
    ids, _, named = batch(3, given)
    for mode in (True, False):
        whole.train(mode)
        stages = split(whole, layout=layout)
        assert {stage.training for stage in stages.values()} == {mode}
        assert torch.equal(run(stages, ids, **named), whole(ids, **named).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", MODELS)
@small(lambda kind, tied: tied == (kind == "gpt2"))
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
@small(lambda kind: kind in {"llama", "gpt2"})
def test_names_and_layouts_give_the_same_stages(kind: str) -> None:
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


def test_a_stage_is_an_instance_of_the_model_class_and_has_own_layers() -> None:
    whole = decoder("llama")
    first, second = split(whole, layout="Et|t*4L").values()
    assert isinstance(second, library().LlamaForCausalLM)
    layers: Any = second.get_submodule("model.layers")
    assert second.own_layers == list(whole.model.layers[1:]) == list(layers[1:])
    assert first.own_layers == [whole.model.layers[0]]
    assert second.get_submodule("lm_head") is whole.lm_head
    assert not list(first.get_submodule("lm_head").parameters())


def test_the_model_is_unchanged() -> None:
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


def test_only_the_first_stage_of_gpt2_has_embedding_dropout() -> None:
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
def test_other_decoders_of_the_same_structure_are_split(
    model: str, config: str, changes: dict[str, Any]
) -> None:
    options = decoder("llama").config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    made = getattr(library(), config)(
        **{name: options[name] for name in names}, num_key_value_heads=2, pad_token_id=None, **changes
    )
    whole = getattr(library(), model)(made).eval()
    ids, _, named = batch(3, "mask")
    assert torch.equal(
        run(split(whole, layout=even_layout(LAYERS, 3)), ids, **named), whole(ids, **named).logits
    )


# --- training --------------------------------------------------------------------------------------


def differing(
    whole: Any, stages: dict[int, Any], family: str, *, exact: bool, given: str = "mask", low: bool = False
) -> list[str]:
    """Gradients of a pipeline on one rank that are not those of the model."""
    per_rank = len(stages) if family.startswith("interleaved") else None
    schedule = penstock.build(family, ranks=1, microbatches=2, stages_per_rank=per_rank)
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
@small(lambda kind, tied: tied and kind in {"llama", "gpt2"})
def test_gradients_are_bitwise_those_of_the_model(kind: str, *, tied: bool) -> None:
    whole = decoder(kind, tied=tied)
    stages = split(whole, layout="Ett|tt|tL")
    assert not differing(whole, stages, "interleaved-1f1b", exact=not tied)


@pytest.mark.parametrize("kind", MODELS)
@small(lambda kind: kind in {"llama", "gpt2"})
def test_split_backwards_are_bitwise_equal(kind: str) -> None:
    whole = decoder(kind)
    assert not differing(whole, split(whole, layout="Et*3|ttL"), "zbv", exact=True)


@pytest.mark.parametrize("family", ["interleaved-1f1b", "interleaved-zero-bubble"])
def test_a_stage_without_layers_passes_its_input_on(family: str) -> None:
    whole = decoder("llama")
    assert not differing(whole, split(whole, layout="Et*3||tt|L"), family, exact=True)


@pytest.mark.parametrize("family", ["interleaved-1f1b", "zbv"])
@pytest.mark.parametrize("kind", MODELS)
@small(lambda kind, family: (kind, family) == ("llama", "zbv"))
def test_gradients_under_autocast_are_those_of_the_model(kind: str, family: str) -> None:
    whole = decoder(kind)
    assert not differing(whole, split(whole, layout="Et*3|ttL"), family, exact=True, low=True)


@pytest.mark.parametrize("family", ["interleaved-1f1b", "zbv"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@small(lambda when, family: (when == "before") == (family == "zbv"))
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


def test_weight_gradients_of_gpt2_are_deferred() -> None:
    _, second = split(decoder("gpt2"), layout="Et*3|ttL").values()
    kinds = [type(layer).__name__ for layer in Deferral(second).layers]
    assert kinds.count("Conv1D") == 2 * 4
    assert kinds.count("Linear") == 1
