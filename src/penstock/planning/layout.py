"""Which layers of a model go to which stage, as a short text.

    Et*3|(tt|)*2,t|L

    E       the embedding                   |       the next stage begins
    t       one transformer layer           *n      n times the letter or the parenthesis before it
    L       the head, with its norm         , and spaces are for reading only

These are five stages: the embedding with layers 0 to 2, layers 3 and 4, layers 5 and 6, layer 7, and the head.
It is the notation of Megatron's `--pipeline-model-parallel-layout`. Nothing here needs a model: a layout is
checked by the number of layers alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.arguments import printable, whole_number
from penstock.errors import PartitionError

__all__ = ["Layout", "StageLayout", "even_layout", "layout_of_counts", "parse_layout"]

_MOST = 100_000  # letters that a layout may have when it is written out
_SHOWN_FAULTS = 12
_SHOWN_AROUND = 30  # characters on both sides of a fault


@dataclass(frozen=True)
class StageLayout:
    """What one stage has: layers by their numbers in the model, and the ends of the model."""

    layers: range
    has_embedding: bool = False
    has_head: bool = False

    def __str__(self) -> str:
        count = len(self.layers)
        layers = "t" * count if count < 3 else f"t*{count}"
        return "E" * self.has_embedding + layers + "L" * self.has_head


class Layout(tuple[StageLayout, ...]):
    """The stages in their order; `str()` gives the text that `parse_layout` reads."""

    __slots__ = ()

    @property
    def layers(self) -> int:
        """How many layers all stages have together."""
        return sum(len(stage.layers) for stage in self)

    def __str__(self) -> str:
        text = ""
        for letters, same in groupby(map(str, self)):
            count = len(list(same))
            text += f"{letters}|" if count == 1 else f"({letters}|)*{count},"
        return text[:-1]

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"


@dataclass(frozen=True)
class _Fault:
    """What is wrong, and at which character; None if it is about the whole."""

    position: int | None
    what: str


_Letters = list[tuple[str, int]]
"""Letters and bars as they are written out, each with its position in the text."""


def parse_layout(text: str, layers: int | None = None, stages: int | None = None) -> Layout:
    """The layout a text means; every fault of it is told at once.

    `layers` is how many layers the model has, `stages` how many stages the schedule has.
    """
    if not isinstance(text, str):
        raise PartitionError(
            f"a layout is a text such as 'Et*3|(tt|)*2,t|L' (given {printable(repr(text))}, "
            f"a {printable(type(text).__name__)})"
        )
    if len(text) > _MOST:
        raise PartitionError(f"a layout has at most {_MOST} characters (given {len(text)})")
    letters, faults = _written_out(text)
    can_be_counted = not faults
    faults += _faults_of_ends(letters)
    found = _stages_of(letters)
    counts = [sum(letter == "t" for letter, _ in stage) for stage in found]
    if can_be_counted:
        faults += _faults_of_empty_stages(letters)
        faults += _faults_of_numbers(sum(counts), len(counts), layers, stages)
    if faults:
        raise PartitionError(_told(text, faults))
    return layout_of_counts(counts)


def even_layout(layers: int, stages: int) -> Layout:
    """Layers shared as evenly as can be.

    Where it does not come out even, the first and the last stage have fewer, because embedding and head are
    work too, and of the others those at the end have more, because fewer microbatches wait there.
    """
    for name, value in (("layers", layers), ("stages", stages)):
        number = whole_number(value)
        if number is None or number < 1:
            raise PartitionError(f"`{name}` is a whole number above 0 (given {printable(repr(value))})")
    if max(layers, stages) > _MOST:
        raise PartitionError(f"a layout has at most {_MOST} layers and stages (given {layers} and {stages})")
    if stages > layers + 2:
        raise PartitionError(
            f"{stages} stages need {stages - 2} layers at least, one for each but the first and last, which "
            f"have the embedding and the head, but there are {layers}: use {layers + 2} stages or fewer"
        )
    each, rest = divmod(layers, stages)
    counts = [each] * stages
    inner_from_the_end = [*range(stages - 2, 0, -1), 0]
    for stage in inner_from_the_end[:rest]:
        counts[stage] += 1
    return layout_of_counts(counts)


def layout_of_counts(counts: Sequence[int]) -> Layout:
    """The layout in which each stage has so many layers."""
    made, first = [], 0
    for stage, count in enumerate(counts):
        made.append(StageLayout(range(first, first + count), stage == 0, stage == len(counts) - 1))
        first += count
    return Layout(made)


# --- reading ---------------------------------------------------------------------------------------


def _written_out(text: str) -> tuple[_Letters, list[_Fault]]:
    """The text without repetitions, as far as it can be read."""
    faults: list[_Fault] = []
    letters: _Letters = []
    opened: list[tuple[int, int]] = []  # where each parenthesis stands, and how many letters come before it
    last: int | None = None  # from which letter on `*` would repeat
    position = 0
    while position < len(text):
        letter = text[position]
        if letter == "," or letter.isspace():
            position += 1
            continue
        repeated, last = last, None
        if letter in "EtL|":
            last = None if letter == "|" else len(letters)
            letters.append((letter, position))
        elif letter == "(":
            opened.append((position, len(letters)))
        elif letter == ")" and opened:
            start, last = opened.pop()
            if last == len(letters):
                faults.append(_Fault(start, "there is nothing in this parenthesis"))
        elif letter == "*":
            found = _NUMBER.match(text, position + 1)
            fault = _repeat(letters, repeated, found.group(1) if found else "")
            faults += [_Fault(position, fault)] if fault else []
            position = found.end() - 1 if found else position
        else:
            faults.append(_Fault(position, _unknown(letter)))
        position += 1
    faults += [_Fault(start, "this parenthesis is never closed") for start, _ in opened]
    return letters, sorted(faults, key=lambda fault: fault.position or 0)


_NUMBER = re.compile(r"\s*([0-9]+)")


def _repeat(letters: _Letters, start: int | None, digits: str) -> str | None:
    """Repeat the letters from `start` on; gives what is wrong, if anything is."""
    if start is None:
        return "there is nothing before this * to repeat: it goes after a letter or a parenthesis"
    if not digits:
        return "a number goes after *, as in t*3"
    if len(digits) > len(str(_MOST)) or len(letters) + (len(letters) - start) * (int(digits) - 1) > _MOST:
        return f"this repeats up to more than {_MOST} letters"
    if int(digits) == 0:
        return "nothing is repeated 0 times: leave it out"
    if int(digits) > 1:
        letters += letters[start:] * (int(digits) - 1)
    return None


def _unknown(letter: str) -> str:
    if letter == ")":
        return "this parenthesis was never opened"
    if letter == "m":
        return "m, a layer that predicts further tokens (MTP), is not supported: only E, t and L are"
    if letter.isdigit():
        return "a number goes after *, as in t*3"
    if letter in "eTl":
        return f"there is no {letter!r}: write {letter.swapcase()!r}"
    return f"there is no {printable(repr(letter))}: letters are E (embedding), t (layer), L (head) and |"


# --- what is wrong ---------------------------------------------------------------------------------


def _faults_of_ends(letters: _Letters) -> list[_Fault]:
    """E is there once, at the beginning, and L once, at the end."""
    work = [(letter, position) for letter, position in letters if letter != "|"]
    faults = []
    for end, called, place in (("E", "embedding", 0), ("L", "head", -1)):
        found = [position for letter, position in work if letter == end]
        side = "beginning" if place == 0 else "end"
        if not found:
            faults.append(_Fault(None, f"no stage has the {called}: write {end} at the {side}"))
        elif len(found) > 1:
            faults.append(_Fault(found[1], f"{end} is there {len(found)} times, but a model has one {called}"))
        elif work[place][0] != end:
            faults.append(_Fault(found[0], f"{end}, the {called}, goes to the very {side}"))
    return faults


def _stages_of(letters: _Letters) -> list[_Letters]:
    stages: list[_Letters] = [[]]
    for letter, position in letters:
        if letter == "|":
            stages.append([])
        else:
            stages[-1].append((letter, position))
    return stages


def _faults_of_empty_stages(letters: _Letters) -> list[_Fault]:
    """A stage with nothing would cost two messages for each microbatch and do no work."""
    bars = [place for place, (letter, _) in enumerate(letters) if letter == "|"]
    faults, said = [], set()
    for stage, (before, here) in enumerate(zip([-1, *bars], bars)):
        position = letters[here][1]
        if here == before + 1 and position not in said:
            said.add(position)
            faults.append(_Fault(position, f"stage {stage} ends here and has nothing: leave this | out"))
    if bars and bars[-1] == len(letters) - 1:
        position = letters[-1][1]
        faults.append(
            _Fault(position, f"nothing comes after this |, so stage {len(bars)} has nothing: leave it out")
        )
    return faults


def _faults_of_numbers(in_layout: int, in_stages: int, layers: int | None, stages: int | None) -> list[_Fault]:
    faults = []
    if layers is not None and in_layout < layers:
        lost = _listed(range(in_layout, layers))
        faults.append(
            f"the layout has {in_layout} layers (t), the model has {layers}: {lost} would be left out"
        )
    elif layers is not None and in_layout > layers:
        lost = _listed(range(layers, in_layout))
        faults.append(f"the layout has {in_layout} layers (t), the model has {layers}: there is no {lost}")
    if stages is not None and in_stages != stages:
        faults.append(f"the layout has {in_stages} stages, the schedule has {stages}")
    return [_Fault(None, fault) for fault in faults]


def _listed(numbers: range) -> str:
    return f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]} to {numbers[-1]}"


def _told(text: str, faults: list[_Fault]) -> str:
    lines = [f"{printable(repr(text))} is not a layout that fits:"]
    for fault in faults[:_SHOWN_FAULTS]:
        if fault.position is None:
            lines.append(f"  {fault.what}")
            continue
        start = max(0, fault.position - _SHOWN_AROUND)
        around = text[start : fault.position + _SHOWN_AROUND]
        shown = "".join(letter if letter.isprintable() else " " for letter in around)
        pointer = " " * (fault.position - start) + "^"
        lines += [f"  {shown}", f"  {pointer} position {fault.position}: {fault.what}"]
    if len(faults) > _SHOWN_FAULTS:
        lines.append(f"  and {len(faults) - _SHOWN_FAULTS} more")
    return "\n".join(lines)
