"""Traces that are dropped onto the page: the measured step over the predicted one, and the costs it gives."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

from penstock.arguments import printable
from penstock.errors import FormatError
from penstock.ir.kinds import Kind
from penstock.records import order_of, run_record
from penstock.traces.read_trace import read_trace
from penstock.view.html import page_data
from penstock.web.answers import steps_of
from penstock.web.request import SOURCE, expect

_MAX_FILES = 64


class _NamedBytes(BytesIO):
    """An uploaded file."""

    def __init__(self, name: str, content: bytes) -> None:
        super().__init__(content)
        self.name = name


def measured(document: object) -> dict[str, Any]:
    """The record of `penstock read-trace --json --search 0`, and both timelines to draw."""
    given = expect(document, {"files": (list,), "step": (int,)}, ["files"])
    run = read_trace(_files(given["files"]), step=given.get("step"))
    shown = (("measured", run.timeline), ("predicted", run.predicted))
    named = [replace(timeline, schedule=timeline.schedule.renamed(name)) for name, timeline in shown]
    compute = run.schedule.only(kind for kind in Kind if kind.is_compute)
    return run_record(run, None) | {
        "data": page_data(named),
        "order_text": str(order_of(run.schedule)),
        "predicted_makespan": run.predicted.makespan,
        "stage_to_rank": compute.placement.stage_to_rank,
        "schedule": steps_of(compute),
    }


def _files(entries: Sequence[Any]) -> list[_NamedBytes]:
    """The uploaded files: names, and contents in base64."""
    if not 1 <= len(entries) <= _MAX_FILES:
        raise FormatError(SOURCE, [f"files: from 1 to {_MAX_FILES} (given {len(entries)})"])
    found = []
    for entry in entries:
        given = expect(entry, {"name": (str,), "base64": (str,)}, ["name", "base64"])
        try:
            content = b64decode(given["base64"], validate=True)
        except (Base64Error, ValueError):
            raise FormatError(SOURCE, [f"{printable(given['name'])}: the content is not base64"]) from None
        found.append(_NamedBytes(printable(given["name"]), content))
    return found
