"""Promise: saved bytes are those that autograd saves in real models on a CPU, within 5 %."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.cost.estimate.layers import layer_operations
from penstock.cost.estimate.model_config import config_of_keys
from penstock.cost.estimate.parallel_config import ParallelConfig
from penstock.runtime import demo
from tests.support.grids import small
from tests.support.model_configs import gpt_config


def saved_bytes(model: nn.Module, run: Any) -> int:
    """Bytes of different storages that a forward saves, without weights."""
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    found: dict[int, tuple[int, Tensor]] = {}  # the tensors are kept, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(size for size, _ in found.values())


def of_one_block(model: Any, layers: list[Any], run: Any) -> float:
    """The difference that the last of several blocks makes."""
    many = saved_bytes(model, run)
    layers_removed = len(layers) // 2
    for _ in range(layers_removed):
        del layers[-1]
    return (many - saved_bytes(model, run)) / layers_removed


def test_a_block_of_the_demo_saves_what_is_estimated() -> None:
    model, inputs = demo.gpt(), demo.Batches(1)()[0]
    blocks: Any = model[1]
    measured = of_one_block(model, blocks, lambda: model(inputs))
    config = gpt_config(*(demo.WIDTH, demo.LAYERS, demo.HEADS), resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    parallel = ParallelConfig(sequence=demo.LENGTH, microbatch_size=demo.ROWS, precision="fp32")
    assert layer_operations(config, parallel)["block"].activation == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@small(lambda kind: kind == "none")
def test_a_block_of_transformers_saves_what_is_estimated(kind: str) -> None:
    from tests.support.hub_models import decoder  # noqa: PLC0415 -- imports transformers

    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
    }
    sizes |= {"num_key_value_heads": 4, "vocab_size": 64, "max_position_embeddings": 256}
    model = decoder(kind, **sizes, use_cache=False)
    tokens = torch.randint(64, (2, 128))
    measured = of_one_block(model, model.model.layers, lambda: model(tokens))
    parallel = ParallelConfig(sequence=128, microbatch_size=2, precision="fp32", kernels="eager")
    config = config_of_keys({"model_type": kind, **sizes})
    assert layer_operations(config, parallel)["block"].activation == pytest.approx(measured, rel=0.05)
