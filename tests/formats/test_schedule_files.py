"""Promises of the formats: what is written is read back, and what cannot be read is told in its place."""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Placement, Schedule
from penstock.errors import FormatError
from penstock.formats import dumps, read, reads

GOLDENS = Path(__file__).parents[1] / "goldens"
SMALL = Schedule.parse("0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1", name="small")
SMALL_CSV = "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n"
DOCUMENT: dict[str, Any] = {
    "format": "penstock-schedule",
    "version": 1,
    "name": "small",
    "microbatches": 2,
    "level": "compute",
    "stage_to_rank": [0, 1],
    "ranks": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
}


def faults_of(text: str, file_format: str) -> list[str]:
    """Why this text is refused."""
    with pytest.raises(FormatError) as caught:
        reads(text, file_format)
    return list(caught.value.faults)


def document(**changes: object) -> str:
    return json.dumps({**DOCUMENT, **changes})


# --- round trips -----------------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", ["csv", "json"])
@pytest.mark.parametrize("family", penstock.families())
def test_every_family_is_read_back_as_it_was_written(family: str, file_format: str, tmp_path: Path) -> None:
    built = penstock.build(family, ranks=3, microbatches=4)
    for schedule in (built, penstock.lower(built)):
        path = tmp_path / f"{family}.{file_format}"
        schedule.write(path)
        again = penstock.read(path)
        assert again == schedule
        assert again.name == family


def test_json_keeps_what_csv_has_to_infer() -> None:
    schedule = Schedule([["0F0"], [], ["9UNSHARD"]], Placement((0, 1, 2, 1)), 5, 'a "name" · with signs\n')
    again = reads(dumps(schedule, "json"), "json")
    assert again == schedule
    assert again.name == schedule.name


def test_what_csv_cannot_hold_is_not_read_back_as_something_else() -> None:
    schedule = Schedule([["0F0", "0B0"], []], Placement((0, 1)), 1)
    with suppress(FormatError):
        assert reads(dumps(schedule, "csv"), "csv") == schedule


def test_the_name_of_a_csv_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my.schedule.CSV"
    SMALL.write(str(path))
    assert read(path).name == "my.schedule"


GOLDEN = ["1f1b_2x2", "1f1b_2x2_lowered", "zbv_2x3", "dualpipev_2x4"]


@pytest.mark.parametrize("file", [f"{name}.csv" for name in GOLDEN] + [f"{name}.json" for name in GOLDEN[:2]])
def test_files_written_yesterday_are_read_and_written_the_same_today(file: str) -> None:
    name, file_format = file.split(".")
    family, numbers, *lowered = name.split("_")
    ranks, microbatches = map(int, numbers.split("x"))
    schedule = penstock.build(family, ranks=ranks, microbatches=microbatches)
    schedule = penstock.lower(schedule) if lowered else schedule
    text = (GOLDENS / file).read_bytes().decode()
    assert reads(text, file_format) == schedule
    assert dumps(schedule, file_format) == text


# --- CSV as torch writes it ------------------------------------------------------------------------


def test_a_file_of_torch_with_idle_cells_is_read() -> None:
    schedule = read(GOLDENS / "torch_interleaved-1f1b_2x4.csv")  # by torch 2.13.0
    assert schedule == penstock.build("interleaved-1f1b", ranks=2, microbatches=4, stages_per_rank=2)


def test_csv_has_a_row_per_rank_a_cell_per_step_and_ends_lines_as_torch_does() -> None:
    assert dumps(SMALL, "csv") == SMALL_CSV


@pytest.mark.parametrize(
    "text",
    [
        SMALL_CSV.replace("\r\n", "\n"),
        SMALL_CSV.replace("\r\n", "\r"),
        SMALL_CSV.rstrip(),
        SMALL_CSV + "\r\n,,\r\n \r\n",
        SMALL_CSV.replace(",", " , "),
        SMALL_CSV.replace(",", ",,"),
        "," + SMALL_CSV.replace("\r\n", ",,,\r\n", 1),
        re.sub(r"(\w+)", r'"\1"', SMALL_CSV),
    ],
    ids=["lf", "cr", "no end", "blank end", "blanks", "idle", "idle ends", "quoted"],
)
def test_line_ends_idle_cells_blanks_and_quotes_make_no_difference(text: str) -> None:
    assert reads(text, "csv") == SMALL


def test_every_fault_of_a_csv_is_told_at_once_with_row_and_column() -> None:
    faults = faults_of("0F0,junk,0B0\n,1F,1B0\n\n(3F0;3B0)F\n", "csv")
    assert [fault.split(":")[0] for fault in faults] == [
        "row 1, column 2",
        "row 2, column 2",
        "row 4, column 1",
        "row 3",
    ]
    assert "'1F' is not an action: F needs a microbatch number" in faults[1]
    assert faults[3] == "row 3: a rank needs at least one step"


