"""With jitter, options are ranked by a quantile of the makespan."""

from __future__ import annotations

from penstock.search import Progress
from penstock.simulation.jitter import simulate_with_jitter
from tests.support.planning_models import decoder, quick_plan


def test_options_are_ranked_by_a_quantile_no_less_than_the_plain_time() -> None:
    made = quick_plan(decoder(6), jitter=0.1, quantile=0.9, samples=4)
    assert all(option.seconds >= option.seconds_without_jitter for option in made.options)
    assert [option.seconds for option in made.options] == sorted(option.seconds for option in made.options)
    spread = simulate_with_jitter(made.best.schedule, made.best.configuration.costs, jitter=0.1)
    assert made.best.seconds == spread.quantile(0.9)
    again = quick_plan(decoder(6), jitter=0.1, quantile=0.9, samples=4)
    assert again.best.seconds == made.best.seconds


def test_interrupted_it_ranks_the_options_that_have_a_quantile() -> None:
    for stopped, jitter in ((0, None), (2, 0.05)):
        phases: list[str] = []

        def stop(now: Progress, phases: list[str] = phases, stopped: int = stopped) -> None:
            if now.phase.startswith("simulating jitter"):
                phases.append(now.phase)
                if len(phases) > stopped:
                    raise KeyboardInterrupt

        made = quick_plan(decoder(6), jitter=0.05, samples=4, on_progress=stop)
        assert made.interrupted
        assert made.request.jitter == jitter
        assert stopped in (0, len(made.options))
