"""Promise: the packages import in one direction only; a new package gets its place in `LAYERS`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import penstock

SOURCE = Path(penstock.__file__).parent

# from the bottom up: a package imports packages of lower layers, never of its own
LAYERS = (
    {"errors"},
    {"arguments", "callable_package", "compilation", "loops", "processes"},
    {"diagnostics"},
    {"display"},
    {"ir"},
    {"formats", "families"},
    {"validation"},
    {"lowering"},
    {"cost", "recognition"},
    {"bounds"},
    {"simulation"},
    {"search"},
    {"planning"},
    {"view"},
    {"traces"},
    {"api"},  # gathers the public names
    {"penstock"},  # __init__.py, which has them
    {"runtime"},
    {"pipelining"},  # torch's names
    {"trainers", "service"},
    {"web"},
    {"cli"},
    {"__main__"},
)
# the same within `runtime`
RUNTIME_LAYERS = (
    {"torch_internals"},
    {"dtensors", "pytree", "training_log", "local_ranks"},
    {"backward", "batch", "transport"},
    {"data_parallel", "models", "states"},
    {"stage"},
    {"config"},
    {"program"},
    {"failure"},
    {"session"},
    {"doctor", "pipeline"},
    {"checkpoints", "demo", "grad_scaler", "verification"},
    {"runtime"},  # __init__.py, which gathers the public names
)
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}


def module_of(path: Path) -> str:
    parts = ("penstock", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache  # not at import: every worker collects this module, and one runs it
def trees() -> dict[str, ast.Module]:
    """The syntax tree of every module."""
    return {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def at_module_level(node: ast.AST) -> Iterable[ast.AST]:
    """Everything that runs on import: the bodies of functions are left out."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from at_module_level(child)


def imported(nodes: Iterable[ast.AST]) -> Iterable[str]:
    """The modules that are imported; `from package import module` counts for the module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in trees() else str(node.module)


@cache
def imports() -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {
        module: {name for name in imported(at_module_level(tree)) if name in trees()}
        for module, tree in trees().items()
    }


def test_every_module_belongs_to_a_package_in_the_order() -> None:
    assert {package_of(module) for module in trees()} == set(LAYER_OF)


def test_imports_point_one_way() -> None:
    layers = {module: LAYER_OF[package_of(module)] for module in trees()}
    wrong = {
        (module, name)
        for module, names in imports().items()
        for name in names
        if package_of(name) != package_of(module) and layers[name] >= layers[module]
    }
    assert not wrong


def room_of(module: str) -> str:
    """The package or module of `runtime` that a module is in."""
    return module.split(".")[2] if module.count(".") > 1 else "runtime"


def test_imports_within_the_runtime_point_one_way() -> None:
    layer_of = {room: layer for layer, rooms in enumerate(RUNTIME_LAYERS) for room in rooms}
    modules = {module for module in trees() if package_of(module) == "runtime"}
    assert {room_of(module) for module in modules} == set(layer_of)
    wrong = {
        (module, name)
        for module in modules
        for name in imports()[module] & modules
        if room_of(name) != room_of(module) and layer_of[room_of(name)] >= layer_of[room_of(module)]
    }
    assert not wrong


def test_there_are_no_cycles_between_modules() -> None:
    # a package's __init__ gathers what its modules have: they may not import it back
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a cycle: {error.args[1]}")


def test_only_the_runtime_and_the_names_of_torch_import_torch() -> None:
    others = {
        module: tree for module, tree in trees().items() if package_of(module) not in ("runtime", "pipelining")
    }
    wrong = {
        module
        for module, tree in others.items()
        if "torch" in {name.split(".")[0] for name in imported(ast.walk(tree))}
    }
    assert not wrong


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, penstock.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 -- our own interpreter
