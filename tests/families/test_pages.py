"""Promise: every family has a page, and the formulas that only the pages have hold."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import penstock
from penstock import Costs, simulate

PAGES = Path(__file__).parents[2] / "docs" / "families"
F, I, W = 100, 110, 90


@pytest.mark.parametrize("name", penstock.families())
def test_every_family_has_a_page_with_figure_formulas_memory_and_advice(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {name}: ")
    assert f"]({name}.svg)" in text
    assert f"penstock show {name} -p 4 -m 8 -o docs/families/{name}.svg" in text
    for part in ("## Formulas", "## Memory", "## When to use it", "## Where it comes from"):
        assert part in text


@pytest.mark.parametrize(("p", "v"), list(itertools.product((1, 2, 3, 4), (1, 2, 3))))
def test_the_formulas_of_the_pages_hold(p: int, v: int) -> None:
    costs = Costs(forward=F, backward_input=I, backward_weight=W)
    for m in (p, 2 * p, 4 * p):

        def span(name: str, per_rank: int | None = v, at: Costs = costs, m: int = m) -> float:
            return simulate(penstock.build(name, ranks=p, microbatches=m, stages_per_rank=per_rank), at).span

        assert span("looped-bfs") == (m * v + p - 1) * (F + I + W)
        assert span("interleaved-zero-bubble") == m * v * (F + I + W) + (p - 1) * (F + I - W)
        forward = penstock.build("forward-only", ranks=p, microbatches=m, stages_per_rank=v)
        assert simulate(forward, costs).makespan == (m * v + p - 1) * F
        if m >= 2 * p:
            idle = span("dualpipev", None) - 2 * m * (F + I + W)
            assert idle <= (p - 1) * ((F + I + W) + (I + W) - 3 * W)
            equal = Costs(forward=1, backward_input=1, backward_weight=1)
            assert span("dualpipev", None, equal) - 6 * m == (p - 1) * (3 + 2 - 3)
