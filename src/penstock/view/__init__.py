"""Views: a schedule for the eye. Everything that mentions colour, width or characters is here."""

from penstock.view.grid import grid

__all__ = ["grid"]
