"""A file of another kind is named in one line, with the command that reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import Costs, FormatError, build, read
from penstock.formats.files import kind_of_file

CONFIG = {"model_type": "llama", "hidden_size": 64}
MODEL = {"layers": [{"forward_seconds": 1}], "devices": {"ranks": 4}}


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (CONFIG, "a model's config.json"),
        (MODEL, "a model file with costs of layers"),
        ({"traceEvents": []}, "a trace"),
    ],
)
def test_neither_a_schedule_nor_costs(document: dict[str, Any], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError) as not_schedule:
        read(path)
    with pytest.raises(FormatError) as not_costs:
        Costs.read(path)
    for caught, what in ((not_schedule, "a schedule"), (not_costs, "costs")):
        (problem,) = caught.value.problems
        assert problem.startswith(f"not {what}: it is {kind}, which penstock ")


def test_a_schedule_and_costs_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    build("1f1b", ranks=2, microbatches=2).write(tmp_path / "schedule.json")
    Costs(forward=2.0).write(tmp_path / "costs.json")
    with pytest.raises(FormatError, match="not costs: it is a schedule"):
        Costs.read(tmp_path / "schedule.json")
    with pytest.raises(FormatError, match="not a schedule: it is costs of stages"):
        read(tmp_path / "costs.json")
    assert kind_of_file({"other": 1}) is None
    assert kind_of_file([1]) is None
