"""Promise: an index whose checksum is right but whose content is not is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime import save_checkpoint
from tests.support.damage import forge_index, made, outcome
from tests.support.grids import small

ODD: list[Any] = [
    None,
    True,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    1 << 40,
    1 << 70,
    10**400,
    "x",
    "../x",
    [],
    {},
]
ODD += [[0], [-1, 0], [[]], "float16", "load", "__0_0.distcp\0", "a" * 300 + ".distcp", ".distcp"]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every part of a JSON value is."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    key, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = replaced(value[key], tuple(rest), other)
    return copy


def every_change(index: Any) -> Iterator[tuple[str, Any]]:
    """Each value of an index replaced by odd ones, left out, and named otherwise."""
    for path in places(index):
        for odd in ODD[not path :]:  # None would leave the index as it is
            yield f"{path} = {str(odd)[:20]}", replaced(index, path, odd)
        if path:
            *above, key = path
            part = index
            for each in above:
                part = part[each]
            less: Any = dict(part) if isinstance(part, dict) else list(part)
            del less[key]
            yield f"without {path}", replaced(index, tuple(above), less)
            if isinstance(part, list):
                yield f"{path} twice", replaced(index, tuple(above), [*part, part[key]])
            else:
                yield f"{path} renamed", replaced(index, tuple(above), {**less, f"{key}x": part[key]})


def _instead(changed: Any, _: Any) -> Any:
    return changed


@pytest.mark.parametrize("part", range(40))
@small(lambda part: part == 7)
def test_every_value_of_a_forged_index_is_checked(tmp_path: Path, part: int) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, *made(1), extra={"step": 7})
    known: list[Any] = []
    forge_index(path, known.append)
    whole = (path / ".metadata").read_bytes()
    for what, changed in list(every_change(known[0]))[part::40]:
        if changed == known[0]:
            continue
        forge_index(path, partial(_instead, changed))
        found = outcome(path)
        (path / ".metadata").write_bytes(whole)
        assert found != "same", what
        assert not found.startswith(("loaded", "changed")), f"{what}: {found}"
