"""Promise: the public names are the documented ones, and each has a docstring."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

DOCUMENTED = {
    # types
    "Action",
    "Kind",
    "Overlap",
    "Placement",
    "SendModel",
    "StageGraph",
    "UnhandledKindError",
    "Schedule",
    "Costs",
    "Timeline",
    "Family",
    "MeasuredRun",
    "SearchResult",
    "Violation",
    # functions
    "build",
    "encoder_decoder",
    "even_layout",
    "families",
    "lower",
    "parse_action",
    "parse_layout",
    "plan",
    "read",
    "read_trace",
    "recognize",
    "register",
    "search",
    "simulate",
    "validate",
    # errors
    "ActionError",
    "BatchError",
    "BuildError",
    "CheckpointError",
    "CostsError",
    "EstimateError",
    "ExportError",
    "FormatError",
    "MissingExtraError",
    "PartitionError",
    "PenstockError",
    "PipelineError",
    "PlacementError",
    "PlanError",
    "ScheduleError",
    "SearchError",
    "StepFailedError",
    "TraceError",
}


def test_the_public_names_are_exactly_the_documented_ones() -> None:
    assert set(penstock.__all__) == DOCUMENTED
    assert len(penstock.__all__) == len(DOCUMENTED)


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_every_public_name_exists_and_has_a_docstring(name: str) -> None:
    doc = getattr(penstock, name).__doc__
    assert doc
    assert not doc.startswith(f"{name}(")  # the generated docstring of a dataclass


def test_all_other_attributes_are_modules_or_private() -> None:
    modules = {path.stem for path in Path(penstock.__file__).parent.iterdir()}
    seen = {name for name in vars(penstock) if not name.startswith("_")}
    assert seen - modules <= DOCUMENTED


def test_public_names_are_imported_when_they_are_used() -> None:
    code = "import sys, penstock as p; a = {*sys.modules}; p.build; print('numpy' in a, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)  # noqa: S603
    assert done.stdout == "False True\n"


def test_every_public_name_is_listed_and_an_unknown_name_is_an_attribute_error() -> None:
    assert set(dir(penstock)) >= DOCUMENTED
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'simulat'"):
        penstock.simulat  # noqa: B018 -- it raises


def test_the_version_is_valid() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", penstock.__version__)


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(penstock.__file__).parent / "py.typed").exists()
