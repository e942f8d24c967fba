"""Promises of the exceptions: one base class, a complete tree, messages, pickling."""

from __future__ import annotations

import pickle

import pytest

import penstock
from penstock import errors
from penstock.errors import (
    ActionError,
    BatchError,
    BuildError,
    CheckpointError,
    CostsError,
    EstimateError,
    ExportError,
    FailureKind,
    FormatError,
    Message,
    MissingExtraError,
    Parameter,
    PartitionError,
    PenstockError,
    PipelineError,
    PlacementError,
    PlanError,
    ScheduleError,
    SearchError,
    StepFailedError,
    TraceError,
    UnhandledKindError,
)

ONE_OF_EACH = (
    ActionError("1X0", 1, "unknown kind of action"),
    PlacementError("a placement needs at least one stage"),
    BuildError("unknown family '1f1c'"),
    FormatError("mine.csv", ["row 1, column 2: wrong", "row 3: wrong too"]),
    TraceError(["rank0.json: event 3: ts is not a number", "rank1.json: no complete step"]),
    UnhandledKindError("RECOMPUTE", "simulation"),
    ScheduleError("a schedule needs at least 1 microbatch"),
    SearchError("nothing fits"),
    CostsError("forward: it must be 0 or more"),
    MissingExtraError("PNG needs Pillow"),
    PartitionError("no module is called 'layers.9'"),
    BatchError("3 rows cannot be split into 4 microbatches"),
    EstimateError(Parameter("tensor_parallel", 3), " does not divide 32 attention heads"),
    ExportError("Megatron runs 1f1b only"),
    PlanError("no configuration fits into 10 bytes per rank; the smallest needs 12"),
    PipelineError("the schedule is for 4 ranks, but the process group has 2"),
    CheckpointError("step-100 cannot be loaded", ["no 'a.weight' in it", "no 'b.weight' in it"]),
    StepFailedError("step 3 failed on rank 1", 1, "1F0", 1, 0, FailureKind.EXCEPTION, "Traceback ..."),
)


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
def test_every_error_is_caught_as_penstock_error_and_as_value_error(error: PenstockError) -> None:
    assert isinstance(error, PenstockError)
    assert isinstance(error, ValueError)


def test_the_tree_in_the_docstring_is_complete() -> None:
    assert errors.__doc__ is not None
    drawn = {word for word in errors.__doc__.split() if word.endswith("Error")}
    assert drawn == set(errors.__all__)
    assert {type(error).__name__ for error in ONE_OF_EACH} | {"PenstockError"} == drawn


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_a_public_name(name: str) -> None:
    assert getattr(penstock, name) is getattr(errors, name)


def test_an_action_error_has_text_reason_and_position() -> None:
    error = ActionError("1X0", 1, "unknown kind of action")
    assert str(error) == "'1X0' is not an action: unknown kind of action (at position 1)"
    assert (error.text, error.position, error.reason) == ("1X0", 1, "unknown kind of action")


def test_an_action_error_shortens_a_long_text() -> None:
    error = ActionError("9" * 10_000, 0, "the stage number is too large")
    assert len(str(error)) < 200
    assert error.text == "9" * 10_000


def test_a_format_error_has_one_line_per_problem_and_every_line_names_the_file() -> None:
    error = FormatError("mine.csv", ["row 1, column 2: wrong", "row 3: wrong too"])
    assert str(error).splitlines() == ["mine.csv: row 1, column 2: wrong", "mine.csv: row 3: wrong too"]
    assert error.problems == ("row 1, column 2: wrong", "row 3: wrong too")
    assert error.source == "mine.csv"


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
def test_errors_can_be_pickled(error: PenstockError) -> None:
    there = pickle.loads(pickle.dumps(error))  # noqa: S301 -- our own bytes
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert vars(there) == vars(error)


def test_a_file_with_very_many_problems_gives_a_short_message() -> None:
    error = FormatError("mine.csv", [f"row {row}: wrong" for row in range(100)])
    lines = str(error).splitlines()
    assert (len(lines), lines[-1], len(error.problems)) == (21, "mine.csv: and 80 more problems", 100)
    assert str(FormatError("mine.csv", ["wrong"] * 21)).endswith("and 1 more problem")


def test_a_message_has_parameters_by_their_python_names_and_front_ends_name_them_otherwise() -> None:
    error = PlanError(
        "give ", Parameter("ranks"), " or ", Message(Parameter("objective", "span")), ", not both"
    )
    assert str(error) == "give ranks or objective='span', not both"
    assert error.message.text(lambda each: f"<{each.name}>") == "give <ranks> or <objective>, not both"


def test_an_error_has_the_parameter_that_it_is_about() -> None:
    assert PlanError("it must be more", parameter="samples").parameter == "samples"
    assert PlanError(Parameter("ranks"), " must be at least ", Parameter("tensor", 2)).parameter == "ranks"
    assert TraceError([Message(Parameter("step"), " must be 0")]).parameter == "step"
    assert PlanError("nothing fits").parameter == ""
