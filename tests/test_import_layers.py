"""Promise: the packages import in one direction only; a new package gets its place in `LAYERS`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import penstock

SOURCE = Path(penstock.__file__).parent

# from the bottom up: a package imports packages of lower layers, never of its own
LAYERS = (
    {"errors", "arguments", "diagnostics"},
    {"ir"},
    {"formats", "families"},
    {"validation"},
    {"lowering"},
    {"cost"},
    {"bounds"},
    {"simulation"},
    {"search"},
    {"planning"},
    {"view"},
    {"penstock"},  # __init__.py, which only gathers names
    {"runtime"},
    {"pipelining"},  # torch's names
    {"cli"},
    {"__main__"},
)
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}


def module_of(path: Path) -> str:
    parts = ("penstock", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Everything that runs on import: the bodies of functions are left out."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from at_module_level(child)


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """The modules that are imported; `from package import module` counts for the module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in TREES else str(node.module)


IMPORTS = {
    module: {name for name in imported(at_module_level(tree)) if name in TREES}
    for module, tree in TREES.items()
}


def test_every_module_belongs_to_a_package_in_the_order() -> None:
    assert {package_of(module) for module in TREES} == set(LAYER_OF)


@pytest.mark.parametrize("module", sorted(TREES))
def test_imports_point_one_way(module: str) -> None:
    package = package_of(module)
    wrong = {
        name
        for name in IMPORTS[module]
        if package_of(name) != package and LAYER_OF[package_of(name)] >= LAYER_OF[package]
    }
    assert not wrong


def test_there_are_no_cycles_between_modules() -> None:
    # a package's __init__ gathers what its modules have: they may not import it back
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a cycle: {error.args[1]}")


@pytest.mark.parametrize("module", sorted(TREES))
def test_only_the_runtime_and_the_names_of_torch_import_torch(module: str) -> None:
    names = {name.split(".")[0] for name in imported(ast.walk(TREES[module]))}
    assert package_of(module) in ("runtime", "pipelining") or "torch" not in names


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, penstock.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 -- our own interpreter
