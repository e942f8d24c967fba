"""Tests of `penstock list`."""

from __future__ import annotations

import penstock
from tests.support.command_line import Run


def test_list_names_every_family_with_a_line_on_it(run: Run) -> None:
    result = run("list")
    assert result.code == 0
    head, *lines = result.out.splitlines()
    assert head.split() == ["name", "stages", "per", "rank", "description"]
    assert [line.split()[0] for line in lines] == list(penstock.families())
    assert all(family.summary in result.out for family in penstock.families().values())


def test_list_in_json_has_the_documented_keys(run: Run) -> None:
    result = run("list", "--json")
    assert result.code == 0
    assert [family["name"] for family in result.json] == list(penstock.families())
    for family in result.json:
        stages = {"stages_per_rank", "default_stages_per_rank"}
        assert set(family) == {"name", "summary", "aliases", "group", *stages}
