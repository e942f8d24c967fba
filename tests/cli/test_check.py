"""Tests of `penstock check`."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from tests.support.command_line import Run

DEADLOCK = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"
ANSWER = {"file", "valid", "ranks", "stages", "microbatches", "level", "order", "violations"}
VIOLATION = {"code", "rank", "step", "action", "message", "suggestion", "send_models", "cycle"}


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    (tmp_path / "valid.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    (tmp_path / "dead.csv").write_text(DEADLOCK)
    (tmp_path / "invalid.csv").write_text("0B0,0F0\n1F0,1F0\n")
    (tmp_path / "malformed.csv").write_text("0F0,zz\n1F0x,,\n")
    (tmp_path / "malformed.json").write_text('{"version": 2}')
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0\x00F\x000\x00")
    (tmp_path / "empty.csv").touch()
    (tmp_path / "folder.csv").mkdir()
    penstock.lower(penstock.build("zbv", ranks=2, microbatches=2)).write(tmp_path / "lowered.json")


# --- valid -----------------------------------------------------------------------------------------


def test_a_valid_schedule_exits_with_0_and_names_the_send_models(run: Run) -> None:
    result = run("check", "valid.csv")
    assert (result.code, result.err) == (0, "")
    assert result.out == (
        "valid.csv: valid (2 ranks, 2 stages, 2 microbatches, 8 actions, compute); "
        "no deadlock under send models buffered, edge-streams, pair-streams, shared-stream, rendezvous\n"
        "order: 1f1b (p=2, v=1, m=2), the same as eager-1f1b, interleaved-1f1b, gis, gis-h, po-h\n"
    )


def test_a_lowered_schedule_can_be_checked_for_weaker_sends(run: Run) -> None:
    result = run("check", "lowered.json", "--send-model", "edge-streams")
    assert result.code == 0
    assert "lowered); no deadlock under send models buffered, edge-streams\n" in result.out
    assert result.out.endswith("order: zbv (p=2, v=2, m=2), the same as dualpipev\n")


def test_json_of_a_valid_schedule_has_the_documented_keys(run: Run) -> None:
    result = run("check", "valid.csv", "--json")
    assert result.code == 0
    assert set(result.json) == ANSWER
    assert result.json["valid"] is True
    assert result.json["violations"] == []
    assert result.json["order"]["families"] == [
        "1f1b",
        "eager-1f1b",
        "interleaved-1f1b",
        "gis",
        "gis-h",
        "po-h",
    ]
    assert (result.json["file"], result.json["ranks"], result.json["level"]) == ("valid.csv", 2, "compute")


# --- invalid ---------------------------------------------------------------------------------------


def test_a_deadlock_exits_with_1_and_shows_the_cycle(run: Run) -> None:
    result = run("check", "dead.csv")
    assert result.code == 1
    assert result.out.startswith("error[deadlock] rank 0, step 1, 0B0: ranks 0 and 1 wait for each other")
    assert "  rank 0, step 1: 0B0 waits for 1B0 (rank 1, step 3): " in result.out
    assert "  try: " in result.out
    assert "    rank 0 | 0F0 [0B0] [0F1] 0B1\n" in result.out
    assert result.out.endswith("\ndead.csv: 1 error\n")


def test_all_errors_are_reported_at_once(run: Run) -> None:
    result = run("check", "invalid.csv")
    assert result.code == 1
    for code in ("backward-before-forward", "duplicate-action", "missing-backward"):
        assert f"error[{code}]" in result.out
    assert result.out.endswith("invalid.csv: 3 errors\n")


def test_json_of_an_invalid_schedule_has_the_documented_keys_and_places(run: Run) -> None:
    result = run("check", "dead.csv", "--json")
    assert result.code == 1
    assert set(result.json) == ANSWER
    assert result.json["valid"] is False
    (violation,) = result.json["violations"]
    assert set(violation) == VIOLATION
    assert (violation["code"], violation["rank"], violation["step"]) == ("deadlock", 0, 1)
    assert violation["action"] == "0B0"
    for wait in violation["cycle"]:
        assert set(wait) == {"rank", "step", "action", "waits_for", "why"}
        assert set(wait["waits_for"]) == {"rank", "step", "action"}


# --- unreadable ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "lines"),
    [
        ("malformed.csv", ["malformed.csv: row 1, column 2: 'zz'", "malformed.csv: row 2, column 1: '1F0x'"]),
        ("malformed.json", ["malformed.json: version: expected 1", "malformed.json: ranks: missing"]),
        ("bytes.csv", ["bytes.csv: not a text file: byte 0 is not valid UTF-8"]),
        ("empty.csv", ["empty.csv: no rows"]),
    ],
)
def test_a_malformed_file_exits_with_1_and_names_every_place(file: str, lines: list[str], run: Run) -> None:
    result = run("check", file)
    assert (result.code, result.out) == (1, "")
    assert all(line in result.err for line in lines)


@pytest.mark.parametrize("file", ["malformed.csv", "malformed.json", "bytes.csv", "empty.csv"])
def test_a_malformed_file_in_json_is_not_valid_and_says_why(file: str, run: Run) -> None:
    result = run("check", file, "--json")
    assert (result.code, result.err) == (1, "")
    assert set(result.json) == {"file", "valid", "unreadable", "violations"}
    assert result.json["valid"] is False
    assert result.json["unreadable"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["missing.csv"], "missing.csv: No such file or directory"),
        (["missing.csv", "--json"], "missing.csv: No such file or directory"),
        (["folder.csv"], "folder.csv: Is a directory"),
        (
            ["valid.csv", "--send-model", "pigeons"],
            "--send-model is one of buffered, edge-streams, pair-streams",
        ),
        (["1f1b"], "1f1b needs --ranks and --microbatches"),
        (["notes.txt"], "use .csv or .json"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], expected: str, run: Run) -> None:
    result = run("check", *arguments)
    assert (result.code, result.out) == (2, "")
    assert expected in result.message
