"""Promise: the forward-only part of a valid schedule is valid, and has no action that is for gradients."""

from __future__ import annotations

import pytest

import penstock
from penstock import Kind
from penstock.errors import UnhandledKindError
from penstock.runtime.program import program as module
from penstock.runtime.program.program import forward_only


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipev"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_is_safe_under_every_send_model_if_the_schedule_is(family: str, ranks: int) -> None:
    schedule = penstock.lower(penstock.build(family, ranks=ranks, microbatches=8))
    evaluated = forward_only(schedule)
    assert penstock.validate(evaluated) == []
    assert evaluated.table.has(Kind.F)
    assert not evaluated.table.has(Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE_GRAD)


def test_an_unshard_without_a_forward_is_left_out() -> None:
    schedule = penstock.Schedule.parse("0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD")
    assert [str(step) for step in forward_only(schedule).ranks[0]] == ["0UNSHARD", "0F0", "0RESHARD"]


def test_a_kind_that_it_does_not_handle_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OMITTED", tuple(kind for kind in module._OMITTED if kind is not Kind.W))
    with pytest.raises(UnhandledKindError, match="forward_only does not handle actions of kind W"):
        forward_only(penstock.lower(penstock.build("zbv", ranks=2, microbatches=4)))
