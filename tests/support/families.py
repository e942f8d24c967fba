"""The schedule families that the distributed tests run."""

from __future__ import annotations

__all__ = ["FAMILIES"]

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
