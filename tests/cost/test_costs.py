"""Promises of costs: one number or one for each, units in the keys of a file, problems by key."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from penstock import Costs, CostsError, FormatError
from penstock.cost.presets import preset, presets
from penstock.ir.graph import StageGraph

MANY = Costs(forward=(1, 2.5), latency=0.001, bandwidth=1e9, activation_message=4096, backward=3, overlap=2)


def test_unit_costs_are_the_default() -> None:
    assert Costs().per_stage("forward", 3) == [1, 1, 1]
    assert Costs().full_backward(2) == [2, 2]


def test_a_full_backward_can_be_cheaper_than_its_halves() -> None:
    assert Costs(backward=1.5).full_backward(2) == [1.5, 1.5]


def test_a_list_needs_one_entry_for_each_stage_or_edge() -> None:
    assert Costs(forward=[1, 2]).per_stage("forward", 2) == [1, 2]  # type: ignore[arg-type]
    with pytest.raises(CostsError, match="forward: 2 entries, but the schedule has 3 stages"):
        Costs(forward=(1, 2)).per_stage("forward", 3)
    with pytest.raises(CostsError, match="latency: 2 entries, but the schedule has 3 edges"):
        Costs(latency=(1, 2)).per_edge("latency", 3)


@pytest.mark.parametrize(
    ("costs", "problem"),
    [
        ({"forward": -1}, "forward: it must be from 0 to 1e"),
        ({"forward": 10**400}, "forward: it must be from 0 to 1e"),
        ({"forward": 1e308}, "forward: it must be from 0 to 1e"),
        ({"activation_freed_by_input": 2}, "activation_freed_by_input: it cannot be more than activation"),
        (
            {"activation": (5, 1), "activation_freed_by_input": 3},
            "activation_freed_by_input: it cannot be more",
        ),
        ({"forward": float("nan")}, "forward: it must be from 0 to 1e"),
        ({"forward": "1"}, "forward: it must be a number or a list of them"),
        ({"forward": True}, "forward: it must be a number"),
        ({"forward": ()}, "forward: the list is empty"),
        ({"forward": (1, None)}, "forward: it must be a number"),
        ({"optimizer_step": (1, 2)}, "optimizer_step: it must be one number"),
        ({"overlap_factor": 1.5}, "overlap_factor: it must be from 0 to 1"),
        ({"bandwidth": 0}, "bandwidth: it must be more than 0"),
    ],
)
def test_invalid_costs_are_rejected_by_name(costs: dict[str, Any], problem: str) -> None:
    with pytest.raises(CostsError, match=problem):
        Costs(**costs)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(CostsError, match=r"forward: .*; latency: "):
        Costs(forward=-1, latency=-1)


@pytest.mark.parametrize("ending", ["json", "toml"])
@pytest.mark.parametrize("costs", [Costs(), MANY, preset("zbv-h4096-p16-m48")])
def test_what_is_written_is_read_back(costs: Costs, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"costs.{ending}"
    costs.write(path)
    assert Costs.read(path) == costs


def test_keys_have_their_units(tmp_path: Path) -> None:
    MANY.write(tmp_path / "costs.json")
    assert json.loads((tmp_path / "costs.json").read_text()) == {
        "forward_seconds": [1, 2.5],
        "backward_seconds": 3,
        "overlap_seconds": 2,
        "latency_seconds": 0.001,
        "bandwidth_bytes_per_second": 1e9,
        "activation_message_bytes": 4096,
    }


def test_all_problems_of_a_file_are_reported_with_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text('forward = 1\nlatency_seconds = "fast"\nbackward_input_seconds = -1\n')
    with pytest.raises(FormatError) as caught:
        Costs.read(path)
    names = [problem.split(":")[0] for problem in caught.value.problems]
    assert names == ["forward", "backward_input_seconds", "latency_seconds"]
    assert caught.value.problems[0].endswith("not a key of costs; did you mean forward_seconds?")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("c.json", "{", "invalid JSON"),
        ("c.json", "[]", "costs are an object"),
        ("c.toml", "a = ", "invalid TOML"),
        ("c.txt", "", "use .json or .toml"),
        ("c.json", "[" * 100_000, "invalid JSON"),
        ("c.toml", "", r"c\.toml: it has no costs; give keys such as forward_seconds"),
        ("c.toml", "# forward_seconds = 1\n", "it has no costs"),
        ("c.json", "{}", "it has no costs"),
    ],
)
def test_files_without_costs_are_rejected(name: str, text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=problem):
        Costs.read(tmp_path / name)


def test_every_cost_is_documented_in_docs() -> None:
    page = Path(__file__).parents[2] / "docs" / "simulate.md"
    text = page.read_text(encoding="utf-8")
    for entry in dataclasses.fields(Costs)[:-1]:  # the last one is the file they are from
        key = "_".join(filter(None, (entry.name, entry.metadata["unit"])))
        assert f"`{key}`" in text, key


def test_scaling_the_unit_of_time_scales_all_seconds_and_nothing_else() -> None:
    scaled = MANY.scaled(1000)
    assert scaled.forward == (1000, 2500)
    assert scaled.bandwidth == 1e6
    assert scaled.activation_message == MANY.activation_message


def test_what_is_not_given_follows_from_other_costs() -> None:
    costs = Costs(forward=(3, 4), activation=10, checkpoint=(2, 5))
    assert costs.resolved("recompute", 2) == [3, 4]
    assert costs.resolved("offloadable", 2) == [10, 10]
    assert costs.resolved("offloadable_checkpoint", 2) == [2, 5]
    given = Costs(recompute=1, activation=10, offloadable=4, checkpoint=(2, 5))
    assert (given.resolved("recompute", 2), given.resolved("offloadable", 2)) == ([1, 1], [4, 4])
    assert given.resolved("offloadable_checkpoint", 2) == [2, 4]


@pytest.mark.parametrize("name", ["activation_freed_by_input", "checkpoint", "offloadable"])
def test_a_part_of_the_activation_is_not_larger_than_it(name: str) -> None:
    parts: dict[str, Any] = {name: (4, 6)}
    with pytest.raises(CostsError, match=f"{name}: it cannot be more than activation"):
        Costs(activation=(4, 5), **parts)


def test_the_host_link_has_an_entry_for_each_rank() -> None:
    costs = Costs(host_bandwidth=(1e9, 2e9), host_latency=1e-5)
    costs.check_lengths(StageGraph.chain(4), 2)
    assert costs.per_rank("host_latency", 2) == [1e-5, 1e-5]
    assert costs.scaled(1000).host_bandwidth == (1e6, 2e6)
    with pytest.raises(CostsError, match="host_bandwidth: 2 entries, but the schedule has 3 ranks"):
        costs.check_lengths(StageGraph.chain(4), 3)
    with pytest.raises(CostsError, match="host_bandwidth: it must be more than 0"):
        Costs(host_bandwidth=0)


def test_presets_are_found_by_name_and_others_are_named() -> None:
    assert len(presets()) == 12
    with pytest.raises(CostsError, match=r"no preset is called 'zb' \(known: zb-h2304-p8-m24"):
        preset("zb")
    with pytest.raises(CostsError, match="'zb-h4096-p8m24'; did you mean zb-h4096-p8-m24"):
        preset("zb-h4096-p8m24")


# --- units -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "time", "memory"),
    [
        (Costs(), "units", "activations"),
        (Costs(latency=0.1, activation_freed_by_input=0.5), "units", "activations"),
        (Costs(forward=0.02), "seconds", "activations"),
        (Costs(activation=2**20), "units", "bytes"),
        (Costs(parameters=2**20), "units", "bytes"),
        (Costs(forward=2, activation=3, time_unit="units", memory_unit="activations"), "units", "activations"),
        (Costs(time_unit="seconds", memory_unit="bytes"), "seconds", "bytes"),
        *((each, "seconds", "bytes") for each in presets().values()),
    ],
)
def test_costs_know_whether_they_are_real(costs: Costs, time: str, memory: str) -> None:
    assert (costs.units.time_name, costs.units.memory_name) == (time, memory)


def test_times_and_sizes_that_a_file_names_are_real() -> None:
    costs = Costs.from_keys({"forward_seconds": 1, "activation_bytes": 1})
    assert (costs.units.time_name, costs.units.memory_name) == ("seconds", "bytes")
    relative = Costs.from_keys({"forward_seconds": 2, "time_unit": "units"})
    assert relative.units.time_name == "units"
    assert Costs.from_keys(relative.to_keys()) == relative


def test_a_unit_is_one_of_two() -> None:
    with pytest.raises(CostsError, match=r"time_unit: it must be seconds or units \(given 'ms'\)"):
        Costs(time_unit="ms")


def test_scaled_and_shared_costs_keep_their_units() -> None:
    assert Costs().scaled(0.5).units == Costs().units
    half = Costs(latency=0.25).shared_by(2)
    assert (half.forward, half.activation, half.latency, half.units) == (0.5, 0.5, 0.25, Costs().units)


def test_the_keys_are_listed_where_none_is_near() -> None:
    with pytest.raises(FormatError, match="xyz: not a key of costs; keys: forward_seconds, backward_input"):
        Costs.from_keys({"xyz": 1})


def test_the_repr_has_only_what_is_given_and_makes_the_same_costs() -> None:
    costs = Costs(forward=(1, 2), latency=0.5, time_unit="units")
    assert repr(costs) == "Costs(forward=(1, 2), latency=0.5, time_unit='units')"
    assert eval(repr(costs)) == costs  # noqa: S307 -- our own text
    assert repr(Costs()) == "Costs()"


def test_larger_microbatches_have_more_work_and_activations_but_the_same_weights_and_links() -> None:
    costs = Costs(backward=(3, 4), activation=5, activation_message=6, parameters=7, latency=8, unshard=9)
    larger = costs.with_larger_microbatches(2)
    assert (larger.forward, larger.backward, larger.activation, larger.activation_message) == (
        2,
        (6, 8),
        10,
        12,
    )
    assert (larger.parameters, larger.latency, larger.unshard, larger.recompute) == (7, 8, 9, None)
    assert larger.units == costs.units


def test_an_error_has_the_problem_of_each_cost() -> None:
    with pytest.raises(CostsError) as caught:
        Costs(forward=-1, latency=())
    assert caught.value.problems == {
        "forward": "it must be from 0 to 1e+18 (given -1)",
        "latency": "the list is empty",
    }
