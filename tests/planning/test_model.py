"""Models: the costs of a stage are sums over its layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock
from penstock import Costs, PlanError
from penstock.planning import Layer, Model
from tests.support.planning_models import decoder, layer


def test_the_costs_of_a_stage_are_those_of_its_layers_times_the_samples() -> None:
    model = decoder(4, latency=0.5, launch_overhead=0.1)
    costs = model.costs([2, 3, 1], samples=3)
    assert costs.forward == (3, 9, 6)
    assert costs.full_backward(3) == [6, 18, 12]
    assert costs.activation == (30, 90, 75)
    assert costs.activation_freed_by_input == (12, 36, 60)
    assert costs.parameters == (23, 9, 20)  # however many samples there are
    assert (costs.latency, costs.launch_overhead) == (0.5, 0.1)


def test_messages_are_the_output_of_the_last_layer_of_a_stage() -> None:
    sizes = [7, 5, 3]
    model = Model(tuple(layer(1.0, activation_message=size, gradient_message=2 * size) for size in sizes))
    assert model.costs([1, 2], 2).activation_message == (14,)
    assert model.costs([2, 1], 2).gradient_message == (20,)
    assert model.costs([3], 2).activation_message == 0


def test_the_seconds_of_b_are_kept_where_a_layer_has_them() -> None:
    model = Model((layer(1.0, backward=1.5), layer(2.0)))
    assert model.costs([1, 1], 2).backward == (3, 8)
    assert model.loads() == [2.5, 6]


def test_all_to_all_is_per_sample_and_part_of_the_load() -> None:
    model = Model((layer(1.0, forward_all_to_all=0.5, backward_input_all_to_all=0.25), layer(2.0)))
    assert model.costs([1, 1], 4).forward_all_to_all == (2, 0)
    assert model.loads() == [3.75, 6]


def test_the_layout_of_stages_can_be_parsed() -> None:
    layout = decoder(10).layout([4, 3, 4, 1])
    assert str(layout) == "Et*3|t*3|t*4|L"
    assert penstock.parse_layout(str(layout), layers=10, stages=4) == layout
    *layers, head = decoder(4).layers
    with_mtp = Model((*layers, replace(layers[-1], name="mtp", kind="mtp"), head))
    assert str(with_mtp.layout([3, 2, 1, 1])) == "Ett|tt|m|L"


def test_a_model_is_checked() -> None:
    with pytest.raises(PlanError, match=r"layer b: multi-token prediction layers \(mtp\) come after"):
        Model((Layer("a", Costs(), "mtp"), Layer("b", Costs())))
    with pytest.raises(PlanError, match="forward must be one number"):
        Model((Layer("a", Costs(forward=(1, 2))),))
    with pytest.raises(PlanError, match="latency: must be one number for all links"):
        Model((layer(1.0),), Costs(latency=(1, 2)))
