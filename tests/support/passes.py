"""Passes as text in and text out."""

from __future__ import annotations

import penstock
from penstock import Schedule
from penstock.lowering import Pass

__all__ = ["FAMILIES", "after"]

FAMILIES = [name for name in penstock.families() if name != "forward-only"]
"""The families that train."""


def after(schedule_pass: Pass, text: str) -> str:
    """The text of the schedule after one pass."""
    return " | ".join(str(schedule_pass(Schedule.parse(text))).split("\n"))
