"""Promise: a plausible mistake on the command line is one line with the right exit code, and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock.cli
from tests.support.command_line import Run
from tests.support.model_configs import gpt_keys

LLAMA = "llama-3-8b"


@pytest.fixture
def files(tmp_path: Path) -> None:
    """Files of a user who makes mistakes; the test runs in their directory."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(gpt_keys(64, 2, 2)))
    (tmp_path / "mine").write_text("0F0,0B0\n")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "relative.toml").write_text('time_unit = "units"\n')
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "costs.json").write_text('{"forward_seconds": 1}')
    (tmp_path / "layers.json").write_text('{"layers": []}')
    (tmp_path / "binary.json").write_bytes(bytes(range(200, 256)))
    (tmp_path / "few.json").write_text('{"model_type": "llama"}')


MISTAKES: list[tuple[str, int, str]] = [
    # what is read
    ("show folder", 2, "folder: it is a directory; give a .csv or .json file"),
    ("show folder/", 2, "folder: it is a directory; give a .csv or .json file"),
    ("check mine", 2, "mine: unknown file extension (none); use .csv or .json"),
    ("check empty.json", 1, "empty.json: invalid JSON: the file is empty"),
    ("check other.json", 1, "other.json: not a schedule: it has none of the keys format, version, "),
    ("check costs.json", 1, "costs.json: not a schedule: it is costs of stages, which --costs takes"),
    (
        "check model/config.json",
        1,
        "a model's config.json, which penstock estimate (--output writes costs) and",
    ),
    (
        "check layers.json",
        1,
        "costs of layers, which penstock plan reads (--write writes a schedule and costs)",
    ),
    ("check binary.json", 1, "binary.json: not a text file: byte 0 is not valid UTF-8"),
    (
        "estimate model",
        2,
        "model: it is a directory; give a .json or .toml file; did you mean model/config.json?",
    ),
    ("estimate empty.json", 2, "empty.json: invalid JSON: the file is empty"),
    (f"estimate {LLAMA} --fit empty.toml", 2, "empty.toml: it has no costs; give keys such as forw"),
    (
        f"estimate {LLAMA} --fit relative.toml",
        2,
        "--fit takes measured seconds, and the costs of relative.toml are rel",
    ),
    (
        "search -p 2 -m 2 --costs empty.toml",
        2,
        "empty.toml: it has no costs; give keys such as forw",
    ),
    ("diagnose nowhere", 2, "nowhere: no such directory"),
    ("diagnose mine", 2, "mine: not a directory"),
    ("read-trace empty.json", 1, "empty.json: the file is empty"),
    (
        "read-trace mine",
        2,
        "mine is not JSON, so it is read as a log of Megatron-LM: give its --ranks and --micr",
    ),
    # what is written
    (
        "show 1f1b -p 2 -m 2 -o nowhere/x.csv",
        2,
        "nowhere/x.csv: the directory nowhere does not exist or is not ",
    ),
    ("trace 1f1b -p 2 -m 2 -o x.pdf", 2, "x.pdf does not end in .json"),
    (
        "compare 1f1b -p 2 -m 2 -o nowhere/x.svg",
        2,
        "nowhere/x.svg: the directory nowhere does not exist or is ",
    ),
    ("search -p 2 -m 2 -o mine/x.csv", 2, "mine/x.csv: the directory mine does not exist or is not writable"),
    (
        f"estimate {LLAMA} -o nowhere/x.toml",
        2,
        "nowhere/x.toml: the directory nowhere does not exist or is not ",
    ),
    (
        f"plan {LLAMA} --devices 8 --batch 8 -o nowhere/x.svg",
        2,
        "nowhere/x.svg: the directory nowhere does not",
    ),
    (f"plan {LLAMA} --devices 8 --batch 8 --write mine", 2, "mine is a file; give a directory"),
    ("export megatron 1f1b -p 2 -m 2 --layers 2 -o mine", 2, "mine is a file; give a directory"),
    # numbers
    (f"estimate {LLAMA} --seq 99999999999999999", 2, "--seq must be at most 1e9 (given 99999999999999999)"),
    (
        f"estimate {LLAMA} --tp 999999999",
        2,
        "--tp 999999999 does not divide 32 (attention heads of llama-3-8b): ",
    ),
    (f"plan {LLAMA} --devices 99999999999 --batch 8", 2, "--devices must be at most 1e9 (given 99999999999)"),
    (f"plan {LLAMA} --devices 999999937 --batch 8", 2, "the next that works is --batch 999999937"),
    (f"plan {LLAMA} --devices 8 --batch 8 --memory 0", 2, "--memory must be more than 0 (given 0)"),
    (f"plan {LLAMA} --devices 8 --batch 8 --seconds -1", 2, "--seconds must be 0 or more (given -1)"),
    (f"plan {LLAMA} --devices 8 --batch 8 --seed -1", 2, "--seed must be an integer of at least 0 (given -1)"),
    (f"plan {LLAMA} --devices 8 --batch -8", 2, "--batch must be an integer above 0 (given -8)"),
    (
        "show 1f1b -p 99999 -m 99999",
        2,
        "stages times microbatches must be at most 16777216 (given 99999 ranks, 1 st",
    ),
    (
        "show 1f1b -p 3 -m 8 --graph 0>99999999",
        2,
        "--graph: 1 edge cannot connect stages 0 to 99999999; stage num",
    ),
    # names and options
    (
        "compare",
        2,
        "give --ranks and --microbatches to compare all families, e.g. penstock compare --ranks 4 --micr",
    ),
    ("show interleave-zb -p 4 -m 8", 2, "did you mean interleaved-1f1b?"),
    ("show zero-bubble -p 4 -m 8", 2, "did you mean interleaved-zero-bubble?"),
    ("show ZBVZeroBuble -p 4 -m 8", 2, "did you mean ZBVZeroBubble?"),
    ("show interleaved-1f1b -p 4 -m 8 --group 3", 2, "--group of interleaved-1f1b must be from 4 to 8"),
    ("show 1f1b -p 4 -m 8 --group 4", 2, "1f1b has no --group (given 4): remove it, or use interleaved-1f1b"),
    (
        "search -p 4 -m 8 --offload",
        2,
        "--recompute and --offload need --memory: without a limit nothing needs them",
    ),
    ("doctor -p 4", 2, "only with --distributed: --ranks"),
    (
        "play --no-open --origin schedules.example.com",
        2,
        "--origin is the address of a proxy, e.g. https://schedules.",
    ),
    (f"plan {LLAMA} --devices 8 --batch 8 --schedules 1f1b,zvb,", 2, "(given zvb); did you mean zbv?"),
]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("command", "code", "message"), MISTAKES, ids=[each[0] for each in MISTAKES])
def test_a_mistake_is_one_line(run: Run, tmp_path: Path, command: str, code: int, message: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = run(*command.split())
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("penstock: ")
    assert result.err.count("\n") == 1
    assert message in result.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("files")
def test_a_missing_key_is_named_once(run: Run) -> None:
    lines = run("estimate", "few.json").err.splitlines()
    assert len(lines) == len(set(lines))
    assert any("missing hidden_size" in line for line in lines)


def test_a_family_is_not_hidden_by_a_directory_of_its_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "zbv").mkdir()
    assert run("show", "zbv", "-p", 2, "-m", 2).code == 0


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "there is not enough memory on this machine: use fewer ranks or microbatches"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(13, "Permission denied", "x.csv"), "x.csv: Permission denied"),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> Callable[..., None]:
        raise error

    monkeypatch.setattr(penstock.cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        penstock.cli.main()
    assert (caught.value.code, capsys.readouterr().err) == (2, f"penstock: {message}\n")
