"""A small schedule in both file formats, and the problems that a text is rejected for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import Schedule
from penstock.errors import FormatError
from penstock.formats import reads

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


def problems_of(text: str, file_format: str) -> list[str]:
    """Why this text is rejected."""
    with pytest.raises(FormatError) as caught:
        reads(text, file_format)
    return list(caught.value.problems)


def document(**changes: object) -> str:
    return json.dumps({**DOCUMENT, **changes})
