"""Tests of torch's functions to list and draw a schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipelining import _schedule_visualizer as visualizer
from tests.support.pipelining_orders import NAMES


@pytest.mark.parametrize("name", ["GPipe", "1F1B", *NAMES])
def test_ops_are_plain_spaced_or_with_communication(name: str) -> None:
    plain = visualizer.get_schedule_ops(name, 2, 4)
    spaced = visualizer.get_schedule_ops(name, 2, 4, add_spacing=True)
    with_messages = visualizer.get_schedule_ops(name, 2, 4, with_comms=True)
    for rank in range(2):
        assert [each for each in spaced[rank] if each is not None] == plain[rank]
        assert [each for each in with_messages[rank] if each is not None and each.is_compute_op] == plain[rank]
    assert None in spaced[1]


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="add_spacing"):
        visualizer.get_schedule_ops("GPipe", 2, 4, add_spacing=True, with_comms=True)
    with pytest.raises(AssertionError, match="one stage per rank"):
        visualizer.get_schedule_ops("GPipe", 2, 4, num_stages_per_rank=2)
    with pytest.raises(ValueError, match="a name or a schedule class"):
        visualizer.get_schedule_ops(int, 2, 4)  # type: ignore[arg-type]


def test_it_draws_to_files_and_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ops = visualizer.get_schedule_ops("ZBVZeroBubble", 2, 4)
    for ending, begin in (("svg", b"<svg"), ("png", b"\x89PNG")):
        visualizer.visualize_schedule(ops, str(tmp_path / f"a.{ending}"))
        assert (tmp_path / f"a.{ending}").read_bytes().lstrip().lower().startswith(begin.lower())
    visualizer.visualize_schedule(ops)
    assert "rank 1" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"\.svg"):
        visualizer.visualize_schedule(ops, str(tmp_path / "a.bmp"))
