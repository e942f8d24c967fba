"""The head of the demo's `report.html`: the result, the gradient check, the loss curve and the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from penstock.arguments import plural
from penstock.processes import usable_cores

__all__ = ["DemoFacts", "demo_page_head", "machine_text"]

_EXPLANATION = (
    "1f1b is the usual schedule; found is the order of the same work that the search found at the measured "
    "costs, within the memory of 1f1b. The bubble is the share of a step in which a process idles; live "
    "activations are the microbatches that a process holds in memory at once."
)
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 170, 46, 24


@dataclass(frozen=True)
class DemoFacts:
    """What the head of the report says."""

    headline: str
    reason: str
    """The numbers behind the headline."""
    check: str
    """The comparison with one process."""
    losses: Sequence[float]
    """Of all training steps, in order."""
    rows: Sequence[Sequence[str]]
    """The table of schedules; the first row has the names of the columns."""
    machine: str


def demo_page_head(facts: DemoFacts) -> str:
    """An HTML fragment for above the timelines; it needs no script."""
    return "\n".join(
        [
            '<section class="report" aria-label="Result">',
            f"<h2>{_text(facts.headline)}</h2>",
            f"<p>{_text(facts.reason)}</p>",
            f"<p>{_text(facts.check)}</p>",
            *_table(facts.rows),
            f"<p>{_EXPLANATION}</p>",
            *_loss_curve(facts.losses),
            f"<p>Machine: {_text(facts.machine)}</p>",
            "<p>Below, on one time axis: both schedules, as predicted and as measured; a row is a process.</p>",
            "</section>",
        ]
    )


def machine_text() -> str:
    """Processor, system, versions and load of this machine."""
    parts = [
        f"{_processor()}, {plural(usable_cores(), 'usable core')}",
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    ]
    if hasattr(os, "getloadavg"):
        parts.append(f"load average {os.getloadavg()[0]:.1f} at the end, processes of the demo included")
    return "; ".join(parts) + "."


def _processor() -> str:
    """The model of the processor, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or "unknown processor"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "<table>"
    for tag, row in zip(("th", *["td"] * len(rows)), rows):
        yield "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in row) + "</tr>"
    yield "</table>"


def _loss_curve(losses: Sequence[float]) -> Iterator[str]:
    """The loss of every step as a line, with its first and last value in words."""
    low, high = min(losses), max(losses)
    across, up = (
        (_WIDTH - _LEFT - 8) / max(len(losses) - 1, 1),
        (_HEIGHT - _BOTTOM - 12) / ((high - low) or 1.0),
    )
    points = " ".join(
        f"{_LEFT + place * across:.1f},{12 + (high - loss) * up:.1f}" for place, loss in enumerate(losses)
    )
    name = f"Loss: {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}"
    base = _HEIGHT - _BOTTOM
    yield f"<p>{name}.</p>"
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    yield f'<svg {size} role="img" aria-label="{name}">'
    yield f'<path d="M{_LEFT} 8V{base}H{_WIDTH - 8}" fill="none" stroke="currentColor" stroke-opacity=".4"/>'
    yield f'<polyline points="{points}" fill="none" stroke="#0072b2" stroke-width="2"/>'
    for x, y, anchor, text in (
        (_LEFT - 6, 16, "end", f"{high:.2f}"),
        (_LEFT - 6, base, "end", f"{low:.2f}"),
        (_LEFT, _HEIGHT - 6, "start", "step 1"),
        (_WIDTH - 8, _HEIGHT - 6, "end", f"step {len(losses)}"),
    ):
        yield f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="12" fill="currentColor">{text}</text>'
    yield "</svg>"


def _text(text: str) -> str:
    return escape(text).encode("ascii", "xmlcharrefreplace").decode()
