"""Promise: a violation reads like a message of a compiler."""

from __future__ import annotations

import penstock
from penstock import Violation


def test_a_violation_reads_like_a_compiler_error() -> None:
    violation = Violation("some-code", "what is wrong", "what to do", 1, 2, penstock.parse_action("3F4"))
    assert str(violation) == "error[some-code] rank 1, step 2, 3F4: what is wrong\n  try: what to do"
