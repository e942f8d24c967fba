"""Promise: files are written atomically, and no other file is changed."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.errors import FormatError
from penstock.formats import read, reads, write
from tests.support.command_line import run_process
from tests.support.schedule_files import SMALL, SMALL_CSV, document


def disk_full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "calls", [["os.fsync"], ["os.replace", "pathlib.Path.replace"]], ids=["while writing", "while replacing"]
)
@pytest.mark.parametrize("old", [None, "old content"])
def test_a_failed_write_leaves_the_directory_unchanged(
    calls: list[str], old: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.csv"
    if old is not None:
        path.write_text(old)
    with monkeypatch.context() as broken:
        for call in calls:
            broken.setattr(call, disk_full)
        with pytest.raises(OSError, match="No space left"):
            write(SMALL, path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == (
        [] if old is None else [("mine.csv", old)]
    )


def test_an_interrupted_write_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(SMALL, tmp_path / "mine.csv")
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("old " * 1000)
    write(SMALL, path)
    assert path.read_bytes().decode() == SMALL_CSV
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_mode_of_a_new_file_follows_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write(SMALL, tmp_path / "mine.csv")
    finally:
        os.umask(before)
    assert (tmp_path / "mine.csv").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_is_followed_and_kept(exists: bool, tmp_path: Path) -> None:  # noqa: FBT001
    target, link = tmp_path / "folder" / "target.csv", tmp_path / "link.csv"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
    link.symlink_to(target)
    write(SMALL, link)
    assert link.is_symlink()
    assert read(target) == SMALL
    assert list(target.parent.iterdir()) == [target]


def test_a_named_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(SMALL, pipe)
        assert os.read(reader, 1000).decode() == SMALL_CSV
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_temporary_file_left_by_a_crash_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / f".mine.csv.{os.getpid()}.tmp").write_text("half of it")
    write(SMALL, tmp_path / "mine.csv")
    assert read(tmp_path / "mine.csv") == SMALL


def test_threads_can_write_one_file_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_open = threading.Barrier(2)
    monkeypatch.setattr("os.fsync", lambda _: wait_at(both_open))
    failures: list[BaseException] = []

    def write_small() -> None:
        try:
            write(SMALL, tmp_path / "mine.csv")
        except OSError as error:
            failures.append(error)
            both_open.abort()

    threads = [threading.Thread(target=write_small) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert read(tmp_path / "mine.csv") == SMALL


def wait_at(barrier: threading.Barrier) -> None:
    with suppress(threading.BrokenBarrierError):
        barrier.wait(timeout=1)


def test_a_file_name_of_maximum_length_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("a" * (os.pathconf(tmp_path, "PC_NAME_MAX") - 4) + ".csv")
    write(SMALL, path)
    assert read(path) == SMALL


@pytest.mark.parametrize("file_format", ["csv", "json"])
def test_what_was_read_can_be_written(file_format: str, tmp_path: Path) -> None:
    path = tmp_path / f"mine.{file_format}"
    try:
        schedule = reads(document(name="\ud800"), "json")
    except FormatError:
        return
    schedule.write(path)
    assert read(path) == schedule


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1"])
def test_what_is_written_to_a_redirected_stream_is_appended(name: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        file.write("before\n")
        file.flush()
        done = run_process(
            "show", "1f1b", "-p2", "-m1", "-f", "csv", "-o", name, cwd=tmp_path, stdout=file.fileno()
        )
    assert (done.code, done.err) == (0, "")
    assert log.read_text().splitlines()[:3] == ["before", "0F0,0B0", "1F0,1B0"]
    piped = run_process("show", "1f1b", "-p2", "-m1", "-f", "csv", "-o", name, cwd=tmp_path)
    assert (piped.code, piped.out.splitlines()[:2]) == (0, ["0F0,0B0", "1F0,1B0"])
