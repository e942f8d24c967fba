"""Promise: a package that can be called has the signature and the docstring of its function."""

from __future__ import annotations

import inspect
from typing import Any

import penstock
import penstock.families
import penstock.search
from penstock.families.registry import families
from penstock.search import search


def test_a_call_of_the_package_calls_its_function() -> None:
    assert penstock.families() == families()


def test_the_package_shows_the_signature_and_docstring_of_its_function() -> None:
    pairs: list[tuple[Any, Any]] = [(penstock.families, families), (penstock.search, search)]
    for package, function in pairs:
        assert inspect.signature(package) == inspect.signature(function)
        assert str(inspect.getdoc(function)) in str(inspect.getdoc(package))
        assert inspect.ismodule(package)
