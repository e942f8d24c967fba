"""Pipeline layouts: which layers belong to which stage, in the text notation of Megatron.

`str(layout)` writes what `parse_layout` reads, Megatron's `--pipeline-model-parallel-layout`. A layout needs no
model: the number of layers is enough.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, zip_longest

from penstock.arguments import plural, printable, whole_number
from penstock.errors import PartitionError

MAX_LAYERS = 100_000
"""The largest number of layers, stages or characters of a layout."""


@dataclass(frozen=True)
class StageLayout:
    """The parts of the model on one stage: layers by their index, embedding, head, multi-token prediction.

    A stage without any part passes its input on.
    """

    layers: range
    has_embedding: bool = False
    has_head: bool = False
    mtp_layers: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether it has no part of the model."""
        return not (self.layers or self.has_embedding or self.has_head or self.mtp_layers)

    def __str__(self) -> str:
        layers = "".join(
            letter * count if count < 3 else f"{letter}*{count}"
            for letter, count in (("t", len(self.layers)), ("m", self.mtp_layers))
        )
        return "E" * self.has_embedding + layers + "L" * self.has_head


class PipelineLayout(tuple[StageLayout, ...]):
    """The stages in order; `str()` returns the text that `parse_layout` reads."""

    __slots__ = ()

    @property
    def layers(self) -> int:
        """The number of layers of all stages together."""
        return sum(len(stage.layers) for stage in self)

    @property
    def mtp_layers(self) -> int:
        """The number of multi-token prediction layers."""
        return sum(stage.mtp_layers for stage in self)

    def __str__(self) -> str:
        text = ""
        for letters, same in groupby(map(str, self)):
            count = len(list(same))
            text += f"{letters}|" * count if count == 1 or not letters else f"({letters}|)*{count},"
        return text[:-1]

    def __repr__(self) -> str:
        return f"PipelineLayout({str(self)!r})"


def even_layout(layers: int, stages: int) -> PipelineLayout:
    """Distribute layers as evenly as possible.

    If the number of layers is not a multiple of the number of stages, the first and the last stage get fewer,
    because embedding and head take time too. Of the others, the later stages get more, because they keep fewer
    activations.
    """
    for name, value in (("layers", layers), ("stages", stages)):
        number = whole_number(value)
        if number is None or number < 1:
            raise PartitionError(f"`{name}` must be a whole number above 0 (given {printable(repr(value))})")
    if max(layers, stages) > MAX_LAYERS:
        raise PartitionError(
            f"a layout has at most {MAX_LAYERS} layers and stages (given {layers} and {stages})"
        )
    if stages > layers + 2:
        raise PartitionError(
            f"{stages} stages need at least {plural(stages - 2, 'layer')} (given {layers}): only the first, "
            "with the embedding, and the last, with the head, can be without layers; "
            f"use at most {layers + 2} stages"
        )
    each, rest = divmod(layers, stages)
    counts = [each] * stages
    inner_from_the_end = [*range(stages - 2, 0, -1), 0]
    for stage in inner_from_the_end[:rest]:
        counts[stage] += 1
    return layout_of_counts(counts)


def layout_of_counts(counts: Sequence[int], mtp_counts: Sequence[int] = ()) -> PipelineLayout:
    """Return the layout with these numbers of layers, and of multi-token prediction layers, per stage."""
    stages, first = [], 0
    for stage, (count, mtp) in enumerate(zip_longest(counts, mtp_counts, fillvalue=0)):
        ends = stage == 0, stage == len(counts) - 1
        stages.append(StageLayout(range(first, first + count), *ends, mtp))
        first += count
    return PipelineLayout(stages)


def layout_of_kinds(kinds: Sequence[str], counts: Sequence[int]) -> PipelineLayout:
    """Return the layout of stages with these numbers of parts, each of kind `layer`, `mtp` or another."""
    stages = [kinds[end - count : end] for count, end in zip(counts, accumulate(counts))]
    return layout_of_counts(*([stage.count(kind) for stage in stages] for kind in ("layer", "mtp")))


