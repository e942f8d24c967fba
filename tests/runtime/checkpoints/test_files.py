"""Promise: chunks must fill a tensor exactly."""

from __future__ import annotations

import random
from itertools import pairwise, product

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from penstock.runtime.checkpoints.files import tiles
from tests.support.grids import examples


def chunk(*sides: tuple[int, int]) -> ChunkStorageMetadata:
    """From start and length in each dimension."""
    return ChunkStorageMetadata(
        torch.Size([start for start, _ in sides]), torch.Size([length for _, length in sides])
    )


def fills(chunks: list[ChunkStorageMetadata], size: list[int]) -> bool:
    """Whether every element is in exactly one chunk, counted."""
    counts = dict.fromkeys(product(*map(range, size)), 0)
    for each in chunks:
        for element in product(*(range(o, o + s) for o, s in zip(each.offsets, each.sizes))):
            if element not in counts:
                return False
            counts[element] += 1
    return all(count == 1 for count in counts.values())


def grid(chance: random.Random, size: list[int]) -> list[ChunkStorageMetadata]:
    """Cells between random cuts of each dimension."""
    sides = []
    for length in size:
        cuts = sorted({0, length, *(chance.randint(0, length) for _ in range(chance.randint(0, 2)))})
        sides.append([(start, end - start) for start, end in pairwise(cuts)])
    return [chunk(*cell) for cell in product(*sides)]


def test_the_cells_of_a_grid_fill_it_and_changed_ones_do_not() -> None:
    chance = random.Random(1)
    for _ in range(examples(5000)):
        size = [chance.randint(1, 4) for _ in range(chance.randint(0, 3))]
        chunks = grid(chance, size)
        chance.shuffle(chunks)
        assert tiles(chunks, size)
        number = chance.randrange(len(chunks))
        odd = list(chunks)
        match chance.randrange(4):
            case 0:
                del odd[number]
            case 1:
                odd.append(odd[number])
            case _ if size:
                offsets, sizes = (list(each) for each in (odd[number].offsets, odd[number].sizes))
                changed = chance.choice([offsets, sizes])
                changed[chance.randrange(len(size))] += 1
                odd[number] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            case _:
                odd = []
        assert tiles(odd, size) == fills(odd, size) == False  # noqa: E712


def test_empty_chunks_and_empty_tensors() -> None:
    assert tiles([chunk((0, 3)), chunk((3, 0))], [3])
    assert tiles([chunk((0, 0), (0, 5))], [0, 5])
    assert not tiles([], [0, 5])
    assert not tiles([chunk((0, 3), (0, 1))], [3])
    assert not tiles([chunk((0, 2)), chunk((4, 0))], [2])
