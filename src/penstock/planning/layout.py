"""Pipeline layouts: which layers of a model belong to which stage.

`penstock.planning.layout_text` has the notation, which is that of Megatron's
`--pipeline-model-parallel-layout`: `str(layout)` writes it, `parse_layout` reads it. A layout needs no model:
the number of layers is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.arguments import printable, whole_number
from penstock.errors import PartitionError

__all__ = ["MAX_LAYERS", "PipelineLayout", "StageLayout", "even_layout", "layout_of_counts"]

MAX_LAYERS = 100_000
"""The largest number of layers, stages or characters of a layout."""


@dataclass(frozen=True)
class StageLayout:
    """The parts of the model on one stage: layers by their index in the model, embedding, head."""

    layers: range
    has_embedding: bool = False
    has_head: bool = False

    def __str__(self) -> str:
        count = len(self.layers)
        layers = "t" * count if count < 3 else f"t*{count}"
        return "E" * self.has_embedding + layers + "L" * self.has_head


class PipelineLayout(tuple[StageLayout, ...]):
    """The stages in order; `str()` returns the text that `parse_layout` reads."""

    __slots__ = ()

    @property
    def layers(self) -> int:
        """The number of layers of all stages together."""
        return sum(len(stage.layers) for stage in self)

    def __str__(self) -> str:
        text = ""
        for letters, same in groupby(map(str, self)):
            count = len(list(same))
            text += f"{letters}|" if count == 1 else f"({letters}|)*{count},"
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
            f"{stages} stages need at least {stages - 2} layers (given {layers}): only the first, with the "
            f"embedding, and the last, with the head, can be without layers; use at most {layers + 2} stages"
        )
    each, rest = divmod(layers, stages)
    counts = [each] * stages
    inner_from_the_end = [*range(stages - 2, 0, -1), 0]
    for stage in inner_from_the_end[:rest]:
        counts[stage] += 1
    return layout_of_counts(counts)


def layout_of_counts(counts: Sequence[int]) -> PipelineLayout:
    """Return the layout with these numbers of layers per stage."""
    stages, first = [], 0
    for stage, count in enumerate(counts):
        stages.append(StageLayout(range(first, first + count), stage == 0, stage == len(counts) - 1))
        first += count
    return PipelineLayout(stages)
