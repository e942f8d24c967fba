"""Promise: parts of a value keep its structure, its memory and its gradients."""

from __future__ import annotations

import torch

from penstock.runtime.batch import size_problems, split_along, split_problems


def test_parts_are_views_and_a_tensor_that_appears_twice_is_one_in_each_part() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    first, second = split_along({"x": x, "more": (x, 7)}, 0, 2, "args[0]")
    assert first["x"] is first["more"][0]
    assert (first["x"].tolist(), second["x"].tolist(), second["more"][1]) == ([[0, 1], [2, 3]], [[4, 5]], 7)
    assert first["x"].data_ptr() == x.data_ptr()


def test_a_change_in_place_of_a_part_does_not_count_as_a_change_of_others() -> None:
    first, second = split_along(torch.ones(4), 0, 2, "args[0]")
    first.add_(1)
    assert second._version == 0


def test_gradients_of_parts_accumulate_in_the_batch() -> None:
    x = torch.ones(4, requires_grad=True)
    first, _ = split_along(x, 0, 2, "args[0]")
    first.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 0, 0]


def test_rows_are_collected_by_path_and_compared() -> None:
    sizes: dict[str, int] = {}
    assert not split_problems((torch.ones(4), {"a": torch.ones(2, 6)}), 0, 2, "args[0]", sizes)
    assert sizes == {"args[0][0]": 4, "args[0][1]['a']": 2}
    (problem,) = size_problems(sizes.items())
    assert "there are 4 in args[0][0], 2 in args[0][1]['a']" in problem
    assert not size_problems([("args[0]", 4), ("target", 4)])
