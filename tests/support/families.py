"""The schedule families that the distributed tests run, and the numbers of ranks as test parameters."""

from __future__ import annotations

import pytest

__all__ = ["FAMILIES", "ranks"]

FAMILIES = (
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "interleaved-zero-bubble",
    "zb-h1",
    "zb-h2",
    "zbv",
    "v-half",
    "v-min",
    "dualpipev",
)


def ranks(*counts: int) -> list[object]:
    return [pytest.param(count, marks=pytest.mark.xdist_group(f"ranks-{count}")) for count in counts]
