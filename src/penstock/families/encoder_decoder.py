"""The stage graph of multimodal models: encoders that feed a decoder, and a head for multi-token prediction.

`encoder_decoder(encoders=(2, 1), decoder=3, mtp=True)`:

vision   0 -> 1 --.
                  '-> 3 -> 4 -> 5        the decoder; 5 has the head
audio    2 -------'        '--> 6        the MTP head takes what the head takes
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from penstock.arguments import whole_number
from penstock.errors import BuildError
from penstock.ir.graph import Edge, StageGraph


def encoder_decoder(
    encoders: int | Sequence[int], decoder: int, *, feeds: Sequence[int] = (0,), mtp: bool = False
) -> StageGraph:
    """The graph of one or more encoders that feed a decoder.

    `encoders` is the number of stages of each encoder, or one number for a single encoder; `decoder` is the
    number of its stages. Stages are numbered encoder by encoder, then the decoder, then the MTP head.
    The last stage of each encoder feeds the decoder stages `feeds`, counted from the decoder's first: `(0,)`
    where encoded tokens join the input, `range(decoder)` where every decoder stage attends to them. With `mtp`
    the decoder's last stage but one feeds one more stage, beside the last one.
    """
    counts = list(encoders) if isinstance(encoders, Sequence) else [encoders]
    _check(counts, decoder, feeds, mtp=mtp)
    *starts, first = accumulate(counts, initial=0)
    edges: list[Edge] = []
    for start, count in zip(starts, counts):
        edges += _chain(start, count)
        edges += [(start + count - 1, first + stage) for stage in feeds]
    edges += _chain(first, decoder)
    if mtp:
        edges.append((first + decoder - 2, first + decoder))
    return StageGraph(first + decoder + mtp, tuple(edges))


def _chain(first: int, count: int) -> list[Edge]:
    return [(stage, stage + 1) for stage in range(first, first + count - 1)]


def _check(counts: Sequence[object], decoder: int, feeds: Sequence[int], *, mtp: bool) -> None:
    problems = [
        f"{what} must be a whole number of at least 1 (given {count!r})"
        for what, count in (*(("the stages of an encoder", count) for count in counts), ("decoder", decoder))
        if (whole_number(count) or 0) < 1
    ]
    if not counts:
        problems.append("encoders needs at least one encoder (given none)")
    if not problems:
        wrong = [stage for stage in feeds if whole_number(stage) is None or not 0 <= stage < decoder]
        if wrong or not feeds or len(set(feeds)) < len(feeds):
            problems.append(
                f"feeds must name decoder stages from 0 to {decoder - 1}, each once (given {feeds!r})"
            )
        if mtp and decoder < 2:
            problems.append(
                f"mtp needs a decoder of at least 2 stages, the last with the head (given {decoder})"
            )
    if problems:
        raise BuildError("; ".join(problems))
