"""The extras numba and ortools are optional, and so is a cache of compiled code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.grids import small


@pytest.mark.parametrize("lacking", ["ortools", "numba"])
@small(lambda lacking: lacking == "numba")
def test_a_search_without_an_extra_works_and_reports_it_missing(lacking: str) -> None:
    code = f"""
import sys, json
from importlib.abc import MetaPathFinder
class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {lacking!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
from penstock import search
found = search(ranks=3, microbatches=5, stages_per_rank=2, live_limit=4, moves=3000)
print(json.dumps([found.value, found.bound.seconds, found.missing]))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)  # noqa: S603
    value, bound, missing = json.loads(done.stdout)
    assert bound <= value
    assert lacking in missing[0]


@pytest.mark.full
def test_it_compiles_without_a_writable_cache() -> None:
    pytest.importorskip("numba", reason="the compiled kernel is an extra")
    code = """
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
from penstock.compilation import compiled
from penstock.search.kernel import WEIGHT_GRAD
print(compiled(lambda number: number + WEIGHT_GRAD)(3))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)  # noqa: S603
    assert done.stdout == "5\n"


def test_disabled_compilation_is_reported() -> None:
    code = "from penstock import search; print(search(ranks=2, microbatches=2, moves=1).missing)"
    command, env = [sys.executable, "-c", code], os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)  # noqa: S603
    assert "numba" in done.stdout
