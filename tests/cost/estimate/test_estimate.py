"""Promises of the estimate: devices are data, seconds follow the roofline, bytes follow sharding."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cost.costs import Costs
from penstock.cost.estimate import ParallelConfig, device, devices, estimate
from penstock.cost.estimate.estimate import link_of, operation_seconds
from penstock.cost.estimate.layers import parameters
from penstock.cost.estimate.operations import Operation, Passes
from penstock.errors import EstimateError, FormatError
from tests.support.model_configs import config

LLAMA, H100 = config("llama-3-8b"), device("h100")


def test_the_promised_devices_are_there_with_a_source() -> None:
    assert set(devices()) == {"a100", "h100", "h800", "h200", "b200", "mi300x", "cpu"}
    assert all(each.source and each.host_link and each.peak("bf16") for each in devices().values())


def test_an_unknown_device_says_which_are_known() -> None:
    with pytest.raises(EstimateError, match=r"'h10'; did you mean h100. known are a100, h100"):
        device("h10")
    with pytest.raises(EstimateError, match="a100 has no fp8: use precision bf16, fp32"):
        estimate(LLAMA, ParallelConfig(sequence=128, precision="fp8"), device("A100"))


def test_a_device_can_be_a_file(tmp_path: Path) -> None:
    text = (Path(estimate.__code__.co_filename).parent / "devices.toml").read_text()
    entry = text.split("[h100]\n")[1].split("\n\n")[0]
    path = tmp_path / "mine.toml"
    path.write_text(entry)
    assert device(str(path)) == replace(H100, name="mine")
    path.write_text(entry.replace("host_link", "hostlink").replace("80e9", "-1"))
    with pytest.raises(FormatError) as failure:
        device(str(path))
    assert [each.split(" (")[0] for each in failure.value.problems] == [
        "mine: missing host_link",
        "mine: hostlink: unknown key of a device",
        "mine: memory_bytes: must be a number above 0",
    ]


def test_an_operation_takes_the_longer_of_flops_and_bytes_and_its_kernels() -> None:
    share = H100.attainable
    operation = Operation("x", "matmul", Passes(1e12, 0, 1e12), Passes(1, 0, 1e12), kernels=3)
    taken = operation_seconds(operation, H100, "bf16")
    assert taken.forward == pytest.approx(1e12 / (989.4e12 * share.matmul) + 3 * share.kernel_seconds)
    assert taken.input_gradient == 0
    assert taken.weight_gradient == pytest.approx(1e12 / (3.35e12 * share.memory) + 3 * share.kernel_seconds)


def test_large_operations_are_more_efficient() -> None:
    small, large = (
        estimate(LLAMA, ParallelConfig(sequence=each), H100).by_kind["output"].seconds.compute.total / each
        for each in (128, 8192)
    )
    assert large < small


@pytest.mark.parametrize(
    ("group", "changes", "inside"),
    [
        ("tensor", {"tensor_parallel": 8}, True),
        ("tensor", {"tensor_parallel": 16}, False),
        ("context", {"tensor_parallel": 4, "context_parallel": 4}, False),
        ("data", {"data_parallel": 8}, True),
        ("pipeline", {}, True),
        ("pipeline", {"data_parallel": 8}, False),
    ],
)
def test_groups_that_leave_the_node_use_the_network(
    group: str, changes: dict[str, Any], *, inside: bool
) -> None:
    link = link_of(group, H100, ParallelConfig(sequence=128, **changes), stages=2)
    expected = H100.node_link if inside else H100.network_link
    assert link.bandwidth == expected * H100.attainable.links


@pytest.mark.parametrize(
    ("zero", "per_weight"), [(0, 18.0), (1, 2 + 4 + 12 / 4), (2, 2 + 4 / 4 + 12 / 4), (3, 18 / 4)]
)
def test_sharding_divides_the_bytes_of_weights(zero: int, per_weight: float) -> None:
    found = estimate(LLAMA, ParallelConfig(sequence=128, data_parallel=4, zero=zero), H100)
    names = ("parameters", "gradients", "optimizer_state")
    held = sum(getattr(layer.costs, name) for layer in found.layers for name in names)
    assert held == pytest.approx(per_weight * parameters(LLAMA))


def test_experts_are_replicated_by_fewer_ranks() -> None:
    parallel = ParallelConfig(sequence=4096, data_parallel=16, expert_parallel=8)
    block = estimate(config("mixtral-8x7b"), parallel, H100).by_kind["expert block"]
    experts, rest = (block.operations.weights(expert=each) for each in (True, False))
    assert block.costs.optimizer_state == pytest.approx(12 * (experts / 2 + rest / 16))
    assert block.costs.forward_all_to_all == block.costs.backward_input_all_to_all
    assert block.seconds.all_to_all.forward > 0


def test_full_recomputation_adds_a_forward_to_the_input_gradient() -> None:
    none, full = (
        estimate(LLAMA, ParallelConfig(sequence=8192, recompute_granularity=each), H100)
        .by_kind["block"]
        .seconds
        for each in ("none", "full")
    )
    assert full.recomputed == none.compute.forward
    together = Passes.sum((none.compute, Passes(0, none.compute.forward, 0)))
    assert tuple(full.compute) == pytest.approx(tuple(together))  # from Python 3.12 on, sum() rounds once


def test_context_parallel_ranks_hide_keys_and_values_behind_attention() -> None:
    slow = replace(H100, network_link=1e6, node_devices=1)
    hidden, exposed = (
        estimate(LLAMA, ParallelConfig(sequence=65536, context_parallel=4), each).by_kind["block"].seconds
        for each in (H100, slow)
    )
    assert exposed.compute.forward > 2 * hidden.compute.forward


def test_every_layer_has_one_number_for_each_cost() -> None:
    found = estimate(config("deepseek-v3"), ParallelConfig(sequence=4096), device("h800"))
    assert len(found.layers) == 1 + 61 + 1 + 1
    for layer in found.layers:
        assert not any(isinstance(getattr(layer.costs, each.name), tuple) for each in fields(Costs))
