"""The interleaved orders of Megatron-LM, from a table of (microbatch, chunk) as in its schedules.py."""

from __future__ import annotations

__all__ = ["interleaved", "interleaved_overlap"]


def interleaved(p: int, m: int, v: int, n: int) -> list[list[str]]:
    """Warm-up, 1F1B, cool-down, for groups of n microbatches."""
    rows = []
    for rank in range(p):
        forwards, backwards = _passes(p, m, v, n, rank)
        warmup = min((p - rank - 1) * 2 + (v - 1) * n, m * v)
        row = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards):
            row += [forward, backward]
        rows.append(row + backwards[m * v - warmup :])
    return rows


def interleaved_overlap(p: int, m: int, v: int, n: int) -> list[list[str]]:
    """With overlapped experts: warm-up with one more forward, pairs, cool-down."""
    rows = []
    for rank in range(p):
        forwards, backwards = _passes(p, m, v, n, rank)
        warmup = min((p - rank - 1) * 2 + (v - 1) * n + 1, m * v)
        pairs = zip(forwards[warmup:], backwards)
        row = forwards[:warmup] + [f"({f};{b})OVERLAP_F_B" for f, b in pairs]
        rows.append(row + backwards[m * v - warmup :])
    return rows


def _passes(p: int, m: int, v: int, n: int, rank: int) -> tuple[list[str], list[str]]:
    """The forwards and the backwards of a rank in their orders."""
    firsts = range(0, m, n)
    table = [(k, chunk) for first in firsts for chunk in range(v) for k in range(first, min(first + n, m))]
    forwards = [f"{chunk * p + rank}F{k}" for k, chunk in table]
    return forwards, [f"{(v - 1 - chunk) * p + rank}B{k}" for k, chunk in table]
