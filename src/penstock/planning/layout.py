"""Pipeline layouts: which layers of a model belong to which stage.

`penstock.planning.layout_text` has the notation, which is that of Megatron's
`--pipeline-model-parallel-layout`: `str(layout)` writes it, `parse_layout` reads it. A layout needs no model:
the number of layers is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

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
