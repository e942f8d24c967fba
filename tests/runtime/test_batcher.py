"""Promise: a batch is split into microbatches, and all problems are reported together."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BatchError
from penstock.runtime.batch import REPLICATE, Batcher, register_splitter
from tests.support.batches import Words, only_argument, rows


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


# --- tensors -------------------------------------------------------------------------------------


def test_arguments_and_keywords_are_split_along_dimension_0() -> None:
    x, mask = rows(8, 2), rows(8)
    args, kwargs = Batcher(4).split_arguments((x,), {"mask": mask})
    assert [part.tolist() for (part,) in args] == [part.tolist() for part in x.chunk(4)]
    assert [part["mask"].tolist() for part in kwargs] == [part.tolist() for part in mask.chunk(4)]


def test_nothing_to_split_gives_every_microbatch_an_empty_call() -> None:
    assert Batcher(3).split_arguments((), {}) == ([(), (), ()], [{}, {}, {}])


@settings(deadline=None)  # the first run of a torch kernel takes long
@given(st.integers(1, 40), st.integers(1, 9), st.integers(-3, 2))
def test_parts_differ_by_one_row_at_most_and_merge_to_the_whole(size: int, count: int, dim: int) -> None:
    shape = [2, 3, 2]
    shape[dim] = max(size, count)
    whole = torch.rand(shape)
    batcher = Batcher(count, {0: dim}, merge=dim)
    parts = only_argument(batcher, whole)
    assert [part.shape for part in parts] == [part.shape for part in whole.tensor_split(count, dim)]
    assert torch.equal(batcher.merge_outputs(parts), whole)


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
    args, kwargs = Batcher(2, {0: 1, "mask": -1}).split_arguments(
        (rows(3, 4), rows(4)), {"mask": rows(2, 2, 4)}
    )
    assert [(x.shape, y.shape) for x, y in args] == [((3, 2), (2,))] * 2
    assert [part["mask"].shape for part in kwargs] == [(2, 2, 2)] * 2


def test_integers_of_other_libraries_are_accepted() -> None:
    batcher = Batcher(np.int64(2), {np.int64(0): np.int64(1)}, merge=np.int64(1))  # type: ignore[arg-type, dict-item]
    whole = rows(3, 4)
    parts = only_argument(batcher, whole)
    assert [part.shape for part in parts] == [(3, 2)] * 2
    assert torch.equal(batcher.merge_outputs(parts), whole)


# --- what every microbatch gets whole ------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 3, "text", torch.tensor(2.0), torch.Size((2, 3)), {1, 2}], ids=repr)
def test_a_value_without_rows_is_given_to_every_microbatch(value: object) -> None:
    args, kwargs = Batcher(3).split_arguments((rows(3), value), {"same": value})
    assert all(part == value for _, part in args)
    assert all(part["same"] == value for part in kwargs)


def test_a_dimension_for_a_mask_is_ignored_where_the_mask_is_none() -> None:
    assert Batcher(2, {"mask": 1}).split_arguments((), {"mask": None})[1] == [{"mask": None}] * 2


def test_replicate_gives_the_same_object_to_every_microbatch() -> None:
    table, entries = rows(7), [1, 2, 3]
    batcher = Batcher(2, {1: REPLICATE, "entries": REPLICATE})
    args, kwargs = batcher.split_arguments((rows(4), table), {"entries": entries})
    assert all(part is table for _, part in args)
    assert all(part["entries"] is entries for part in kwargs)
    assert repr(REPLICATE) == "REPLICATE"


def test_replicate_as_merge_gives_the_outputs_as_they_are() -> None:
    same, other = rows(2), rows(2)
    assert Batcher(2, merge=REPLICATE).merge_outputs([same, same]) is same
    left, right = Batcher(2, merge=REPLICATE).merge_outputs([same, other])
    assert (left is same, right is other) == (True, True)


# --- structures ----------------------------------------------------------------------------------


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


def test_a_split_structure_merges_to_the_original() -> None:
    batcher = Batcher(3)
    whole, again = nested(), batcher.merge_outputs(only_argument(batcher, nested()))
    assert list(again) == list(whole)
    assert torch.equal(again["tuple"][1][0], whole["tuple"][1][0])
    assert again["tuple"][1][1] == "x"
    assert torch.equal(again["padded"].lengths, whole["padded"].lengths)
    assert torch.equal(again["keyed"]["logits"], whole["keyed"]["logits"])
    assert torch.equal(again["order"].values, whole["order"].values)
    assert again["ordered"]["a"].tolist() == [1.0, 1.0, 1.0]


# --- lists and the target ------ ------------------------------------------------------------------


def test_a_list_is_a_list_of_microbatches() -> None:
    ready = [rows(1), rows(9), rows(2)]
    args, kwargs = Batcher(3).split_arguments((ready, rows(3)), {"names": ["a", "b", "c"]})
    assert all(part is entry for (part, _), entry in zip(args, ready))
    assert [part["names"] for part in kwargs] == ["a", "b", "c"]
    assert Batcher(3).split_target([1, 2, 3]) == [1, 2, 3]


def test_a_list_in_a_tuple_is_one_value() -> None:
    parts = only_argument(Batcher(2), ([rows(4), rows(4)],))
    assert [[tensor.shape for tensor in entries] for (entries,) in parts] == [[(2,), (2,)]] * 2


@pytest.mark.parametrize("length", [0, 2, 4])
def test_a_list_of_another_length_is_rejected_with_a_suggestion(length: int) -> None:
    with pytest.raises(BatchError) as caught:
        Batcher(3).split_arguments((), {"names": ["x"] * length})
    message = str(caught.value)
    assert f'kwargs["names"] has {length} entries for 3 microbatches' in message
    assert "wrap it in a tuple" in message


def test_the_target_is_split_by_its_own_key() -> None:
    assert [part.shape for part in Batcher(2).split_target(rows(4, 3))] == [(2, 3)] * 2
    batcher = Batcher(2, {"target": 1})
    assert [part.shape for part in batcher.split_target(rows(3, 4))] == [(3, 2)] * 2
    assert batcher.split_arguments((rows(2),), {"mask": rows(2)})[1][0]["mask"].shape == (1,)
    with pytest.raises(BatchError, match="target of shape"):
        Batcher(5).split_target(rows(4))


# --- what is refused -----------------------------------------------------------------------------


def test_different_numbers_of_rows_are_rejected_with_all_names() -> None:
    with pytest.raises(BatchError) as caught:
        Batcher(2).split_arguments((rows(8), {"a": rows(8), "b": rows(5)}), {"mask": rows(6)})
    message = str(caught.value)
    assert "8 in args[0], args[1]['a'], 5 in args[1]['b'], 6 in kwargs[\"mask\"]" in message
    assert "REPLICATE" in message


def test_replicated_arguments_and_lists_may_have_any_number_of_rows() -> None:
    Batcher(2, {1: REPLICATE}).split_arguments((rows(8), rows(5)), {"ready": [rows(1), rows(1)]})


def test_fewer_rows_than_microbatches_are_rejected_with_the_numbers() -> None:
    with pytest.raises(BatchError, match=r"args\[0\] of shape \(3, 2\) has 3 along dimension 0 for 4 micro"):
        Batcher(4).split_arguments((rows(3, 2),), {})
    with pytest.raises(BatchError, match=r"has 0 along dimension 0 for 1 micro"):
        Batcher(1).split_arguments((rows(0),), {})


@pytest.mark.parametrize("dim", [2, -3])
def test_a_missing_dimension_is_rejected_with_the_shape(dim: int) -> None:
    with pytest.raises(BatchError, match=rf'"x"\].a cannot be split along dimension {dim}: .* \(4, 2\)'):
        Batcher(2, {"x": dim}).split_arguments((), {"x": KeyedPair(rows(4, 2))})


@dataclass
class KeyedPair:
    a: Any


def test_unknown_keys_are_rejected_with_the_known_ones() -> None:
    with pytest.raises(BatchError) as caught:
        Batcher(2, {0: 0, 2: 1, "maks": 0}).split_arguments((rows(2), rows(2)), {"mask": rows(2)})
    first, second = str(caught.value).splitlines()
    assert first == 'split[2] matches no argument of this call, which has args[0], args[1], kwargs["mask"]'
    assert second.startswith("split['maks']")


def test_keys_are_not_checked_on_a_rank_without_such_arguments() -> None:
    batcher = Batcher(2, {0: 1, "mask": 0})
    assert batcher.split_arguments((), {}) == ([(), ()], [{}, {}])
    batcher.split_arguments((), {"mask": rows(2)})
    batcher.split_arguments((rows(2, 2),), {})


def test_all_problems_of_a_call_are_reported_together() -> None:
    with pytest.raises(BatchError) as caught:
        Batcher(4, {0: 3, "no": 0}).split_arguments((rows(8), [1], rows(3)), {"mask": rows(6)})
    message = str(caught.value)
    for problem in (
        "split['no']",
        "args[0] cannot",
        "args[1] has 1 entries",
        "args[2] of shape",
        "6 in kwargs",
    ):
        assert problem in message


def test_all_problems_of_a_batcher_are_reported_together() -> None:
    with pytest.raises(BatchError) as caught:
        Batcher(0, {-1: 0, "x": "rows", 1: True}, merge=None)  # type: ignore[dict-item, arg-type]
    message = str(caught.value)
    for problem in (
        "microbatches must be at least 1 (given 0)",
        "given -1",
        "split['x']",
        "split[1]",
        "`merge`",
    ):
        assert problem in message


def test_a_class_is_no_splitter() -> None:
    with pytest.raises(BatchError, match=r"an object with split\(\) and merge\(\)"):
        Batcher(1, {0: Words})  # type: ignore[dict-item]
    with pytest.raises(BatchError) as caught:
        register_splitter("text", Words)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 2