@pytest.mark.parametrize("blank", ["", ",,", " ", " , "])
def test_a_blank_row_between_others_is_refused_with_its_number(blank: str) -> None:
    assert faults_of(f"0F0\n{blank}\n1F0\n", "csv") == ["row 2: a rank needs at least one step"]


@pytest.mark.parametrize("text", ["", "\n", "\r\n\r\n", ",,,\n", " \n , \n"], ids=repr)
def test_an_empty_csv_is_refused(text: str) -> None:
    assert faults_of(text, "csv") == ["it is empty: a schedule has one row per rank"]


@pytest.mark.parametrize(
    "row", ['"1F0', '"1F0"x', '1F0,"'], ids=["never closed", "text after it", "opened at the end"]
)
def test_garbage_in_quotes_is_refused_with_its_row(row: str) -> None:
    (fault,) = faults_of(f"0F0\n{row}\n", "csv")
    assert "not CSV" in fault
    assert "row 2" in fault


@pytest.mark.parametrize(
    "cell", ["0F0;0B0", "0F0\t0B0", "rank 0", "0F0\x00", "0F\u0660", '"0F0\n0B0"', '"a,""b"', "\ud800"]
)
def test_a_cell_that_is_no_action_is_refused_in_its_place(cell: str) -> None:
    (fault,) = faults_of(f"0F0,{cell}\n", "csv")
    assert fault.startswith("row 1, column 2: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("60000000F0\n", "names stage 60000000, but"),
        ("0F60000000\n", "names microbatch 60000000, but"),
        ("0F0\n0B0\n", "rank 1: it has no stage of its own"),
        ("0F0" * 100_000, "not CSV"),
    ],
)
def test_a_csv_that_no_schedule_can_be_inferred_from_is_refused(text: str, says: str) -> None:
    (fault,) = faults_of(text, "csv")
    assert says in fault


# --- JSON ------------------------------------------------------------------------------------------


def test_json_has_the_documented_keys_and_a_line_per_rank() -> None:
    text = dumps(SMALL, "json")
    assert json.loads(text) == DOCUMENT
    assert len(text.splitlines()) == SMALL.num_ranks + 2


@pytest.mark.parametrize("key", DOCUMENT)
def test_a_missing_key_is_named(key: str) -> None:
    without = {k: v for k, v in DOCUMENT.items() if k != key}
    (fault,) = faults_of(json.dumps(without), "json")
    assert fault.startswith(f"{key}: missing; it must be ")


WRONG: list[tuple[str, object]] = [
    ("format", "penstock"),
    ("format", ["penstock-schedule"]),
    ("version", 2),
    ("version", True),
    ("version", 1.0),
    ("version", "1"),
    ("name", None),
    ("name", 1),
    ("microbatches", True),
    ("microbatches", 2.0),
    ("microbatches", "2"),
    ("microbatches", 0),
    ("microbatches", -1),
    ("microbatches", None),
    ("microbatches", float("nan")),
    ("level", "compiled"),
    ("level", []),
    ("level", {}),
    ("stage_to_rank", None),
    ("stage_to_rank", {"0": 0}),
    ("stage_to_rank", "01"),
    ("stage_to_rank", [False, True]),
    ("stage_to_rank", [0, 1.0]),
    ("stage_to_rank", [0, None]),
    ("stage_to_rank", [0, [1]]),
    ("ranks", None),
    ("ranks", "0F0"),
    ("ranks", {"0": ["0F0"]}),
    ("ranks", ["0F0", "1F0"]),
    ("ranks", [["0F0"], [1]]),
    ("ranks", [["0F0"], [None]]),
    ("ranks", [["0F0"], [["1F0"]]]),
    ("ranks", [["0F0"], [""]]),
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=[f"{key}={value!r}" for key, value in WRONG])
def test_a_value_of_the_wrong_form_is_named_with_what_it_must_be(key: str, value: object) -> None:
    (fault,) = faults_of(document(**{key: value}), "json")
    assert fault.startswith(f"{key}: it must be ")


def test_every_fault_of_the_keys_is_told_at_once() -> None:
    changed = {**DOCUMENT, "version": 3, "comment": "hello", "level": 0}
    del changed["name"]
    faults = faults_of(json.dumps(changed), "json")
    assert {fault.split(":")[0] for fault in faults} == {"version", "comment", "level", "name"}


def test_every_action_that_is_wrong_is_told_at_once_with_its_place() -> None:
    faults = faults_of(document(ranks=[["0F0", "zz"], ["1F0", "1B0x", " "]]), "json")
    assert [fault.split(":")[0] for fault in faults] == ["ranks[0][1]", "ranks[1][1]", "ranks[1][2]"]


