"""Random requests to the playground: valid ones, damaged ones, and junk."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterator
from typing import Any

from penstock import build, families
from penstock.web.answers import REQUESTS
from penstock.web.lessons import lessons
from tests.support.schedule_rows import rows_of

__all__ = ["random_body", "random_request"]

FAMILIES = tuple(name for name in families() if name != "forward-only")
STRANGE = (
    *(None, True, False, 0, -1, 3, 1e308, -1e308, 10**30, 10**400, 2**63, 0.1, 1e-300),
    *("", "NaN", "\0", "\ud800", "🚰" * 99, "0F0", "1B", "(0F0;0B1)OVERLAP_F_B", "9F99999999", "-1F0"),
    *("<script>alert(1)</script>", "../../etc/passwd", "1f1b", "slow-rank", "csv", "warm-up"),
)


def junk(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, also numbers and texts that nobody would send."""
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice(STRANGE),
        lambda: "".join(rng.choices(string.printable, k=rng.randrange(40))),
    ]
    if depth < 4:
        kinds.append(lambda: [junk(rng, depth + 1) for _ in range(rng.randrange(5))])
        keys = ["schedules", "family", "ranks", "microbatches", "costs", "steps", "lesson", "csv", "x"]
        kinds.append(lambda: {rng.choice(keys): junk(rng, depth + 1) for _ in range(rng.randrange(5))})
    return rng.choice(kinds)()


def _schedules(rng: random.Random) -> list[dict[str, Any]]:
    sizes = {"ranks": rng.randint(1, 8), "microbatches": rng.randint(1, 24)}
    found: list[dict[str, Any]] = [{"family": rng.choice(FAMILIES), **sizes} for _ in range(rng.randint(1, 3))]
    found[0] |= rng.choice(
        [{}, {"recompute": "all"}, {"offload": "0,every:2"}, {"stages_per_rank": 2}, {"group": 4}]
    )
    rows = rows_of(build("1f1b", ranks=3, microbatches=4))
    rng.shuffle(rows[rng.randrange(3)])
    found.append({"steps": rows, "stage_to_rank": [0, 1, 2], "microbatches": 4, "name": "mine"})
    found.append({"csv": rng.choice(["0F0,0B0\n1F0,1B0\n", "0F0,\x00", ",,,\n" * 50, "\ufeff0F0,0B0", "a;b"])})
    return rng.sample(found, rng.randint(1, 3))


def valid(rng: random.Random, name: str) -> dict[str, Any]:
    """A request that a page could make."""
    if name == "lessons":
        return {}
    if name == "lesson":
        lesson = rng.choice(list(lessons().values()))
        rows = [row.split() for row in lesson.steps]
        rng.shuffle(rows[0])
        return {"lesson": lesson.key, "steps": rows}
    costs = {"forward_seconds": rng.choice([0, 1, 1e-9, 1e9]), "latency_seconds": rng.choice([0, 0.5, 100])}
    document: dict[str, Any] = {"schedules": _schedules(rng), "costs": costs}
    document |= rng.choice([{}, {"weights": [1, 2, 3]}, {"same_model": True}, {"memory_limit": 4}])
    document |= rng.choice([{}, {"send_model": "rendezvous"}, {"lowered": True}, {"jitter": 0.1}])
    if name == "compare":
        kind = rng.choice(["slow-rank", "slow-link", "larger-microbatch", "memory"])
        document |= rng.choice([{}, {"what_if": {"kind": kind, "index": 1, "factor": 2}}])
    elif name == "stamp":
        document |= {"microbatch": 0, "interval": 3}
    elif name == "export":
        document["format"] = rng.choice(["csv", "json", "svg", "html", "trace", "lines"])
    return document


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a document with each of its keys or indices."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        yield value, key
        yield from _places(inner)


def random_request(rng: random.Random) -> tuple[str, Any]:
    """The name and the document of a request; most documents are damaged in one place."""
    name = rng.choice(list(REQUESTS))
    document = valid(rng, name)
    places = list(_places(document))
    if places and rng.random() < 0.7:
        container, key = rng.choice(places)
        container[key] = None if rng.random() < 0.3 else junk(rng)
    return name, junk(rng) if rng.random() < 0.1 else document


def random_body(rng: random.Random) -> tuple[str, bytes]:
    """The name and the bytes of a request, which may not be JSON."""
    name, document = random_request(rng)
    if rng.random() < 0.1:
        name, document = "search", {"ranks": rng.randint(0, 3), "microbatches": 2, "seconds": 0.2}
    body = json.dumps(document).encode()
    return name, body if rng.random() < 0.9 else body[: rng.randrange(len(body) + 1)] + rng.randbytes(9)
