"""Measured costs that were published, by name: what the zero-bubble papers' tables were made with.

`zb-h4096-p8-m24`: hidden size 4096, 8 ranks, 24 microbatches, one stage per rank. The names with `zbv` are from
the V paper, for each of two stages per rank; `-whole` is the same model with one stage per rank. Times are
printed there in microseconds; sizes are in the unit of that table.
"""

from __future__ import annotations

from penstock.arguments import did_you_mean, listed, printable
from penstock.cost.costs import Costs
from penstock.errors import CostsError

# hidden, ranks, microbatches: F, I, W, hop; bytes of an activation, and what I frees of it
_ZERO_BUBBLE = {
    (2304, 8, 24): (18522, 18086, 9337, 601, 201216, 127488),
    (2304, 8, 32): (18513, 18086, 9331, 626, 201216, 127488),
    (2304, 8, 64): (18546, 18097, 9321, 762, 201216, 127488),
    (4096, 8, 24): (29718, 29444, 19927, 527, 303104, 172032),
    (4096, 8, 32): (29802, 29428, 19530, 577, 303104, 172032),
    (4096, 8, 64): (29935, 29621, 19388, 535, 303104, 172032),
}
_ZERO_BUBBLE_V = {
    (4096, 16, 48): (14407, 14380, 9676, 1610, 303104, 172032),
    (5120, 24, 72): (6763, 6969, 5251, 755, 378880, 215040),
    (6144, 32, 96): (9458, 9748, 7288, 879, 454656, 258048),
}


def presets() -> dict[str, Costs]:
    """Every preset by name."""
    found = {f"zb-h{h}-p{p}-m{m}": _costs(*row) for (h, p, m), row in _ZERO_BUBBLE.items()}
    for (h, p, m), (f, i, w, hop, held, freed) in _ZERO_BUBBLE_V.items():
        found[f"zbv-h{h}-p{p}-m{m}"] = _costs(f, i, w, hop, held, freed)
        found[f"zbv-h{h}-p{p}-m{m}-whole"] = _costs(2 * f, 2 * i, 2 * w, hop, 2 * held, 2 * freed)
    return found


def preset(name: str) -> Costs:
    """One of them."""
    known = presets()
    if name not in known:
        raise CostsError(
            f"no preset is called {printable(name)!r}{did_you_mean(name, known)} (known: {listed(known)})"
        )
    return known[name]


def _costs(*row: int) -> Costs:
    f, i, w, hop, held, freed = row
    return Costs(
        forward=f / 1e6,
        backward_input=i / 1e6,
        backward_weight=w / 1e6,
        latency=hop / 1e6,
        activation=held,
        activation_freed_by_input=freed,
    )
