"""Promise: splitters split the values of their arguments and types; block masks have one built in."""

from __future__ import annotations

import subprocess
import sys
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from penstock.errors import BatchError
from penstock.runtime.batch import REPLICATE, Batcher, Splitter, register_splitter
from tests.support.batches import Words, only_argument, rows

# --- splitters -----------------------------------------------------------------------------------


class Sentence(str):
    __slots__ = ()


class LongSentence(Sentence):
    __slots__ = ()


def test_a_splitter_splits_the_argument_it_is_for_and_merges_the_outputs() -> None:
    args, kwargs = Batcher(2, {0: Words(), "ready": Words()}).split_arguments(("a b",), {"ready": "c d"})
    assert (args, kwargs) == ([("a",), ("b",)], [{"ready": "c"}, {"ready": "d"}])
    assert Batcher(2, merge=Words()).merge_outputs([rows(1).tolist(), "x"]) == "[0.0] x"


def test_a_splitter_that_gives_another_number_of_parts_is_rejected() -> None:
    with pytest.raises(BatchError, match=r"returned 2 parts of args\[0\] for 3 microbatches"):
        Batcher(3, {0: Words()}).split_arguments(("a b",), {})


def test_registered_types_and_their_subclasses_are_split_wherever_they_stand() -> None:
    register_splitter(Sentence, Words())
    batcher = Batcher(2)
    parts = only_argument(batcher, {"text": (Sentence("a b"), rows(2)), "long": LongSentence("c d")})
    assert [(part["text"][0], part["long"]) for part in parts] == [("a", "c"), ("b", "d")]
    assert batcher.merge_outputs([(Sentence("x"),), (LongSentence("y"),)]) == ("x y",)


def test_the_exact_type_is_looked_up_before_types_it_is_an_instance_of() -> None:
    class Anything(ABC):  # noqa: B024
        pass

    class Mine:
        pass

    Anything.register(Mine)
    register_splitter(Anything, Fixed("anything"))
    assert only_argument(Batcher(1), Mine()) == ["anything"]
    register_splitter(Mine, Fixed("mine"))
    assert only_argument(Batcher(1), Mine()) == ["mine"]


@dataclass
class Fixed:
    part: str

    def split(self, _value: object, count: int) -> Sequence[str]:
        return [self.part] * count

    def merge(self, parts: Sequence[Any]) -> str:
        raise NotImplementedError


def test_our_own_test_splitters_are_splitters() -> None:
    assert isinstance(Words(), Splitter)
    assert isinstance(REPLICATE, Splitter)


# --- block masks ---------------------------------------------------------------------------------

LENGTHS = torch.tensor([40, 64, 16, 33, 50])


def up_to_length(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key < LENGTHS[row]) & (key <= query)


def block_mask(batch: int | None) -> BlockMask:
    return create_block_mask(up_to_length, batch, None, 64, 64, device="cpu", BLOCK_SIZE=16)


def test_parts_of_a_block_mask_are_the_rows_of_its_dense_mask() -> None:
    dense = create_mask(up_to_length, 5, 1, 64, 64, device="cpu")
    whole = block_mask(5)
    parts = only_argument(Batcher(3), whole)
    assert [part.shape for part in parts] == [(2, 1, 64, 64), (2, 1, 64, 64), (1, 1, 64, 64)]
    for part, expected in zip(parts, dense.tensor_split(3)):
        assert torch.equal(create_mask(part.mask_mod, len(expected), 1, 64, 64, device="cpu"), expected)
    assert torch.equal(torch.cat([part.to_dense() for part in parts]), whole.to_dense())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.full
def test_attention_over_microbatches_is_attention_over_the_batch() -> None:
    torch.manual_seed(0)
    query = torch.rand(5, 2, 64, 8)
    whole = flex_attention(query, query, query, block_mask=block_mask(5))
    batcher = Batcher(3)
    args, kwargs = batcher.split_arguments((query,), {"block_mask": block_mask(5)})
    parts = [flex_attention(q, q, q, **keywords) for (q,), keywords in zip(args, kwargs)]
    torch.testing.assert_close(batcher.merge_outputs(parts), whole)


def test_a_block_mask_for_all_rows_is_handed_to_every_microbatch() -> None:
    mask = block_mask(None)
    args, _ = Batcher(2).split_arguments((rows(4), mask), {})
    assert all(part is mask for _, part in args)
    assert Batcher(2).merge_outputs([mask, mask]) is mask


def test_a_block_mask_has_as_many_rows_as_the_tensors() -> None:
    with pytest.raises(BatchError, match=r"4 in args\[0\], 5 in args\[1\]"):
        Batcher(2).split_arguments((rows(4), block_mask(5)), {})
    with pytest.raises(BatchError, match=r"has 5 along dimension 0 for 6 microbatches"):
        Batcher(6).split_arguments((block_mask(5),), {})


def test_a_block_mask_is_split_along_the_batch_whatever_the_dimension_of_tensors() -> None:
    parts = only_argument(Batcher(2, {0: 1}), (rows(2, 5), block_mask(5)))
    assert [(tensor.shape, mask.shape[0]) for tensor, mask in parts] == [((2, 3), 3), ((2, 2), 2)]


def test_block_masks_of_different_microbatches_are_not_merged() -> None:
    with pytest.raises(BatchError, match="leave them out of the output"):
        Batcher(2).merge_outputs([block_mask(5), block_mask(5)])


def test_a_block_mask_with_an_order_of_its_own_is_not_split() -> None:
    mask = block_mask(5)
    mask.dq_kv_order = torch.zeros(5, 1, 4)
    with pytest.raises(BatchError, match="give a list of masks"):
        Batcher(2).split_arguments((mask,), {})


@pytest.mark.full
def test_microbatches_do_not_wait_for_the_attention_module() -> None:
    module = "torch.nn.attention.flex_attention"
    loaded = f"import sys, penstock.runtime.batch; print({module!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == "False"
