"""Promises of schedule files: what is written is read back, and the file extension selects the format."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import penstock
from penstock.errors import FormatError
from penstock.formats import dumps, read, reads
from tests.support.schedule_files import GOLDENS, SMALL, SMALL_CSV, document, problems_of


@pytest.mark.parametrize("file_format", ["csv", "json"])
@pytest.mark.parametrize("family", penstock.families())
def test_every_family_survives_a_round_trip(family: str, file_format: str, tmp_path: Path) -> None:
    built = penstock.build(family, ranks=3, microbatches=4)
    for schedule in (built, penstock.lower(built)):
        path = tmp_path / f"{family}.{file_format}"
        schedule.write(path)
        again = penstock.read(path)
        assert again == schedule
        assert again.name == family


GOLDEN = ["1f1b_2x2", "1f1b_2x2_lowered", "zbv_2x3", "dualpipev_2x4"]


@pytest.mark.parametrize("file", [f"{name}.csv" for name in GOLDEN] + [f"{name}.json" for name in GOLDEN[:2]])
def test_files_of_earlier_versions_are_read_and_written_unchanged(file: str) -> None:
    name, file_format = file.split(".")
    family, numbers, *lowered = name.split("_")
    ranks, microbatches = map(int, numbers.split("x"))
    schedule = penstock.build(family, ranks=ranks, microbatches=microbatches)
    schedule = penstock.lower(schedule) if lowered else schedule
    text = (GOLDENS / file).read_bytes().decode()
    assert reads(text, file_format) == schedule
    assert dumps(schedule, file_format) == text


# --- files and formats ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mine.txt", "mine", "mine.csv.bak", ".csv", "csv"])
def test_an_unknown_file_extension_is_rejected_before_a_file_is_opened(name: str, tmp_path: Path) -> None:
    for attempt in (lambda: read(tmp_path / name), lambda: SMALL.write(tmp_path / name)):
        with pytest.raises(FormatError, match=r"use \.csv or \.json"):
            attempt()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file_format", ["xml", "CSV", ".csv", ""])
def test_an_unknown_format_is_rejected(file_format: str) -> None:
    with pytest.raises(ValueError, match="csv"):
        dumps(SMALL, file_format)
    with pytest.raises(ValueError, match="csv"):
        reads(SMALL_CSV, file_format)


@pytest.mark.parametrize("file_format", ["csv", "json"])
def test_a_byte_order_mark_is_skipped(file_format: str, tmp_path: Path) -> None:
    path = tmp_path / f"mine.{file_format}"
    path.write_bytes(b"\xef\xbb\xbf" + dumps(SMALL, file_format).encode())
    assert read(path) == SMALL


@pytest.mark.parametrize("file_format", ["csv", "json"])
def test_bytes_that_are_not_utf8_are_rejected_with_their_position(file_format: str, tmp_path: Path) -> None:
    path = tmp_path / f"mine.{file_format}"
    path.write_bytes(b"0F0,\xff\n")
    with pytest.raises(FormatError, match="byte 4 is not valid UTF-8"):
        read(path)


def test_every_line_of_the_message_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("a,b\n")
    with pytest.raises(FormatError) as caught:
        read(path)
    assert all(line.startswith(f"{path}: row 1, column ") for line in str(caught.value).splitlines())


def test_a_missing_file_raises_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.csv")
    with pytest.raises(FileNotFoundError):
        SMALL.write(tmp_path / "none" / "mine.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(IsADirectoryError):
        SMALL.write(tmp_path / "folder.csv")


# --- files are parsed, not evaluated ------------------------------------------------------------------


@pytest.mark.parametrize("file_format", ["csv", "json"])
def test_code_in_a_file_is_not_executed(file_format: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    code = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    text = code if file_format == "csv" else document(ranks=[[code], ["1F0"]], name=code)
    assert "is not an action" in problems_of(text, file_format)[0]
    assert not trace.exists()


def test_no_module_uses_eval_pickle_or_yaml() -> None:
    forbidden = {"eval", "exec", "literal_eval", "pickle", "yaml", "marshal", "shelve"}
    source = Path(penstock.__file__).parent
    allowed = {
        source / "runtime" / "transport" / "message_spec.py",  # between ranks of one job
        source / "runtime" / "checkpoints" / "collective.py",  # the same
        source / "traces" / "diagnose" / "flight_recorder.py",  # reads plain values only
    }
    for path in set(source.rglob("*.py")) - allowed:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert not names & forbidden, path