def test_faults_of_keys_and_actions_are_told_at_once() -> None:
    faults = faults_of(document(version=3, ranks=[["0F0", "zz"], ["1F0"]]), "json")
    assert [fault.split(":")[0] for fault in faults] == ["version", "ranks[0][1]"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stage_to_rank", []),
        ("stage_to_rank", [-1, 0]),
        ("stage_to_rank", [0, 2]),
        ("stage_to_rank", [0, 10**12]),
        ("microbatches", 10**12),
        ("ranks", []),
        ("ranks", [["0F0"]]),
    ],
    ids=repr,
)
def test_numbers_that_do_not_go_together_are_refused_under_a_key(key: str, value: object) -> None:
    (fault,) = faults_of(document(**{key: value}), "json")
    assert re.match(r"(stage_to_rank|microbatches|ranks)(\[\d+\])?: ", fault)


def test_a_level_that_does_not_agree_with_the_steps_is_refused() -> None:
    assert faults_of(document(level="lowered"), "json") == [
        "level: it says 'lowered', but the steps are 'compute'"
    ]


@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", '{"a": 1,}', "0F0,0B0", '{"a": 1} {}', "\ufeff{}"])
def test_what_is_not_json_is_refused_with_line_and_column(text: str) -> None:
    (fault,) = faults_of(text, "json")
    assert re.match(r"line 1, column \d+: it is not JSON: ", fault)


@pytest.mark.parametrize("text", ["[]", "null", "1", "true", '"0F0"'])
def test_json_that_is_no_object_is_refused_with_the_keys_it_needs(text: str) -> None:
    (fault,) = faults_of(text, "json")
    assert "not an object with format, version, name" in fault
    assert "NoneType" not in fault


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000])
def test_brackets_within_brackets_are_refused(text: str) -> None:
    (fault,) = faults_of(text, "json")
    assert "JSON" in fault


@pytest.mark.parametrize("digits", [30, 4000, 100_000])
@pytest.mark.parametrize("key", ["version", "microbatches", "stage_to_rank"])
def test_giant_numbers_are_refused_in_a_short_message(key: str, digits: int) -> None:
    giant = "9" * digits
    text = document(**{key: None}).replace("null", f"[0, {giant}]" if key == "stage_to_rank" else giant)
    (fault,) = faults_of(text, "json")
    assert len(fault) < 500


def test_a_key_that_stands_twice_is_refused() -> None:
    (fault,) = faults_of('{"microbatches": 3, ' + document()[1:], "json")
    assert "microbatches" in fault


@pytest.mark.parametrize("key", ["a\nb", "\x1b[2J", "", "k" * 100_000])
def test_an_unknown_key_is_told_in_one_short_line_of_plain_text(key: str) -> None:
    (fault,) = faults_of(document(**{key: 1}), "json")
    assert fault.isprintable()
    assert len(fault) < 500


# --- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mine.txt", "mine", "mine.csv.bak", ".csv", "csv"])
def test_another_ending_is_refused_before_anything_is_opened(name: str, tmp_path: Path) -> None:
    for attempt in (lambda: read(tmp_path / name), lambda: SMALL.write(tmp_path / name)):
        with pytest.raises(FormatError, match=r"it is \.csv or \.json"):
            attempt()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file_format", ["xml", "CSV", ".csv", ""])
def test_another_format_is_refused(file_format: str) -> None:
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
def test_bytes_that_are_not_utf8_are_refused_with_their_place(file_format: str, tmp_path: Path) -> None:
    path = tmp_path / f"mine.{file_format}"
    path.write_bytes(b"0F0,\xff\n")
    with pytest.raises(FormatError, match="byte 4 is not UTF-8 text"):
        read(path)


def test_every_line_of_the_message_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("a,b\n")
    with pytest.raises(FormatError) as caught:
        read(path)
    assert all(line.startswith(f"{path}: row 1, column ") for line in str(caught.value).splitlines())


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.csv")
    with pytest.raises(FileNotFoundError):
        SMALL.write(tmp_path / "none" / "mine.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(IsADirectoryError):
        SMALL.write(tmp_path / "folder.csv")


# --- nothing is ever evaluated ---------------------------------------------------------------------


@pytest.mark.parametrize("file_format", ["csv", "json"])
def test_code_in_a_file_is_not_run(file_format: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    code = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    text = code if file_format == "csv" else document(ranks=[[code], ["1F0"]], name=code)
    assert "is not an action" in faults_of(text, file_format)[0]
    assert not trace.exists()


def test_no_module_calls_anything_that_evaluates() -> None:
    forbidden = {"eval", "exec", "literal_eval", "pickle", "yaml", "marshal", "shelve"}
    source = Path(penstock.__file__).parent
    allowed = {
        source / "runtime" / "transport" / "values.py",  # between ranks of one job: they run each other's code
        source / "runtime" / "checkpoints" / "files.py",  # an unpickler that knows nothing but such lists
    }
    for path in set(source.rglob("*.py")) - allowed:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert not names & forbidden, path
