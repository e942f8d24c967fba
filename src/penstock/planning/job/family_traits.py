"""What bounds depend on in a schedule family: stages per rank, placement, split backward, overlapped pairs."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from penstock.errors import BuildError
from penstock.families import build, families
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement

_STAGES_PER_RANK = (2, 3, 4, 6, 8, 12)


class Traits(NamedTuple):
    """What families have in common that have the same bound."""

    stages_per_rank: int
    is_v: bool
    split: bool
    paired: bool


@cache
def families_by_traits(only: tuple[str, ...] = ()) -> dict[Traits, tuple[str, ...]]:
    """The training families, or only these, by what bounds depend on; those that offload are left out."""
    found: dict[Traits, list[str]] = {}
    for name, family in families().items():
        if only and name not in only:
            continue
        fixed = family.stages_per_rank
        for count in _STAGES_PER_RANK if fixed is None else (fixed,):
            try:
                small = build(name, ranks=2, microbatches=4, stages_per_rank=count)
            except BuildError:
                continue
            table = small.table
            if not table.has(Kind.B, Kind.I) or table.has(Kind.OFFLOAD) or table.has(Kind.RECOMPUTE):
                continue
            is_v = count > 1 and small.placement == Placement.v(2, count)
            found.setdefault(Traits(count, is_v, table.has(Kind.I), table.has_pairs), []).append(name)
    return {traits: tuple(names) for traits, names in found.items()}