# The text notation.
#
#     Et*3|(tt|)*2,t|L
#
#     E       the embedding                        |    starts the next stage
#     t       one transformer layer                *n   repeats the letter or the parentheses before it n times
#     m       one multi-token prediction layer     , and spaces are ignored
#     L       the head, with its norm
#
# This layout has five stages: the embedding with layers 0 to 2, layers 3 and 4, layers 5 and 6, layer 7, and
# the head. A stage without letters, as in `Et||t|L`, passes its input on. All `m` are in one stage, after the
# last `t`. A `PartitionError` lists all problems of a text with their positions.


_SHOWN_PROBLEMS = 12
_SHOWN_CHARACTERS = 30  # on both sides of a problem


@dataclass(frozen=True)
class _Problem:
    """A problem and its position in the text; None if it is about the whole text."""

    position: int | None
    message: str


_Letters = list[tuple[str, int]]
"""Letters and bars with all repetitions expanded, each with its position in the text."""


def parse_layout(
    text: str, layers: int | None = None, stages: int | None = None, mtp_layers: int | None = None
) -> PipelineLayout:
    """Parse a layout, and check it against the numbers of the model's layers and of the schedule's stages."""
    if not isinstance(text, str):
        raise PartitionError(
            f"a layout is a string such as 'Et*3|(tt|)*2,t|L' (given {printable(repr(text))}, "
            f"a {printable(type(text).__name__)})"
        )
    if len(text) > MAX_LAYERS:
        raise PartitionError(f"a layout has at most {MAX_LAYERS} characters (given {len(text)})")
    letters, problems = _expand(text)
    is_expanded = not problems
    problems += _check_ends(letters)
    parts = "".join(letter for letter, _ in letters).split("|")
    counts, mtp_counts = ([stage.count(letter) for stage in parts] for letter in "tm")
    if is_expanded:
        problems += _check_end_stages(letters) + _check_prediction(letters)
        problems += _check_numbers(sum(counts), len(counts), layers, stages)
        if mtp_layers is not None and sum(mtp_counts) != mtp_layers:
            message = f"the layout has {sum(mtp_counts)} MTP layers (m), but the model has {mtp_layers}"
            problems.append(_Problem(None, message))
    if problems:
        raise PartitionError(_report(text, problems))
    return layout_of_counts(counts, mtp_counts)


# --- expanding repetitions -------------------------------------------------------------------------


def _expand(text: str) -> tuple[_Letters, list[_Problem]]:
    """Expand all repetitions; list what cannot be parsed."""
    problems: list[_Problem] = []
    letters: _Letters = []
    opened: list[tuple[int, int]] = []  # of each open parenthesis: position, number of letters before it
    last: int | None = None  # the first letter that a `*` here repeats
    position = 0
    while position < len(text):
        letter = text[position]
        if letter == "," or letter.isspace():
            position += 1
            continue
        repeated, last = last, None
        if letter in "EtmL|":
            last = None if letter == "|" else len(letters)
            letters.append((letter, position))
        elif letter == "(":
            opened.append((position, len(letters)))
        elif letter == ")" and opened:
            start, last = opened.pop()
            if last == len(letters):
                problems.append(_Problem(start, "empty parentheses"))
        elif letter == "*":
            found = _NUMBER.match(text, position + 1)
            message = _repeat(letters, repeated, found.group(1) if found else "")
            problems += [_Problem(position, message)] if message else []
            position = found.end() - 1 if found else position
        else:
            problems.append(_Problem(position, _unknown(letter)))
        position += 1
    problems += [_Problem(start, "this parenthesis is not closed") for start, _ in opened]
    return letters, sorted(problems, key=lambda problem: problem.position or 0)


_NUMBER = re.compile(r"\s*([0-9]+)")


def _repeat(letters: _Letters, start: int | None, digits: str) -> str | None:
    """Repeat the letters from `start` on; return the problem if that is not possible."""
    if start is None:
        return "nothing to repeat: * follows a letter or a closing parenthesis"
    if not digits:
        return "a number must follow *, as in t*3"
    is_long = len(digits) > len(str(MAX_LAYERS))  # int() refuses thousands of digits
    if is_long or len(letters) + (len(letters) - start) * (int(digits) - 1) > MAX_LAYERS:
        return f"this repetition expands to more than {MAX_LAYERS} letters"
    if int(digits) == 0:
        return "cannot repeat 0 times: remove it"
    if int(digits) > 1:
        letters += letters[start:] * (int(digits) - 1)
    return None


