"""Random costs for laws that hold for any costs."""

from __future__ import annotations

import random

from penstock import Costs

__all__ = ["random_costs"]


def random_costs(rng: random.Random, stages: int) -> Costs:
    """Costs with zeros, ties and every kind of cost."""

    def some() -> tuple[float, ...]:
        return tuple(rng.choice((0, 0.5, 1, 2, 5)) for _ in range(stages))

    return Costs(
        forward=some(),
        backward_input=some(),
        backward_weight=some(),
        latency=rng.choice((0, 1, 3)),
        bandwidth=rng.choice((None, 1, 4)),
        activation_message=rng.choice((0, 2)),
        gradient_message=rng.choice((0, 2)),
        overlap_factor=rng.choice((0, 0.5, 1)),
        launch_overhead=rng.choice((0, 0.25)),
        unshard=rng.choice((0, 1)),
        reduce_grad=rng.choice((0, 2)),
        unsharded_parameters=rng.choice((0, 3)),
        forward_all_to_all=some() if (experts := rng.random() < 0.5) else 0,
        backward_input_all_to_all=some() if experts else 0,
        backward_weight_all_to_all=rng.choice((0, 1)) if experts else 0,
    )
