"""A traceback begins with the user's code; frames of Penstock are shown where there is nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import PipelineError
from penstock.runtime.failure.report import traceback_of

CODE = """
def call(function):
    function()

def fail(error):
    raise error
"""
LIBRARY: dict[str, Any] = {}
FILE = Path(penstock.__file__).parent / "runtime" / "made_up.py"
exec(compile(CODE, str(FILE), "exec"), LIBRARY)  # noqa: S102 -- as if it were a file of the package


def users_code() -> None:
    raise ValueError("broken")


def traced(function: Callable[..., object], *arguments: object) -> str:
    """The traceback of an error in a function that code of Penstock calls."""
    with pytest.raises((ValueError, PipelineError)) as caught:
        function(*arguments)
    error = caught.value
    assert error.__traceback__ is not None
    return traceback_of(error.with_traceback(error.__traceback__.tb_next))  # without this test


def test_frames_of_penstock_before_the_users_code_are_left_out() -> None:
    text = traced(LIBRARY["call"], users_code)
    assert text.startswith("Traceback (most recent call last):")
    assert "in users_code" in text
    assert text.endswith("ValueError: broken\n")
    assert "in call" not in text


def test_frames_of_penstock_are_shown_if_there_are_no_others() -> None:
    assert "in fail" in traced(LIBRARY["fail"], ValueError("broken"))


def test_an_error_that_penstock_found_has_no_traceback() -> None:
    assert traced(LIBRARY["fail"], PipelineError("the loss is not finite")) == ""
