"""Promise: a stage created on the meta device is allocated and initialized as its modules do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.runtime import materialize, split
from tests.support.hub_models import MODELS, batch, decoder


def on_meta(kind: str, *, tied: bool = False, **changes: Any) -> Any:
    with torch.device("meta"):
        return decoder(kind, tied=tied, **changes)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def error_of(stage: nn.Module) -> str:
    with pytest.raises(PartitionError) as caught:
        materialize(stage)
    return str(caught.value)


# --- decoders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_materialized_and_loaded_stages_are_the_model(kind: str, *, tied: bool) -> None:
    whole = decoder(kind, tied=tied)
    stages = split(on_meta(kind, tied=tied), layout="Ett|tt|tL")
    ids, _, named = batch(3, "positions")
    value = ids
    for stage in stages.values():
        assert materialize(stage) is stage
        assert not any(tensor.is_meta for tensor in tensors(stage).values())
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
        value = stage(value, **named)
    assert torch.equal(value, whole(ids, **named).logits)


@pytest.mark.parametrize("kind", MODELS)
def test_decoders_are_initialized_by_their_class(kind: str) -> None:
    torch.manual_seed(11)
    sizes: dict[str, Any] = {"n_embd": 64} if kind == "gpt2" else {"hidden_size": 64, "intermediate_size": 96}
    stages = split(on_meta(kind, **sizes), layout="Ett|t*3L")
    plain = type(decoder(kind))(decoder(kind, **sizes).config)
    wanted = tensors(plain)
    found: dict[str, Tensor] = {}
    for stage in stages.values():
        found |= tensors(materialize(stage))
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        right = wanted[name]
        if name in dict(plain.named_buffers()) or right.std() == 0:
            assert torch.equal(tensor, right), name
        else:
            assert tensor.std().item() == pytest.approx(right.std().item(), rel=0.15), name


def test_other_stages_stay_on_the_meta_device() -> None:
    whole = on_meta("llama", vocab_size=10**9, intermediate_size=10**7)  # terabytes
    whole.model.layers[2] = on_meta("llama").model.layers[2]
    stages = split(whole, layout="Ett|t|ttL")
    materialize(stages[1])
    assert all(tensor.is_meta for stage in (0, 2) for tensor in tensors(stages[stage]).values())
    assert sum(tensor.numel() for tensor in tensors(stages[1]).values()) < 10_000


def test_tied_weights_start_with_the_same_values() -> None:
    torch.manual_seed(3)
    for kind in MODELS:
        stages = split(on_meta(kind, tied=True, pad_token_id=3), layout="Ett|t*3L")
        tie: Any = stages[0].tied[0]  # type: ignore[index]
        first = materialize(stages[0]).get_parameter(tie[0])
        torch.rand(7)  # ranks draw different numbers in between
        second = materialize(stages[1]).get_parameter(tie[1])
        assert first is not second
        assert torch.equal(first, second)


def test_other_weights_start_with_different_values() -> None:
    stages = split(on_meta("llama"), layout="Ett|t*3L")
    weights = [
        materialize(stages[stage]).get_parameter(f"model.layers.{layer}.mlp.up_proj.weight")
        for stage, layer in ((0, 0), (1, 2))
    ]
    assert not torch.equal(*weights)


# --- other modules ---------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Parameters that no module initializes, and a table that only the constructor knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(3), persistent=False)


class Reset(Scaled):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 2.0)
        self.table = torch.arange(3)


def test_plain_modules_use_reset_parameters() -> None:
    with torch.device("meta"):
        whole = nn.Sequential(
            nn.Embedding(3, 4),
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
            nn.MultiheadAttention(4, 2),
            Reset(),
        )
    stage = materialize(split(whole, ["1"])[1])
    found = tensors(stage)
    assert not any(tensor.is_meta or tensor.isnan().any() for tensor in found.values())
    assert found["1.1.running_var"].tolist() == [1.0] * 4
    assert found["1.1.num_batches_tracked"].item() == 0
    assert found["2.out_proj.bias"].tolist() == [0.0] * 4
    assert found["3.scale"].tolist() == [2.0, 2.0]
    assert found["3.table"].tolist() == [0, 1, 2]
    assert whole[0].weight.is_meta


def test_all_uninitialized_tensors_are_reported_at_once() -> None:
    with torch.device("meta"):
        whole = nn.Sequential(OrderedDict(a=Scaled(), b=nn.Linear(2, 2), c=Scaled()))
    message = error_of(whole)
    assert "'a.scale', 'c.scale', 'a.table', 'c.table'" in message
    assert "'b.weight'" not in message
    assert "reset_parameters()" in message


def test_a_partly_allocated_module_is_not_reset() -> None:
    whole = nn.Linear(2, 2)
    whole.bias = nn.Parameter(torch.empty(2, device="meta"))
    before = whole.weight.clone()
    assert "'bias'" in error_of(whole)
    assert torch.equal(whole.weight, before)


@pytest.mark.parametrize("make", [lambda: nn.Linear(2, 2), lambda: decoder("llama")], ids=["plain", "decoder"])
def test_allocated_tensors_keep_their_values(make: Callable[[], nn.Module]) -> None:
    whole = make()
    before = {name: tensor.clone() for name, tensor in tensors(whole).items()}
    after = tensors(materialize(whole))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_weights_tied_within_a_stage_stay_tied() -> None:
    with torch.device("meta"):
        whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    whole[2].weight = whole[0].weight
    materialize(whole)
    assert whole[2].weight is whole[0].weight
    assert whole[1].weight is not whole[0].weight


def test_frozen_weights_stay_frozen() -> None:
    with torch.device("meta"):
        whole = nn.Linear(2, 2).requires_grad_(False)  # noqa: FBT003 -- so torch has it
    assert not materialize(whole).get_parameter("weight").requires_grad


def test_the_meta_device_is_rejected() -> None:
    with pytest.raises(PartitionError, match="the meta device has none"):
        materialize(nn.Linear(2, 2), "meta")
