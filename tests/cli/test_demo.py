"""Tests of `penstock demo`: it trains, compares, predicts, searches and runs, and writes only its two files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.cli.demo import measured_gain
from tests.support.command_line import Run


@pytest.mark.full
def test_it_prints_every_part_and_writes_its_report(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in (
        ("_COMPARED", 2),
        ("_TRAINED", 1),
        ("_PROFILED", 1),
        ("_MEASURED", 2),
        ("_SEARCH_SECONDS", 1.0),
    ):
        monkeypatch.setattr(f"penstock.cli.demo.{name}", number)
    result = run("demo", "-p", 2, "-o", "out.html")
    assert (result.code, result.err) == (0, "")  # no progress in a pipe
    assert "of the first 2 steps match those of one process" in result.out
    kinds = re.findall(r"^(1f1b|found) +(F|I|W|B|step) +[\d.]+ +[\d.]+ +[+-][\d.]+%$", result.out, re.MULTILINE)
    assert [kind for schedule, kind in kinds if schedule == "1f1b"] == ["F", "B", "step"]
    rows = re.findall(r"^(1f1b|found) +([\d.]+) ms +[\d.]+ ms +[\d.]+% +(\d)$", result.out, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["1f1b", "found"]
    assert {live for _, _, live in rows} == {"2"}
    page = (tmp_path / "out.html").read_text()
    for schedule in ("1f1b", "found"):
        for what in ("predicted", "measured"):
            assert f'"name":"{schedule}, {what}"' in page
    peaks = {float(peak) for peak in re.findall(r'"peak":([\d.]+)', page)}
    assert max(peaks) == 2  # activations, not bytes of messages
    headline, reason = result.out.splitlines()[-2:]
    assert "1f1b" in headline
    assert re.search(r"with 2 steps of each, up to [\d.]+% is chance", reason)
    for part in (
        headline,
        "match those of one process",
        "usable cores; ",
        "<polyline points=",
        "peak live activations",
    ):
        assert part in page
    log = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(1, 1 + 2 + 2 + 1 + 4))
    assert log[-1]["loss"] < log[0]["loss"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.jsonl"]


@pytest.mark.parametrize(
    ("found", "headline", "reason"),
    [
        (
            [90, 91, 89, 90],
            "trains 10.0% faster than 1f1b, with the same",
            "10.0% faster per step, which is more than",
        ),
        (
            [80, 120, 70, 118],
            "are equally fast, as far as this run can tell",
            "3.0% faster per step, which is within",
        ),
        (
            [110, 111, 109, 110],
            "10.0% slower than 1f1b, with the same memory and the same results. Keep 1f1b",
            "slower",
        ),
    ],
)
def test_the_verdict_compares_the_gain_with_the_noise(found: list[float], headline: str, reason: str) -> None:
    gain = measured_gain([100, 101, 99, 100], found, 0.08, same_order=False)
    assert headline in gain.headline
    assert reason in gain.reason
    assert "The simulator predicted 8.0% faster." in gain.reason
    assert ("Other programs seem to use this machine" in gain.reason) == (gain.noise > 0.1)


def test_the_noise_is_the_interval_of_students_t_over_pairs_of_steps() -> None:
    first, found = [100.0] * 10, [90.0 + number for number in range(10)]
    noise = measured_gain(first, found, 0.1, same_order=False).noise
    assert noise == pytest.approx(2.262 * 3.02765 / 10**0.5 / 100, rel=3e-3)
    together = [first[number] + 50 * number for number in range(10)]  # the load grows for both
    assert measured_gain(together, [each - 5 for each in together], 0.1, same_order=False).noise < 1e-12


def test_a_single_step_or_the_same_order_claims_no_gain() -> None:
    assert "equally fast" in measured_gain([100], [50], 0.5, same_order=False).headline
    same = measured_gain([100, 99], [50, 50], 0.0, same_order=True)
    assert same.headline.startswith("1f1b is already the best schedule")


def test_a_report_that_is_not_html_is_a_usage_error(run: Run) -> None:
    result = run("demo", "-o", "out.txt")
    assert (result.code, result.out) == (2, "")
    assert "out.txt does not end in .html" in result.message
    result = run("demo", "-o", "nowhere/out.html")
    assert (result.code, result.out) == (2, "")
    assert "nowhere/out.html: the directory nowhere does not exist or is not writable" in result.message


@pytest.mark.full  # tests/runtime/test_local_ranks.py makes the promise for all local ranks
def test_ctrl_c_ends_it_and_all_its_processes_without_a_traceback(tmp_path: Path) -> None:
    code = "from penstock.cli import command; command()"
    started = subprocess.Popen(  # noqa: S603 -- our own command
        [sys.executable, "-c", code, "demo", "-p", "2"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert started.stdout is not None
    started.stdout.readline()
    time.sleep(3)  # in the midst of it
    os.killpg(started.pid, signal.SIGINT)
    _, said = started.communicate(timeout=300)
    assert (started.returncode, said) == (130, "")
    end = time.monotonic() + 300
    while _members(started.pid):
        assert time.monotonic() < end
        time.sleep(0.1)


def _members(group: int) -> bool:
    """Whether any process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
