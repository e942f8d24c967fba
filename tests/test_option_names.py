"""Promise: the library names parameters; only the command line writes them as options.

Options of other programs, and those of command lines that Penstock generates, are listed here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import penstock

SOURCE = Path(penstock.__file__).parent
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]+")
OTHERS = {
    "service.py": {"--group", "--costs", "--jitter"},  # words of the generated `penstock simulate`
    "diagnostics.py": {"--standalone", "--master-port"},  # torchrun
    "runtime/doctor.py": {"--nproc-per-node", "--distributed", "--rdzv-endpoint", "--master-addr", "--nnodes"},
    "traces/read/megatron_timers.py": {"--timing-log-level", "--timing-log-option"},  # Megatron-LM
    "trainers/torchtitan.py": {"--parallelism", "--training"},
    "trainers/megatron.py": {
        "--pipeline-model-parallel-size",
        "--pipeline-model-parallel-layout",
        "--num-layers",
        "--num-layers-per-virtual-pipeline-stage",
        "--micro-batch-size",
        "--global-batch-size",
        "--mtp-num-layers",
        "--microbatch-group-size-per-vp-stage",
        "--overlap-moe-expert-parallel-comm",
    },
}


def texts_of(tree: ast.AST) -> Iterator[str]:
    """All texts but docstrings, which are statements of their own."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def options_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {found for text in texts_of(tree) for found in OPTION.findall(text)}


def test_texts_of_the_library_have_no_options_of_the_command_line() -> None:
    paths = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "cli"]
    found = {str(path.relative_to(SOURCE)): options for path in paths if (options := options_in(path))}
    assert found == OTHERS


def test_an_option_in_a_text_is_found_and_one_in_a_docstring_is_not() -> None:
    tree = ast.parse("def f(n):\n    '''Takes --memory.'''\n    raise ValueError(f'use --ranks {n} --tp')")
    assert {found for text in texts_of(tree) for found in OPTION.findall(text)} == {"--ranks", "--tp"}
