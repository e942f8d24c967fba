"""Promise: whatever a request contains, its answer is JSON or a `PenstockError`, never another exception."""

from __future__ import annotations

import json
import random

import pytest

from penstock.errors import PenstockError
from penstock.web.answers import REQUESTS
from tests.support.grids import small
from tests.support.random_requests import random_request


@pytest.mark.parametrize("seed", range(20))
@small(lambda seed: seed < 2)
def test_random_requests_get_an_answer_or_a_message(seed: int) -> None:
    rng = random.Random(seed)
    answered = 0
    for _ in range(50):
        name, document = random_request(rng)
        try:
            answer = REQUESTS[name](document)
        except PenstockError:
            continue
        except Exception as error:
            raise AssertionError(f"{name} {json.dumps(document)}") from error
        json.dumps(answer, allow_nan=False)
        answered += 1
    assert 5 < answered < 45  # both happen


BASIC = {"family": "1f1b", "ranks": 4, "microbatches": 8}


@pytest.mark.parametrize(
    ("name", "document", "message"),
    [
        (
            "stamp",
            {"schedules": [BASIC], "microbatch": 0, "interval": 10**400},
            "interval: above 0 and at most",
        ),
        ("compare", {"schedules": [BASIC], "weights": [1] * 40_000}, "weights: at most 32,768"),
        ("compare", {"schedules": [BASIC], "weights": [1, 0]}, "numbers above 0"),
        ("edit", {"schedules": [{"csv": ",".join(["0F0"] * 300_000)}]}, "at most 262,144 actions"),
    ],
)
def test_what_is_too_large_is_named(name: str, document: object, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        REQUESTS[name](document)


@pytest.mark.parametrize(("kind", "known"), [("slow-rank", "ranks 0 to 3"), ("slow-link", "links 0 to 2")])
def test_a_slow_rank_or_link_that_does_not_exist_is_named(kind: str, known: str) -> None:
    what_if = {"kind": kind, "index": 99, "factor": 2}
    (entry,) = REQUESTS["compare"]({"schedules": [BASIC], "what_if": what_if})["schedules"]
    assert known in entry["error"]
