"""Promises of memory policies in plans: offered where they help, with their price; bounds stay bounds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Costs, PlanError, simulate
from penstock.planning import Layer, Model, model_of_keys, plan, read_model
from penstock.planning.evaluation import memory_policy_of
from penstock.search.passes import without_memory_actions
from tests.support.grids import small
from tests.support.planning_models import layer, quick_plan, stub_search

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
ROW = re.compile(r"^\| (\d+) GB \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)


def deep(**common: Any) -> Model:
    """Eight equal layers with large activations and small messages."""
    layers = [layer(1.0, f"block {i}", activation_message=1, gradient_message=1) for i in range(8)]
    return Model(tuple(layers), Costs(**common), ranks=4, samples=8)


def test_what_fits_only_with_recomputation_is_planned_with_its_price() -> None:
    with pytest.raises(PlanError, match="or a memory policy: recompute or offload"):
        quick_plan(deep(), memory_limit=45, stages_per_rank=1)
    made = quick_plan(deep(), memory_limit=45, stages_per_rank=1, recompute=True)
    assert "none" not in made.by_memory_policy
    assert re.match(r"recompute (all )?stages?", made.best.memory_policy)
    assert made.best.memory <= 45
    plain = simulate(without_memory_actions(made.best.schedule), made.best.configuration.costs)
    assert made.policy_price == pytest.approx(made.best.seconds / plain.makespan - 1)
    assert made.policy_price > 0


def test_only_the_stages_that_need_it_are_recomputed() -> None:
    made = quick_plan(deep(), memory_limit=75, stages_per_rank=1, recompute=True)
    found = {option.memory_policy for option in made.options}
    assert any(policy.startswith("recompute stage") for policy in found), found


@pytest.mark.parametrize("limit", [None, 60, 90])
@small(lambda limit: limit == 60)
def test_the_frontier_has_every_memory_policy_and_bounds_hold(limit: float | None) -> None:
    model = deep(host_bandwidth=40)
    made = quick_plan(model, memory_limit=limit, recompute=True, offload=True)
    assert {"recompute", "offload"} <= set(made.by_memory_policy)
    for option in made.options:
        assert limit is None or option.memory <= limit
        assert option.bound.seconds <= option.seconds + 1e-9
        assert made.bound <= option.seconds + 1e-9
    plain = quick_plan(model, memory_limit=limit, offload=False) if limit != 60 else None
    assert plain is None or made.best.seconds <= plain.best.seconds
    assert min(option.memory for option in made.options if option.memory_policy) < min(
        (option.memory for option in made.by_memory_policy.get("none", ())), default=float("inf")
    )


@pytest.mark.full
def test_memory_policies_are_passed_to_the_search() -> None:
    seen: list[dict[str, Any]] = []

    def searcher(**arguments: Any) -> Any:
        seen.append({name: arguments.get(name) for name in ("recompute", "offload")})
        return stub_search(**arguments)

    quick_plan(deep(), memory_limit=60, recompute=True, seconds=0.5, searcher=searcher)
    assert seen
    assert all(each == {"recompute": True, "offload": False} for each in seen)


def test_offload_needs_the_speed_of_the_host_link() -> None:
    with pytest.raises(PlanError, match="offload needs the speed of the host link"):
        quick_plan(deep(), offload=True)


def test_a_recomputed_stage_keeps_the_input_of_its_first_layer() -> None:
    costs = deep().costs([2, 2, 4], samples=3)
    assert costs.checkpoint == (0.0, 3.0, 3.0)
    own = [Layer("large input", replace(each.costs, checkpoint=4)) for each in deep().layers]
    assert Model(tuple(own)).costs([4, 4], samples=1).checkpoint == (4.0, 4.0)
    tiny = [Layer("small", replace(each.costs, activation=0.5, checkpoint=0)) for each in deep().layers]
    assert Model(tuple(tiny)).costs([4, 4], samples=1).checkpoint == (0.0, 1.0)
    assert Model(tuple(tiny)).costs([7, 1], samples=1).checkpoint == (0.0, 0.5)


def test_the_host_link_is_in_model_files_and_profiles() -> None:
    block = dict.fromkeys(("forward_seconds", "backward_seconds", "activation_bytes"), 1)
    devices = {"ranks": 1, "host_bandwidth_bytes_per_second": 7, "host_latency_seconds": 0.5}
    model = model_of_keys({"layers": [block], "devices": devices})
    assert (model.common.host_bandwidth, model.common.host_latency) == (7, 0.5)
    profile = Costs(forward=(1, 2), host_bandwidth=(5, 6), host_latency=(0.1, 0.2))
    common = Model.of_stages(profile).common
    assert (common.host_bandwidth, common.host_latency) == (5, 0.2)


def test_memory_policies_in_words() -> None:
    schedule = penstock.build("1f1b", ranks=4, microbatches=4)
    lower = penstock.lowering
    assert memory_policy_of(schedule) == ""
    assert memory_policy_of(lower.Recompute()(schedule)) == "recompute all stages"
    assert memory_policy_of(lower.Recompute((0, 1, 3))(schedule)) == "recompute stages 0-1,3"
    assert memory_policy_of(lower.Recompute((2,))(schedule)) == "recompute stage 2"
    both = lower.Offload((0,))(lower.Recompute(policy=lower.Policy(every=2))(schedule))
    assert memory_policy_of(both) == "recompute 8 of 16 and offload stage 0"


# --- the tables of the page ------------------------------------------------------------------------


def tables() -> list[tuple[str, int, list[str]]]:
    text = PAGE.read_text(encoding="utf-8")
    found = []
    for part in text.split("`examples/models/")[1:]:
        name = part.partition(".toml`")[0]
        found += [(name, int(limit), cells) for limit, *cells in ROW.findall(part)]
    return found


def test_the_page_has_both_models() -> None:
    assert {name for name, *_ in tables()} == {"llama-8b", "llama-70b"}
    assert len(tables()) >= 8


@pytest.mark.parametrize(("name", "limit", "cells"), tables())
@pytest.mark.full
def test_the_tables_of_the_page_are_current(name: str, limit: int, cells: list[str]) -> None:
    model = read_model(PAGE.parents[1] / "examples" / "models" / f"{name}.toml")
    made = plan(model, memory_limit=limit * 1e9, stages_per_rank=1, seconds=0, recompute=True, offload=True)
    for policy, cell in zip(("none", "recompute", "offload", "both"), cells, strict=True):
        options = made.by_memory_policy.get(policy)
        assert cell.strip(" *") == (f"{options[0].seconds:.2f} s, {options[0].name}" if options else "-")
