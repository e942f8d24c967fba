"""Promise: the examples run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(ranks: int, example: str, *arguments: str) -> list[str]:
    """What it prints on so many ranks."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
    answer = subprocess.run(  # noqa: S603 -- our own examples
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
            str(EXAMPLES / example),
            *arguments,
        ],
        capture_output=True,
        check=False,
        encoding="utf-8",
        env=environment,
        timeout=150,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()


@pytest.mark.xdist_group("ranks-2")
def test_train_compares_its_gradients_with_one_process() -> None:
    lines = run(2, "train.py")
    steps, checks = lines[::2], lines[1::2]
    step = r"\[rank 0\] step (\d)  loss \d\.\d{4}  grad_norm [\d.]+  memory [\d.]+ GiB  tps [\d,]+"
    assert [match and match[1] for match in (re.fullmatch(step, line) for line in steps)] == ["0", "1", "2"]
    assert checks == ["[rank 0] gradients equal to one process: True"] * 3


@pytest.mark.xdist_group("ranks-4")
def test_composed_finds_the_same_losses_however_its_replicas_are_held() -> None:
    copied, sharded = (run(4, "composed.py", "pp=2", data) for data in ("dp=2", "fsdp=2"))
    assert copied == sharded
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", "\n".join(copied))]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
