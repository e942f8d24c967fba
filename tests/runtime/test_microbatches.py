from __future__ import annotations

import subprocess
import sys
from abc import ABC
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from penstock.errors import BatchError
from penstock.runtime.microbatches import Batcher
from penstock.runtime.splitters import REPLICATE, Splitter, register_splitter


def rows(count: int, *more: int) -> Tensor:
    return torch.arange(float(torch.Size((count, *more)).numel())).reshape(count, *more)


def only_argument(batcher: Batcher, value: object) -> list[Any]:
    """The parts of a value that is the only argument."""
    args, kwargs = batcher.arguments((value,), {})
    assert kwargs == [{} for _ in args]
    return [value for (value,) in args]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Padded:
    tokens: Any
    name: str = "padded"
    lengths: Any = field(default=None, init=False)


@dataclass
class KeyedOutput(OrderedDict[str, Any]):
    """A dataclass that is a dict too, and keeps both in step in its own way."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            OrderedDict.__setitem__(self, name, getattr(self, name))

    def __setitem__(self, key: str, value: object) -> None:
        raise NotImplementedError


# --- tensors ---------------------------------------------------------------------------------------


def test_arguments_and_keywords_are_split_along_dimension_0() -> None:
    x, mask = rows(8, 2), rows(8)
    args, kwargs = Batcher(4).arguments((x,), {"mask": mask})
    assert [part.tolist() for (part,) in args] == [part.tolist() for part in x.chunk(4)]
    assert [part["mask"].tolist() for part in kwargs] == [part.tolist() for part in mask.chunk(4)]


def test_nothing_to_split_gives_every_microbatch_an_empty_call() -> None:
    assert Batcher(3).arguments((), {}) == ([(), (), ()], [{}, {}, {}])


@settings(deadline=None)  # the first run of a torch kernel takes long
@given(st.integers(1, 40), st.integers(1, 9), st.integers(-3, 2))
def test_parts_differ_by_one_row_at_most_and_merge_to_the_whole(size: int, count: int, dim: int) -> None:
    shape = [2, 3, 2]
    shape[dim] = max(size, count)
    whole = torch.rand(shape)
    batcher = Batcher(count, {0: dim}, merge=dim)
    parts = only_argument(batcher, whole)
    assert [part.shape for part in parts] == [part.shape for part in whole.tensor_split(count, dim)]
    assert torch.equal(batcher.merged(parts), whole)


def test_parts_are_views_of_the_batch() -> None:
    x = rows(6, 5)
    for part in only_argument(Batcher(4, {0: -1}), x):
        assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_the_gradient_of_a_batch_gathers_microbatch_by_microbatch() -> None:
    x = rows(5, 2).requires_grad_()
    for k, part in enumerate(only_argument(Batcher(3), x)):
        ((k + 1) * part).sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [1, 1, 2, 2, 3]


def test_each_argument_can_have_its_own_dimension() -> None:
    args, kwargs = Batcher(2, {0: 1, "mask": -1}).arguments((rows(3, 4), rows(4)), {"mask": rows(2, 2, 4)})
    assert [(x.shape, y.shape) for x, y in args] == [((3, 2), (2,))] * 2
    assert [part["mask"].shape for part in kwargs] == [(2, 2, 2)] * 2


def test_numbers_of_other_libraries_are_whole_numbers_too() -> None:
    batcher = Batcher(np.int64(2), {np.int64(0): np.int64(1)}, merge=np.int64(1))  # type: ignore[arg-type, dict-item]
    whole = rows(3, 4)
    parts = only_argument(batcher, whole)
    assert [part.shape for part in parts] == [(3, 2)] * 2
    assert torch.equal(batcher.merged(parts), whole)


# --- what every microbatch gets whole --------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 3, "text", torch.tensor(2.0), torch.Size((2, 3)), {1, 2}], ids=repr)
def test_what_has_no_rows_is_handed_to_every_microbatch(value: object) -> None:
    args, kwargs = Batcher(3).arguments((rows(3), value), {"same": value})
    assert all(part == value for _, part in args)
    assert all(part["same"] == value for part in kwargs)


def test_a_dimension_for_a_mask_does_no_harm_where_the_mask_is_none() -> None:
    assert Batcher(2, {"mask": 1}).arguments((), {"mask": None})[1] == [{"mask": None}] * 2


def test_replicate_hands_the_same_object_to_every_microbatch() -> None:
    table, entries = rows(7), [1, 2, 3]
    batcher = Batcher(2, {1: REPLICATE, "entries": REPLICATE})
    args, kwargs = batcher.arguments((rows(4), table), {"entries": entries})
    assert all(part is table for _, part in args)
    assert all(part["entries"] is entries for part in kwargs)
    assert repr(REPLICATE) == "REPLICATE"


def test_replicate_as_merge_gives_the_outputs_as_they_are() -> None:
    same, other = rows(2), rows(2)
    assert Batcher(2, merge=REPLICATE).merged([same, same]) is same
    left, right = Batcher(2, merge=REPLICATE).merged([same, other])
    assert (left is same, right is other) == (True, True)


# --- structures ------------------------------------------------------------------------------------


def nested() -> dict[str, Any]:
    padded = Padded(rows(4, 2))
    object.__setattr__(padded, "lengths", rows(4))
    return {
        "tuple": (rows(4), [rows(4, 1), "x"], ()),
        "pair": Pair(rows(4), None),
        "padded": padded,
        "ordered": OrderedDict(b=rows(4), a=torch.tensor(1.0)),
        "default": defaultdict(list, {7: rows(4)}),
        "keyed": KeyedOutput(loss=None, logits=rows(4)),
        "order": rows(4).reshape(4, 1).max(1),
    }


def test_tensors_inside_structures_are_split_and_the_structure_stays() -> None:
    parts = only_argument(Batcher(2), nested())
    for part, start in zip(parts, (0.0, 2.0)):
        expected = [start, start + 1]
        assert part["tuple"][0].tolist() == expected
        assert part["tuple"][1][0].flatten().tolist() == expected
        assert part["tuple"][1:] == (part["tuple"][1], ())
        assert type(part["pair"]) is Pair
        assert part["pair"].left.tolist() == expected
        assert (part["padded"].tokens[:, 0] / 2).tolist() == expected
        assert (part["padded"].lengths.tolist(), part["padded"].name) == (expected, "padded")
        assert (type(part["ordered"]), list(part["ordered"])) == (OrderedDict, ["b", "a"])
        assert part["default"].default_factory is list
        assert part["default"][7].tolist() == expected
        assert part["keyed"]["logits"] is part["keyed"].logits
        assert part["keyed"].logits.tolist() == expected
        assert part["order"].values.tolist() == expected


def test_a_structure_that_was_split_merges_to_what_it_was() -> None:
    batcher = Batcher(3)
    whole, again = nested(), batcher.merged(only_argument(batcher, nested()))
    assert list(again) == list(whole)
    assert torch.equal(again["tuple"][1][0], whole["tuple"][1][0])
    assert again["tuple"][1][1] == "x"
    assert torch.equal(again["padded"].lengths, whole["padded"].lengths)
    assert torch.equal(again["keyed"]["logits"], whole["keyed"]["logits"])
    assert torch.equal(again["order"].values, whole["order"].values)
    assert again["ordered"]["a"].tolist() == [1.0, 1.0, 1.0]


# --- ready lists and the target --------------------------------------------------------------------


def test_a_list_is_a_ready_list_of_microbatches() -> None:
    ready = [rows(1), rows(9), rows(2)]
    args, kwargs = Batcher(3).arguments((ready, rows(3)), {"names": ["a", "b", "c"]})
    assert all(part is entry for (part, _), entry in zip(args, ready))
    assert [part["names"] for part in kwargs] == ["a", "b", "c"]
    assert Batcher(3).target([1, 2, 3]) == [1, 2, 3]


def test_a_list_in_a_tuple_is_one_value() -> None:
    parts = only_argument(Batcher(2), ([rows(4), rows(4)],))
    assert [[tensor.shape for tensor in entries] for (entries,) in parts] == [[(2,), (2,)]] * 2


@pytest.mark.parametrize("length", [0, 2, 4])
def test_a_ready_list_of_another_length_is_refused_with_the_way_out(length: int) -> None:
    with pytest.raises(BatchError) as caught:
        Batcher(3).arguments((), {"names": ["x"] * length})
    message = str(caught.value)
    assert f'kwargs["names"] has {length} entries for 3 microbatches' in message
    assert "wrap it in a tuple" in message


def test_the_target_is_split_by_its_own_key() -> None:
    assert [part.shape for part in Batcher(2).target(rows(4, 3))] == [(2, 3)] * 2
    batcher = Batcher(2, {"target": 1})
    assert [part.shape for part in batcher.target(rows(3, 4))] == [(3, 2)] * 2
    assert batcher.arguments((rows(2),), {"mask": rows(2)})[1][0]["mask"].shape == (1,)
    with pytest.raises(BatchError, match="target of shape"):
        Batcher(5).target(rows(4))


# --- what is refused -------------------------------------------------------------------------------


def test_different_numbers_of_rows_are_told_with_all_names() -> None:
    with pytest.raises(BatchError) as caught:
        Batcher(2).arguments((rows(8), {"a": rows(8), "b": rows(5)}), {"mask": rows(6)})
    message = str(caught.value)
    assert "8 in args[0], args[1]['a'], 5 in args[1]['b'], 6 in kwargs[\"mask\"]" in message
    assert "REPLICATE" in message


def test_replicated_arguments_and_ready_lists_may_have_any_number_of_rows() -> None:
    Batcher(2, {1: REPLICATE}).arguments((rows(8), rows(5)), {"ready": [rows(1), rows(1)]})


def test_fewer_rows_than_microbatches_are_refused_with_the_numbers() -> None:
    with pytest.raises(BatchError, match=r"args\[0\] of shape \(3, 2\) has 3 along dimension 0 for 4 micro"):
        Batcher(4).arguments((rows(3, 2),), {})
    with pytest.raises(BatchError, match=r"has 0 along dimension 0 for 1 micro"):
        Batcher(1).arguments((rows(0),), {})


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dimension_that_is_not_there_is_refused_with_the_shape(dim: int) -> None:
    with pytest.raises(BatchError, match=rf'"x"\].a cannot be split along dimension {dim}: .* \(4, 2\)'):
        Batcher(2, {"x": dim}).arguments((), {"x": KeyedPair(rows(4, 2))})


@dataclass
class KeyedPair:
    a: Any


def test_keys_that_are_not_in_the_call_are_refused_with_what_there_is() -> None:
    with pytest.raises(BatchError) as caught:
        Batcher(2, {0: 0, 2: 1, "maks": 0}).arguments((rows(2), rows(2)), {"mask": rows(2)})
    first, second = str(caught.value).splitlines()
    assert first == 'split[2] is for no argument of this call, which has args[0], args[1], kwargs["mask"]'
    assert second.startswith("split['maks']")


def test_keys_do_not_matter_on_a_rank_that_is_handed_no_such_arguments() -> None:
    batcher = Batcher(2, {0: 1, "mask": 0})
    assert batcher.arguments((), {}) == ([(), ()], [{}, {}])
    batcher.arguments((), {"mask": rows(2)})
    batcher.arguments((rows(2, 2),), {})


def test_every_fault_of_a_call_is_told_at_once() -> None:
    with pytest.raises(BatchError) as caught:
        Batcher(4, {0: 3, "no": 0}).arguments((rows(8), [1], rows(3)), {"mask": rows(6)})
    message = str(caught.value)
    for fault in ("split['no']", "args[0] cannot", "args[1] has 1 entries", "args[2] of shape", "6 in kwargs"):
        assert fault in message


def test_every_fault_of_a_batcher_is_told_at_once() -> None:
    with pytest.raises(BatchError) as caught:
        Batcher(0, {-1: 0, "x": "rows", 1: True}, merge=None)  # type: ignore[dict-item, arg-type]
    message = str(caught.value)
    for fault in ("microbatches must be at least 1 (given 0)", "given -1", "split['x']", "split[1]", "`merge`"):
        assert fault in message


def test_a_class_is_no_splitter() -> None:
    with pytest.raises(BatchError, match=r"an object with split\(\) and merge\(\)"):
        Batcher(1, {0: Words})  # type: ignore[dict-item]
    with pytest.raises(BatchError) as caught:
        register_splitter("text", Words)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 2


# --- splitters -------------------------------------------------------------------------------------


class Words:
    """Splits a text by its words."""

    def split(self, value: Any, count: int) -> Sequence[Any]:
        return str(value).split(" ")[:count]

    def merge(self, parts: Sequence[Any]) -> str:
        return " ".join(map(str, parts))


class Sentence(str):
    __slots__ = ()


class LongSentence(Sentence):
    __slots__ = ()


def test_a_splitter_splits_the_argument_it_is_for_and_merges_the_outputs() -> None:
    args, kwargs = Batcher(2, {0: Words(), "ready": Words()}).arguments(("a b",), {"ready": "c d"})
    assert (args, kwargs) == ([("a",), ("b",)], [{"ready": "c"}, {"ready": "d"}])
    assert Batcher(2, merge=Words()).merged([rows(1).tolist(), "x"]) == "[0.0] x"


def test_a_splitter_that_gives_another_number_of_parts_is_refused() -> None:
    with pytest.raises(BatchError, match=r"gave 2 parts of args\[0\] for 3 microbatches"):
        Batcher(3, {0: Words()}).arguments(("a b",), {})


def test_registered_types_and_their_subclasses_are_split_wherever_they_stand() -> None:
    register_splitter(Sentence, Words())
    batcher = Batcher(2)
    parts = only_argument(batcher, {"text": (Sentence("a b"), rows(2)), "long": LongSentence("c d")})
    assert [(part["text"][0], part["long"]) for part in parts] == [("a", "c"), ("b", "d")]
    assert batcher.merged([(Sentence("x"),), (LongSentence("y"),)]) == ("x y",)


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


# --- merging ---------------------------------------------------------------------------------------


def test_tensors_without_dimensions_are_stacked() -> None:
    assert Batcher(3).merged([torch.tensor(float(k)) for k in range(3)]).tolist() == [0, 1, 2]


def test_equal_values_are_merged_to_one_and_others_to_their_list() -> None:
    merged = Batcher(2).merged([(float("1.5"), 1, None, True), (float("1.5"), 2, 0, True)])
    assert merged == (1.5, [1, 2], [None, 0], True)
    array = np.arange(3)
    left, right = Batcher(2).merged([array, array.copy()])
    assert (left is array, right.tolist()) == (True, [0, 1, 2])


def test_keys_may_come_in_another_order() -> None:
    merged = Batcher(2).merged([{"a": rows(1), "b": 1}, {"b": 1, "a": rows(1)}])
    assert merged["a"].tolist() == [0, 0]
    assert merged["b"] == 1


def test_gradients_flow_through_merged_outputs() -> None:
    parts = [rows(2).requires_grad_() for _ in range(2)]
    Batcher(2).merged(parts).sum().backward()
    assert all(part.grad is not None for part in parts)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            [rows(2), None],
            "the output is a tensor of shape .2,. in microbatch 0 and a NoneType in microbatch 1",
        ),
        ([rows(2), rows(2, 1)], r"shape \(2,\) in microbatch 0 and a tensor of shape \(2, 1\) in microbatch 1"),
        ([(1, 2), (1,)], r"a tuple with \[0\], \[1\] in microbatch 0 and a tuple with \[0\] in"),
        ([(1,), [1]], r"a tuple with \[0\] in microbatch 0 and a list with \[0\] in microbatch 1"),
        ([{"a": 1}, {"b": 1}], r"a dict with \['a'\] in microbatch 0 and a dict with \['b'\] in microbatch 1"),
        ([{"a": (1, rows(2))}, {"a": (1, 2)}], r"the output\['a'\]\[1\] is a tensor"),
        ([rows(2, 3), rows(2, 4)], r"shape \(2, 3\) in microbatch 0 and \(2, 4\) in microbatch 1"),
        ([1], "2 microbatches gave 1"),
    ],
    ids=str,
)
def test_outputs_that_do_not_go_together_are_refused_with_the_microbatch(
    outputs: list[Any], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        Batcher(2).merged(outputs)


def test_a_dimension_that_outputs_do_not_have_is_refused_with_the_shape() -> None:
    with pytest.raises(BatchError, match=r"merged along dimension 1: its shape is \(2,\)"):
        Batcher(2, merge=1).merged([rows(2), rows(2)])


# --- block masks -----------------------------------------------------------------------------------

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
def test_attention_over_microbatches_is_attention_over_the_batch() -> None:
    torch.manual_seed(0)
    query = torch.rand(5, 2, 64, 8)
    whole = flex_attention(query, query, query, block_mask=block_mask(5))
    batcher = Batcher(3)
    args, kwargs = batcher.arguments((query,), {"block_mask": block_mask(5)})
    parts = [flex_attention(q, q, q, **keywords) for (q,), keywords in zip(args, kwargs)]
    torch.testing.assert_close(batcher.merged(parts), whole)


def test_a_block_mask_for_all_rows_is_handed_to_every_microbatch() -> None:
    mask = block_mask(None)
    args, _ = Batcher(2).arguments((rows(4), mask), {})
    assert all(part is mask for _, part in args)
    assert Batcher(2).merged([mask, mask]) is mask


def test_a_block_mask_has_as_many_rows_as_the_tensors() -> None:
    with pytest.raises(BatchError, match=r"4 in args\[0\], 5 in args\[1\]"):
        Batcher(2).arguments((rows(4), block_mask(5)), {})
    with pytest.raises(BatchError, match=r"has 5 along dimension 0 for 6 microbatches"):
        Batcher(6).arguments((block_mask(5),), {})


def test_a_block_mask_is_split_along_the_batch_whatever_the_dimension_of_tensors() -> None:
    parts = only_argument(Batcher(2, {0: 1}), (rows(2, 5), block_mask(5)))
    assert [(tensor.shape, mask.shape[0]) for tensor, mask in parts] == [((2, 3), 3), ((2, 2), 2)]


def test_block_masks_of_different_microbatches_are_not_merged() -> None:
    with pytest.raises(BatchError, match="leave them out of the output"):
        Batcher(2).merged([block_mask(5), block_mask(5)])


def test_a_block_mask_with_an_order_of_its_own_is_not_split() -> None:
    mask = block_mask(5)
    mask.dq_kv_order = torch.zeros(5, 1, 4)
    with pytest.raises(BatchError, match="hand over a ready list of masks"):
        Batcher(2).arguments((mask,), {})


def test_microbatches_do_not_wait_for_the_attention_module() -> None:
    loaded = (
        "import sys, penstock.runtime.microbatches; print('torch.nn.attention.flex_attention' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == "False"
