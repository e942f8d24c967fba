"""Tracebacks of failures: without the frames of Penstock that lead to the user's code, or follow it."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import torch

from penstock.errors import PenstockError

_PENSTOCK = str(Path(__file__).parents[2]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def _is_own_file(name: str) -> bool:
    """Whether a file of code is Penstock's."""
    return name.startswith(_PENSTOCK)


def from_users_code(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is not Penstock's; all of it if there is none."""
    first = frames
    while first is not None and _is_own_file(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first or frames


def only_users_code(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the user's code to the last; all of it if there is none."""
    entries, each = [], frames
    while each is not None:
        entries.append(each)
        each = each.tb_next
    of_user = [i for i, frame in enumerate(traceback.extract_tb(frames)) if _is_users_frame(frame)]
    if not of_user:
        return frames
    last: TracebackType | None = None
    for entry in reversed(entries[of_user[0] : of_user[-1] + 1]):
        last = TracebackType(last, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return last


def users_line(frames: TracebackType | None) -> str:
    """File and line of the user's program that made the call; empty if there is none."""
    of_user = [frame for frame in traceback.extract_tb(frames) if _is_users_frame(frame)]
    return f"{of_user[-1].filename}, line {of_user[-1].lineno}" if of_user else ""


def traceback_of(error: BaseException) -> str:
    """The text of the traceback; empty for an error that Penstock itself found, whose message is complete."""
    frames = error.__traceback__
    if any(map(_is_users_frame, traceback.extract_tb(frames))):  # else the frames of Penstock tell where it was
        frames = from_users_code(frames)
    elif isinstance(error, PenstockError):
        return ""
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # noqa: BLE001 -- __str__ of an exception may raise anything
        return "".join(traceback.format_tb(error.__traceback__))


def _is_users_frame(frame: traceback.FrameSummary) -> bool:
    """Whether the code of a frame is neither Penstock's nor torch's nor of the standard library."""
    if frame.filename.startswith(_STANDARD):
        return "site-packages" in frame.filename
    return not _is_own_file(frame.filename) and not frame.filename.startswith((_TORCH, "<"))
