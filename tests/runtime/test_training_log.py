"""Promise: a training log prints one line per step, and its files hold the same numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.errors import MissingExtraError, PipelineError
from penstock.runtime import TrainingLog


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Take the place of some rank."""

    def become(rank: int) -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)

    return become


def lines_of(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise ValueError(name)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_step_is_one_line_with_rank_step_loss_norm_memory_and_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = TrainingLog()
    log.step(4.15888, torch.tensor(1.5), tokens=512, lr=0.1)
    line = capsys.readouterr().out
    assert line.startswith("[rank 0] step 1  loss 4.1589  grad_norm 1.5  memory ")
    assert " GiB  tps " in line
    assert line.endswith("  lr 0.1\n")


def test_missing_values_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    TrainingLog(every=0).step(1.0)
    TrainingLog().step(None)
    assert capsys.readouterr().out.split()[:4] == ["[rank", "0]", "step", "1"]


def test_json_lines_hold_every_step_and_are_appended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.jsonl"
    for first in (1, 4):
        with TrainingLog(jsonl=path, every=2, first=first) as log:
            for loss in (1.0, 0.5, 0.25):
                log.step(loss, tokens=8)
    found = lines_of(path)
    assert [(line["step"], line["loss"]) for line in found] == list(enumerate([1.0, 0.5, 0.25] * 2, 1))
    assert all(set(line) == {"rank", "step", "seconds", "loss", "memory", "tps"} for line in found)
    assert found[0]["tps"] == pytest.approx(8 / found[0]["seconds"])
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()] == ["2", "4", "6"]


def test_nonfinite_numbers_are_null_in_json_and_text_in_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.jsonl"
    with TrainingLog(jsonl=path) as log:
        log.step(float("nan"), float("inf"))
    (line,) = lines_of(path)
    assert (line["loss"], line["grad_norm"]) == (None, None)
    assert "loss nan  grad_norm inf" in capsys.readouterr().out


def test_only_rank_0_logs_by_default(
    as_rank: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(1)
    with TrainingLog(jsonl=tmp_path / "a.jsonl") as quiet:
        quiet.step(1.0)
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())
    for ranks in (None, [1]):
        with TrainingLog(jsonl=tmp_path / "a.jsonl", ranks=ranks) as log:
            log.step(1.0)
    printed = capsys.readouterr().out.splitlines()
    assert [line[:15] for line in printed] == ["[rank 1] step 1"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.rank1.jsonl"]


def test_a_missing_tensorboard_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match="pip install tensorboard"):
        TrainingLog(tensorboard=tmp_path)


def test_tensorboard_gets_every_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_rank: Callable[[int], None]
) -> None:
    calls: list[Any] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            calls.append(Path(folder).relative_to(tmp_path).as_posix())

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def close(self) -> None:
            calls.append("closed")

    stand_in = ModuleType("torch.utils.tensorboard")
    monkeypatch.setattr(stand_in, "SummaryWriter", Writer, raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    as_rank(3)
    with TrainingLog(tensorboard=tmp_path, ranks=[3], first=7) as log:
        log.step(0.5, lr=0.1)
    assert calls[:2] == ["rank3", ("loss", 0.5, 7)]
    assert calls[-2:] == [("lr", 0.1, 7), "closed"]
    assert "memory" in {call[0] for call in calls}


def test_values_other_than_numbers_are_rejected() -> None:
    with pytest.raises(PipelineError, match="only numbers can be logged"):
        TrainingLog().step("high")  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="at least 0"):
        TrainingLog(every=-1)
