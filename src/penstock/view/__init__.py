"""Views: schedules and timelines for the eye. All that mentions colour, width or characters is here.

Each module has one function of its own name: `from penstock.view.svg import svg`.
"""

from penstock.view.grid import grid
from penstock.view.terminal import terminal

__all__ = ["grid", "terminal"]
