"""Promise: a script that ends without closing anything exits with 0."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("runs", [1, 4])
@pytest.mark.full
def test_scripts_that_close_nothing_exit_with_0(runs: int) -> None:
    done = subprocess.run(  # noqa: S603 -- our own code
        [sys.executable, "-m", "tests.support.exits", str(runs)],
        capture_output=True,
        encoding="utf-8",
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0, 0]"] * runs, done.stderr
