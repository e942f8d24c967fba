"""The arguments of a plan are checked."""

from __future__ import annotations

import pytest

from penstock import PlanError
from penstock.planning import Model, plan
from tests.support.planning_models import decoder, layer, quick_plan


def test_all_errors_of_the_arguments_are_reported() -> None:
    with pytest.raises(PlanError, match="give ranks and samples: the model 'model' does not have"):
        plan(Model((layer(1.0),)))
    for arguments, message in (
        ({"ranks": 0, "samples": 1.5}, "ranks must be an integer above 0 .given 0.; samples must be"),
        ({"ranks": 13}, "13 ranks need at least one layer per stage, but the model has 12 layers"),
        ({"stages_per_rank": 4}, "4 ranks with 4 stages each need at least one layer per stage"),
        ({"stages_per_rank": [3, 4, 4, 3]}, "4 ranks with 3, 4, 4, 3 stages need at least one layer per stage"),
        ({"stages_per_rank": [1, 2]}, "stages_per_rank has 2 numbers for 4 ranks"),
        ({"stages_per_rank": [1, 2, 0, 1]}, "every number in stages_per_rank must be a whole number"),
        ({"memory_limit": -1, "seconds": -1}, "memory_limit must .*given -1.; seconds must"),
        ({"seed": -1}, "seed must be an integer of at least 0 .given -1."),
        ({"objective": "luck"}, "objective must be one of makespan, span, period"),
        ({"jitter": 0.1, "objective": "period"}, "jitter is supported for the makespan only"),
        ({"jitter": 7, "quantile": 1}, "jitter must be a share .*; quantile must be between 0 and 1"),
    ):
        with pytest.raises(PlanError, match=message):
            quick_plan(decoder(10), **arguments)
