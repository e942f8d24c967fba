"""What a file of another kind is, and which command reads it: for messages about the wrong file."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COSTS", "SCHEDULE", "kind_of_file"]

SCHEDULE = "a schedule, which penstock show, check, simulate and compare read"
COSTS = "costs of stages, which --costs takes"
_CONFIG = "a model's config.json, which penstock estimate (-o writes costs) and penstock plan read"
_MODEL = "a model file with costs of layers, which penstock plan reads (--write writes a schedule and costs)"
_TRACE = "a trace, which penstock read-trace reads"
_KINDS = {
    "stage_to_rank": SCHEDULE,
    "model_type": _CONFIG,
    "layers": _MODEL,
    "traceEvents": _TRACE,
    "forward_seconds": COSTS,
    "backward_seconds": COSTS,
}
"""By a key that only files of this kind have."""


def kind_of_file(document: object) -> str | None:
    """The kind of a file with these keys, and what reads it; None if it is not known."""
    keys = document if isinstance(document, Mapping) else {}
    return next((kind for key, kind in _KINDS.items() if key in keys), None)
