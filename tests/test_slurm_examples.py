"""Promise: the scripts for SLURM start one torchrun per node that meet at the first node of the job."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "examples" / "slurm"
STAND_INS = {"srun": 'echo "$@"', "scontrol": 'printf "node7\\nnode8\\n"'}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """SLURM's variables, and commands that print how they are called."""
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "123456", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_GPUS_ON_NODE": "4", **job}


def started(script: str, environment: dict[str, str], *arguments: str) -> str:
    command = ["bash", str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout.strip()


def test_one_node(environment: dict[str, str]) -> None:
    wanted = "torchrun --standalone --nproc-per-node 4 mine.py --steps 3"
    assert started("one_node.sbatch", environment, "mine.py", "--steps", "3") == wanted
    assert started("one_node.sbatch", environment).endswith(" examples/train.py")


def test_several_nodes_meet_at_the_first(environment: dict[str, str]) -> None:
    line = started("several_nodes.sbatch", environment, "mine.py")
    assert line == (
        "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-id 123456 --rdzv-backend c10d "
        "--rdzv-endpoint node7:23456 mine.py"
    )
