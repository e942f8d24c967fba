"""The families by name: what can be built, how to find it, how to add one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache

from penstock.arguments import whole_number
from penstock.errors import BuildError
from penstock.ir.schedule import Schedule

__all__ = ["Family", "build", "families", "find", "register"]

MAX_WORK = 1 << 24
"""Stages times microbatches of the largest schedule that is built."""

Builder = Callable[[int, int, int], Schedule]


@dataclass(frozen=True)
class Family:
    """A way to make schedules: `builder(ranks, microbatches, stages_per_rank)` gives one."""

    name: str
    summary: str
    builder: Builder = field(repr=False)
    stages_per_rank: int | None = None
    """How many stages every rank holds; None when that is free to choose."""
    default_stages_per_rank: int = 2
    """What is taken when it is free and not said."""
    aliases: tuple[str, ...] = ()


_REGISTRY: dict[str, Family] = {}
_BY_KEY: dict[str, Family] = {}


def register(
    name: str,
    summary: str,
    *,
    stages_per_rank: int | None = None,
    default_stages_per_rank: int = 2,
    aliases: Sequence[str] = (),
) -> Callable[[Builder], Builder]:
    """Make a function known as a family: it takes ranks, microbatches, stages_per_rank, gives a `Schedule`.

    A package can have its own found by naming the module that registers them under the entry point group
    `penstock.families`.
    """

    def known(builder: Builder) -> Builder:
        family = Family(name, summary, builder, stages_per_rank, default_stages_per_rank, tuple(aliases))
        keys = [_key(word) for word in (name, *aliases)]
        if taken := [key for key in keys if key in _BY_KEY]:
            owners = ", ".join(sorted({_BY_KEY[key].name for key in taken}))
            raise BuildError(f"the name {name!r} or one of its aliases is taken by {owners}")
        _REGISTRY[name] = family
        _BY_KEY.update(dict.fromkeys(keys, family))
        return builder

    return known


def families() -> dict[str, Family]:
    """What can be built: name to family."""
    _load_plugins()
    return dict(_REGISTRY)


def build(name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """Make the compute schedule of a family.

    Names are matched without case, dashes or underscores, and torch's names work: `build("ZBVZeroBubble",
    ranks=4, microbatches=8)`. `stages_per_rank` is for the families that leave it open.
    """
    family = find(name)
    faults = [
        f"{what} must be a whole number of at least 1 (given {value!r})"
        for what, value in (
            ("ranks", ranks),
            ("microbatches", microbatches),
            ("stages_per_rank", 1 if stages_per_rank is None else stages_per_rank),
        )
        if (whole_number(value) or 0) < 1
    ]
    fixed = family.stages_per_rank
    if fixed is not None and stages_per_rank not in (None, fixed):
        others = ", ".join(f.name for f in families().values() if f.stages_per_rank is None)
        faults.append(
            f"{family.name} has {fixed} stage{'s' * (fixed > 1)} per rank (given {stages_per_rank!r}); "
            f"any number works with {others}"
        )
    if faults:
        raise BuildError("; ".join(faults))
    legs = stages_per_rank or fixed or family.default_stages_per_rank
    if ranks * legs * microbatches > MAX_WORK:
        given = f"{ranks} ranks, {legs} stages per rank, {microbatches} microbatches"
        raise BuildError(f"stages times microbatches can be at most {MAX_WORK} (given {given})")
    return family.builder(ranks, microbatches, legs)


def _key(name: str) -> str:
    return "".join(c for c in name.lower() if c not in "-_ ")


def find(name: str) -> Family:
    """The family of this name, however it is spelled."""
    family = _BY_KEY.get(_key(name))
    if family is None:
        _load_plugins()
        family = _BY_KEY.get(_key(name))
    if family is None:
        close = get_close_matches(_key(name), _BY_KEY, n=1, cutoff=0.5)
        guess = f"; did you mean {_BY_KEY[close[0]].name}?" if close else ""
        raise BuildError(f"no family is called {name!r}{guess} (known: {', '.join(_REGISTRY)})")
    return family


@cache
def _load_plugins() -> None:
    from importlib.metadata import entry_points  # noqa: PLC0415 -- a tenth of the start-up time

    for entry_point in entry_points(group="penstock.families"):
        entry_point.load()
