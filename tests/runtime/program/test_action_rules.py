"""Promise: every kind of action has one rule, and a kind without a rule is refused by name."""

from __future__ import annotations

import pytest

from penstock import Kind
from penstock.errors import UnhandledKindError
from penstock.runtime.program.program import rule_of


class MadeUpKind:
    """A kind that no component handles."""

    value = "MADE_UP"


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.OVERLAP_F_B], ids=str)
def test_every_kind_has_a_rule(kind: Kind) -> None:
    assert callable(rule_of(kind).bind)


def test_a_kind_without_a_rule_is_rejected_by_name() -> None:
    with pytest.raises(UnhandledKindError, match=r"runtime\.program does not handle actions of kind MADE_UP"):
        rule_of(MadeUpKind())  # type: ignore[arg-type]


def test_compute_actions_wait_for_the_receive_of_their_input() -> None:
    needs = {kind: rule_of(kind).needs for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.SEND_F, Kind.UNSHARD)}
    assert needs == {
        Kind.F: Kind.RECV_F,
        Kind.B: Kind.RECV_B,
        Kind.I: Kind.RECV_B,
        Kind.W: None,
        Kind.SEND_F: None,
        Kind.UNSHARD: None,
    }
