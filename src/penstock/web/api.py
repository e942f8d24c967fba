"""The requests of the page by name: pure functions from a JSON document to a JSON document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.cost.presets import presets
from penstock.families import families
from penstock.validation import SendModel
from penstock.web.answers import compare, export, measured, pareto, robustness, units
from penstock.web.edit import edit, stamp
from penstock.web.lessons import judge, lesson_catalogue

REQUESTS: dict[str, Callable[[object], dict[str, Any]]] = {
    "compare": compare,
    "edit": edit,
    "stamp": stamp,
    "robustness": robustness,
    "units": units,
    "pareto": pareto,
    "export": export,
    "trace": measured,
    "lessons": lesson_catalogue,
    "lesson": judge,
}
"""Each raises a `PenstockError` for a request that it cannot answer."""


def catalogue() -> dict[str, Any]:
    """What the page offers: families, presets of costs, send models."""
    return {
        "families": [
            {
                "name": family.name,
                "summary": family.summary,
                "stages_per_rank": family.stages_per_rank,
                "default_stages_per_rank": family.stages_per_rank or family.default_stages_per_rank,
                "group": family.smallest_group is not None,
            }
            for family in families().values()
        ],
        "presets": {name: costs.to_keys() for name, costs in presets().items()},
        "send_models": [str(model) for model in SendModel],
    }
