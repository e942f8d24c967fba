"""Tests of `penstock list`."""

from __future__ import annotations

import penstock
from tests.support.command_line import Run


def test_list_names_every_family_with_a_line_on_it(run: Run) -> None:
    answer = run("list")
    assert answer.code == 0
    head, *lines = answer.out.splitlines()
    assert head.split() == ["name", "stages", "per", "rank", "description"]
    assert [line.split()[0] for line in lines] == list(penstock.families())
    assert all(family.summary in answer.out for family in penstock.families().values())


def test_list_in_json_has_the_documented_keys(run: Run) -> None:
    answer = run("list", "--json")
    assert answer.code == 0
    assert [family["name"] for family in answer.json] == list(penstock.families())
    for family in answer.json:
        assert set(family) == {"name", "summary", "stages_per_rank", "aliases"}
