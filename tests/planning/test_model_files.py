"""Model files: layers, links, devices and batch, or the costs of a profile; all errors at once."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock import Costs, FormatError
from penstock.planning import model_of_keys, read_model

LLAMA = Path(__file__).parents[2] / "examples" / "models" / "llama-8b.toml"


def test_a_file_has_layers_links_devices_and_a_batch() -> None:
    model = read_model(LLAMA)
    assert (len(model.layers), model.ranks, model.memory, model.samples) == (34, 8, 4e10, 64)
    assert [model.layers[i].kind for i in (0, 1, 33)] == ["embedding", "layer", "head"]
    assert model.layers[5].name == "block 4"
    links = Costs(latency=1e-5, bandwidth=2.5e10, host_bandwidth=2e10)
    assert model.common == replace(links, launch_overhead=0.0003, optimizer_step=0.02)
    block = model.layers[1].costs
    assert block.gradient_message == block.activation_message == 33554432


class Decoder(NamedTuple):
    """The sizes that the comments of an example state."""

    file: str
    tokens: int
    h: int
    f: int
    layers: int
    flops: float
    bandwidth: float
    split: int
    """Tensor-parallel devices: sizes of a device are divided by them."""
    billions: float


EXAMPLES = [
    Decoder("llama-8b.toml", 4096, 4096, 14336, 32, 1.5e14, 1.5e12, 1, 8.03),
    Decoder("llama-70b.toml", 8192, 8192, 28672, 80, 4e14, 3e12, 8, 70.55),
]


@pytest.mark.parametrize("sizes", EXAMPLES, ids=lambda each: each.file)
def test_the_examples_follow_from_the_formulas_they_state(sizes: Decoder) -> None:
    file, tokens, h, f, layers, flops, bandwidth, t, billions = sizes
    k, words, speed = 1024, 128256, flops * t
    weights = h * (2 * h + 2 * k) + 3 * h * f
    products, attention = 2 * tokens * weights, 2 * tokens * tokens * h
    model = read_model(LLAMA.parent / file)
    embedding, block, head = (model.layers[i].costs for i in (0, 1, layers + 1))
    close = partial(pytest.approx, rel=2e-5)
    assert block.forward == close((products + attention) / speed)
    assert block.backward_input == close((products + 2 * attention) / speed)
    assert block.backward_weight == close(products / speed)
    assert (block.parameters, block.gradients) == (2 * weights / t, 2 * weights / t)
    assert block.optimizer_state == 12 * weights / t
    assert block.activation == 2 * tokens * (6 * h + 2 * k + 3 * f) / t
    assert block.activation - block.activation_freed_by_input == 2 * tokens * (3 * h + f) / t  # type: ignore[operator]
    assert block.activation_message == embedding.activation_message == 2 * tokens * h / t
    assert head.forward == head.backward_input == head.backward_weight
    assert head.forward == close(2 * tokens * h * words / speed)
    assert head.activation == (2 * 2 * tokens * h + 6 * tokens * words) / t
    assert head.activation - head.activation_freed_by_input == 2 * tokens * h / t  # type: ignore[operator]
    moved = 2 * 2 * tokens * h / t
    assert embedding.forward == embedding.backward_weight == close(moved / bandwidth)
    assert embedding.parameters == head.parameters == 2 * words * h / t
    assert len(model.layers) == layers + 2
    assert (layers * weights + 2 * words * h) / 1e9 == close(billions, rel=1e-3)


def test_a_backward_measured_as_a_whole_is_halved() -> None:
    costs = model_of_keys({"layers": [{"forward_seconds": 1, "backward_seconds": 3}]}).layers[0].costs
    assert (costs.backward_input, costs.backward_weight, costs.backward) == (1.5, 1.5, 3)
    assert costs.activation == 0


def test_all_errors_in_a_file_are_reported_at_once() -> None:
    document = {
        "layers": [
            {"name": "a", "forward_seconds": 1, "backward_input_seconds": 1, "speed": 3},
            {"forward_seconds": -1, "backward_seconds": 1, "count": 0},
            {"forward_seconds": [1, 2], "backward_seconds": 1, "kind": "embedding"},
            {"forward_seconds": 1, "backward_seconds": 1, "kind": "tail"},
            7,
        ],
        "links": {"latency_seconds": -1, "speed": 2},
        "devices": {"ranks": 2.5, "memory_bytes": "much"},
        "batch": 64,
        "overlap_factor": "no",
        "color": "red",
    }
    with pytest.raises(FormatError) as raised:
        model_of_keys(document, "model.toml")
    text = str(raised.value)
    for error in (
        "layers[0].speed: unknown key of a layer; the keys are name, kind, count, forward_seconds",
        "layers[0]: missing backward_weight_seconds (or backward_seconds for both)",
        "layers[1].forward_seconds: it must be from 0 to 1e+18 (given -1)",
        "layers[1].count: must be an integer above 0 (given 0)",
        "layers[2].forward_seconds: must be one number",
        "kind must be one of layer, embedding, mtp, head (given tail)",
        "layers[4]: must be a table",
        "links.speed: unknown key; the keys are latency_seconds, bandwidth_bytes_per_second",
        "latency_seconds: it must be from 0 to 1e+18 (given -1)",
        "devices.ranks: must be an integer above 0 (given 2.5)",
        "devices.memory_bytes: must be a number above 0 (given much)",
        "batch: must be a table with samples",
        "overlap_factor: it must be a number (given 'no')",
        "color: unknown key; the keys are layers, name, links, devices, batch, launch_overhead_seconds",
    ):
        assert f"model.toml: {error}" in text or error in text, error
    assert all(line.startswith("model.toml: ") for line in text.splitlines())


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([], "layers: must be 1 to 1000 (given 0)"),
        ({}, "layers: must be a list of tables"),
        ([{"forward_seconds": 1, "backward_seconds": 2, "count": 10**9}], "at most 1000 layers"),
        ([{"forward_seconds": 1, "backward_seconds": 2, "count": 2, "kind": "head"}], "only the last layer"),
    ],
)
def test_invalid_chains_of_layers_are_errors(layers: object, says: str) -> None:
    with pytest.raises(FormatError) as raised:
        model_of_keys({"layers": layers})
    assert says in str(raised.value)


def test_a_profile_is_a_model_whose_layers_are_its_stages(tmp_path: Path) -> None:
    measured = Costs(
        forward=(1, 2, 3, 4),
        backward_input=(1, 1, 1, 1),
        backward_weight=(2, 2, 2, 2),
        backward=(2.5, 2.5, 2.5, 2.5),
        launch_overhead=0.1,
        latency=(0.1, 0.0, 0.3),
        bandwidth=(5.0, 4.0, 6.0),
        activation_message=(1, 2, 3),
        gradient_message=(4, 5, 6),
    )
    measured.write(tmp_path / "costs.json")
    model = read_model(tmp_path / "costs.json")
    assert model.are_stages
    assert model.layout([2, 2]) is None
    assert (model.common.latency, model.common.bandwidth, model.common.launch_overhead) == (0.3, 4, 0.1)
    merged = model.costs([2, 2], 1)
    assert (merged.forward, merged.backward, merged.activation_message) == ((3, 7), (5, 5), (2,))
    assert model.costs([1, 1, 1, 1], 1).gradient_message == (4, 5, 6)


def test_costs_that_are_neither_layers_nor_stages_are_errors(tmp_path: Path) -> None:
    for document, says in (
        ({"forward_seconds": 1}, "it has no [[layers]], and costs of stages need lists"),
        ({"forward_seconds": [1, 2], "activation_bytes": [1]}, "forward_seconds 2, activation_bytes 1"),
        ({"forward": 1}, "forward: not a key of costs"),
        ({"forward_seconds": [1, 2], "overlap_seconds": 1}, "give overlap_factor instead"),
        ([1], "it has no [[layers]], and is not valid as costs of stages"),
    ):
        (tmp_path / "x.json").write_text(json.dumps(document))
        with pytest.raises(FormatError) as raised:
            read_model(tmp_path / "x.json")
        assert says in str(raised.value)
