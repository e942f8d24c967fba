"""Views: schedules and timelines as text, SVG, PNG, HTML and Perfetto traces.

Each format has a module with a function of its name: `from penstock.view.svg import svg`; `trace` is in
`penstock.view.perfetto`. `penstock.view.kinds` says how each kind of action looks.
"""

from penstock.view.grid import grid
from penstock.view.terminal import terminal

__all__ = ["grid", "terminal"]
