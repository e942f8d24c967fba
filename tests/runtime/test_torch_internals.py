"""Promise: private torch names occur in `torch_internals/` and `pipelining/` only, each with its feature."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import PipelineError
from penstock.runtime.doctor import internals_checks
from penstock.runtime.torch_internals.registry import FEATURES, Feature, all_features, missing

SOURCE = Path(penstock.__file__).parent
ROOMS = (SOURCE / "runtime" / "torch_internals", SOURCE / "pipelining")
LIMITATIONS = SOURCE.parents[1] / "docs" / "limitations.md"

# private names of the standard library and of transformers, keys in files, and documented methods of NamedTuple
OTHERS = {
    "_replace",
    "_fields",
    "_asdict",
    "_current_frames",
    "_Unpickler",
    "_is_hf_initialized",
    "_sizes",
    "_dtypes",
}


def is_private(name: str) -> bool:
    return name.isidentifier() and name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def own_names(tree: ast.Module) -> set[str]:
    """The private names that a module defines: functions, classes, variables, fields and slots."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    return found


def private_torch_names(source: str) -> Iterator[str]:
    """The private names in the source of a module that it does not define itself."""
    tree = ast.parse(source)
    own = own_names(tree) | OTHERS
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base = node.value
            is_own = isinstance(base, ast.Name) and base.id in ("self", "cls")
            if node.attr not in own or (hasattr(torch.nn.Module(), node.attr) and not is_own):
                yield ast.unparse(node)
        elif isinstance(node, ast.ClassDef):
            written = (ast.unparse(base).removeprefix("torch.") for base in node.bases)
            bases = [attrgetter(name)(torch) for name in written if re.match(r"(nn|amp|autograd)\.\w+$", name)]
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            yield from (name for name in methods if is_private(name) and any(hasattr(b, name) for b in bases))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [prefix + alias.name for alias in node.names]
            yield from (name for name in names if re.match(r"torch\.(.*\.)?_", name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if (is_private(text) and text not in own) or re.fullmatch(r"torch\.([\w.]*\.)?_[\w.]+", text):
                yield text


def test_private_torch_names_occur_in_their_rooms_only() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.rglob("*.py")
        if not any(room in path.parents for room in ROOMS) and "torch" in (text := path.read_text("utf-8"))
        for name in private_torch_names(text)
    }
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "tensor._version",
        "torch._C._storage_Use_Count(0)",
        "from torch.utils._pytree import TreeSpec",
        "from torch.distributed.pipelining.schedules import _Action",
        "import torch._dynamo",
        "class Own(torch.amp.GradScaler):\n    def _unscale_grads_(self): ...",
        "getattr(module, '_compiled_call_impl', None)",
        "sys.modules.get('torch.distributed._composable.replicate')",
        "class Own:\n    def f(self, other):\n        self._parameters = other._parameters",
    ],
)
def test_the_search_finds_each_kind_of_private_name(line: str) -> None:
    assert list(private_torch_names(line))


@pytest.mark.parametrize(
    "line",
    ["self._own = 1\nother._own", "tensor.shape", "pair._replace(a=1)", "from penstock.x import _y", "_"],
)
def test_the_search_leaves_other_names_alone(line: str) -> None:
    assert not list(private_torch_names(line))


def test_the_installed_torch_has_every_name() -> None:
    lost = {feature.title: missing(feature.names) for feature in all_features()}
    assert not any(lost.values()), lost
    assert len(lost) == len(all_features()) > 10
    assert all(feature.names for feature in all_features())


def test_the_page_of_limitations_has_the_registry() -> None:
    rows = [
        f"| {each.title} | {len(each.names)} | {', '.join(each.verified)} | {each.without} |"
        for each in all_features()
    ]
    text = LIMITATIONS.read_text("utf-8")
    assert [row for row in rows if row not in text] == []
    assert len(re.findall(r"^\|.* \| \d+ \| 2\.\d+[^|]* \|", text, re.MULTILINE)) == len(rows)


@pytest.fixture
def feature() -> Iterator[Feature]:
    made = Feature("teleportation", without="walking", verified=("2.13",))
    yield made
    FEATURES.remove(made)


LOST = r"teleportation: not possible with torch .*, which has no {}\. Without it: walking\. .*2\.13"


@pytest.mark.parametrize(
    "name",
    ["torch._no_such_name", "torch.no_such_module.Class.name", "torch.nn.Module._no_such_field"],
)
def test_a_missing_name_is_an_error_at_its_first_use(feature: Feature, name: str) -> None:
    uses = feature.name(name), feature.field(name), feature.uses(name)(len)
    for use in uses:
        with pytest.raises(PipelineError, match=LOST.format(re.escape(name))):
            use([])
    assert feature.name(name, otherwise=bool) is bool


def test_present_names_cost_nothing(feature: Feature) -> None:
    assert feature.name("torch._C._storage_Use_Count") is torch._C._storage_Use_Count
    assert feature.uses("torch.nn.Module._parameters")(len) is len
    assert feature.field("torch.Tensor._version")(torch.zeros(1)) == 0


def test_a_name_that_a_release_removes_takes_its_feature_only(feature: Feature) -> None:
    script = """
import torch
del torch._C._storage_Use_Count, torch._foreach_mul_, torch.nn.Module._apply
from torch import nn
from penstock.runtime import materialize
from penstock.runtime.data_parallel.gradient_norm import clip_grad_norm
layer = nn.Linear(1, 1)
layer(torch.ones(1, 1)).sum().backward()
uses = [
    lambda: materialize(nn.Linear(1, 1, device="meta")),
    lambda: clip_grad_norm({0: layer}, (), None, 1.0, 2.0, error_if_nonfinite=False),
]
for use in uses:
    try:
        use()
    except Exception as error:
        print(type(error).__name__, error)
"""
    done = subprocess.run(  # noqa: S603 -- this test's own text
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    lost, clipping = done.stdout.splitlines()
    assert lost.startswith("PipelineError materialize(): not possible with torch")
    assert "which has no torch.nn.Module._apply. Without it: stages that are created on their device." in lost
    assert "Pipeline.clip_grad_norm_: not possible" in clipping
    assert "which has no torch._foreach_mul_. Without it: training without clipping" in clipping
    assert feature.names == []


def test_the_doctor_lists_the_features(feature: Feature) -> None:
    feature.uses("torch._no_such_name")
    present, lost = internals_checks()
    assert present.verdict == "ok"
    assert "GradScaler" in present.message
    assert "teleportation" not in present.message
    assert lost.verdict == "warn"
    assert lost.message == "teleportation: torch has no torch._no_such_name; walking works"