def _unknown(letter: str) -> str:
    if letter == ")":
        return "this parenthesis was not opened"
    if letter.isdigit():
        return "a number must follow *, as in t*3"
    if letter in "eTMl":
        return f"unknown letter {letter!r}: did you mean {letter.swapcase()!r}?"
    letters = "E (embedding), t (layer), m (MTP layer), L (head) and |"
    return f"unknown character {printable(repr(letter))}: use {letters}"


# --- checks ----------------------------------------------------------------------------------------


def _check_ends(letters: _Letters) -> list[_Problem]:
    """Check that E occurs once, as the first letter, and L once, as the last."""
    parts = [(letter, position) for letter, position in letters if letter != "|"]
    problems = []
    for letter, name, index, verb, place in (
        ("E", "embedding", 0, "start", "first"),
        ("L", "head", -1, "end", "last"),
    ):
        positions = [position for each, position in parts if each == letter]
        if not positions:
            problems.append(_Problem(None, f"the {name} is missing: {verb} the layout with {letter}"))
        elif len(positions) > 1:
            message = f"{letter} occurs {len(positions)} times, but a model has one {name}"
            problems.append(_Problem(positions[1], message))
        elif parts[index][0] != letter:
            problems.append(_Problem(positions[0], f"{letter}, the {name}, must come {place}"))
    return problems


def _check_end_stages(letters: _Letters) -> list[_Problem]:
    """Check that the first and the last stage have a part: the embedding and the head."""
    ends = ((0, "first", "the embedding (E)"), (-1, "last", "the head (L)"))
    return [
        _Problem(letters[index][1], f"the {name} stage is empty, but it has {part}: remove this |")
        for index, name, part in ends
        if letters and letters[index][0] == "|"
    ]


def _check_prediction(letters: _Letters) -> list[_Problem]:
    """Check that all `m` are in one stage, after the last `t`."""
    problems, stage, first = [], 0, None
    for letter, position in letters:
        stage += letter == "|"
        if letter == "m" and first is None:
            first = stage
        elif letter == "m" and first != stage:
            problems.append(_Problem(position, f"all m must be in one stage; the first is in stage {first}"))
        elif letter == "t" and first is not None:
            problems.append(_Problem(position, "t after m: MTP layers (m) come after the last layer (t)"))
    return problems[:1]


def _check_numbers(
    layout_layers: int, layout_stages: int, layers: int | None, stages: int | None
) -> list[_Problem]:
    problems = []
    if layers is not None and layout_layers != layers:
        message = f"the layout has {plural(layout_layers, 'layer')} (t), but the model has {layers}"
        if layout_layers < layers:
            problems.append(f"{message}: {_range_text(range(layout_layers, layers))} would be left out")
        else:
            extra = _range_text(range(layers, layout_layers))
            problems.append(f"{message}: {extra} {'does' if layout_layers - layers == 1 else 'do'} not exist")
    if stages is not None and layout_stages != stages:
        problems.append(f"the layout has {plural(layout_stages, 'stage')}, but the schedule has {stages}")
    return [_Problem(None, message) for message in problems]


def _range_text(layers: range) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"


def _report(text: str, problems: list[_Problem]) -> str:
    lines = [f"invalid layout {printable(repr(text))}:"]
    for problem in problems[:_SHOWN_PROBLEMS]:
        if problem.position is None:
            lines.append(f"  {problem.message}")
            continue
        start = max(0, problem.position - _SHOWN_CHARACTERS)
        around = text[start : problem.position + _SHOWN_CHARACTERS]
        shown = "".join(letter if letter.isprintable() else " " for letter in around)
        pointer = " " * (problem.position - start) + "^"
        lines += [f"  {shown}", f"  {pointer} position {problem.position}: {problem.message}"]
    if len(problems) > _SHOWN_PROBLEMS:
        lines.append(f"  and {len(problems) - _SHOWN_PROBLEMS} more")
    return "\n".join(lines)
