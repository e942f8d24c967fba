"""Renders timelines in the formats that have a time axis; a view is imported only when it is used."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import typer

from penstock.simulation.timeline import Timeline

__all__ = ["TIMELINE_FORMATS", "render", "require_suffix", "say_written"]

TIMELINE_FORMATS = {"svg": "svg", "png": "png", "html": "html", "trace": "perfetto"}
"""The module of `penstock.view` for each format; its function has the format's name."""


def render(name: str, timelines: list[Timeline]) -> bytes:
    """The timelines in one of these formats."""
    view = getattr(import_module(f"penstock.view.{TIMELINE_FORMATS[name]}"), name)
    content: str | bytes = view(timelines)
    return content.encode() if isinstance(content, str) else content


def require_suffix(output: Path, suffixes: tuple[str, ...], advice: str = "") -> str:
    """The suffix of an output file without its dot; an error if it is none of these, or cannot be drawn."""
    suffix = output.suffix.lower()
    if suffix not in suffixes:
        *others, last = suffixes
        expected = f"{', '.join(others)} or {last}" if others else last
        raise typer.BadParameter(f"{output} does not end in {expected}{advice}")
    if suffix == ".png":  # before the work, not after it
        import_module("penstock.view.png").require_pillow()
    return suffix[1:]


def say_written(*paths: Path, as_json: bool = False, more: str = "") -> None:
    """Say which files were written, if any; on stderr if stdout has JSON."""
    if paths:
        typer.echo(f"wrote {', '.join(map(str, paths))}{more}", err=as_json)
