"""The Pareto frontier of options."""

from __future__ import annotations

from tests.support.planning_models import decoder, quick_plan


def test_the_frontier_has_the_options_that_no_other_beats_in_both() -> None:
    made = quick_plan(decoder(10), seconds=1.0)
    front = made.frontier
    assert front[0] is made.best
    for option in made.options:
        better = [o for o in made.options if o.seconds <= option.seconds and o.memory < option.memory]
        better += [o for o in made.options if o.seconds < option.seconds and o.memory <= option.memory]
        if option in front:
            assert not better
        else:
            assert any(o.seconds <= option.seconds and o.memory <= option.memory for o in front)
