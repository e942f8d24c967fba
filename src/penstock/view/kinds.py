"""How views show each kind of action: one table, and an error for a kind that is not in it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from penstock.ir.kinds import Kind, handler_of

__all__ = ["HOST_TRACKS", "KIND_STYLES", "KindStyle", "Track", "kinds_on", "style_of"]

Track = Literal["compute", "message", "collective", "offload", "reload"]

HOST_TRACKS: tuple[Track, ...] = ("offload", "reload")
"""The two directions of the host link."""


class KindStyle(NamedTuple):
    """How one kind of action is shown."""

    track: Track
    """The track of a rank on which it is drawn."""
    meaning: str
    """Its entry in the legend."""
    terminal: str = ""
    """Its style on a terminal, as rich writes it."""
    colour: str = ""
    """Its colour in SVG and PNG; empty if it has no box of its own there."""
    units: int = 0
    """Its length in pictures without costs."""
    short: str = ""
    """Its name in a cell of a grid; its text unless given."""
    dark: str = ""
    """Its colour on a dark page, unless `colour` is readable there."""


KIND_STYLES = {
    Kind.F: KindStyle("compute", "forward", "black on bright_blue", "#0072b2", 1),
    Kind.B: KindStyle("compute", "backward", "black on dark_orange", "#e69f00", 2),
    Kind.I: KindStyle("compute", "input gradient", "black on bright_magenta", "#cc79a7", 1),
    Kind.W: KindStyle("compute", "weight gradient", "black on bright_yellow", "#f0e442", 1),
    Kind.RECOMPUTE: KindStyle(
        "compute", "recompute forward", "white on dark_green", "#00483a", 1, "R", "#2f8f7a"
    ),
    Kind.OVERLAP_F_B: KindStyle("compute", "overlapped pair", "black on bright_cyan"),
    Kind.SEND_F: KindStyle("message", "send activation"),
    Kind.RECV_F: KindStyle("message", "receive activation"),
    Kind.SEND_B: KindStyle("message", "send gradient"),
    Kind.RECV_B: KindStyle("message", "receive gradient"),
    Kind.UNSHARD: KindStyle("collective", "unshard parameters", "dim", "#009e73"),
    Kind.RESHARD: KindStyle("collective", "reshard parameters", "dim", "#56b4e9"),
    Kind.REDUCE_GRAD: KindStyle("collective", "reduce gradients", "bold", "#d55e00"),
    Kind.OFFLOAD: KindStyle("offload", "offload to the host", "dim", "#8a4b00", dark="#d9a05b"),
    Kind.RELOAD: KindStyle("reload", "reload from the host", "dim", "#004c77", dark="#7cb7e8"),
}
"""In the order of the legend."""


def style_of(kind: Kind) -> KindStyle:
    """How a kind is shown; `UnhandledKindError` for a kind without a style."""
    return handler_of(KIND_STYLES, kind, "view.kinds")


def kinds_on(track: Track) -> list[Kind]:
    """The kinds of a track that have a colour, in the order of the legend."""
    return [kind for kind, style in KIND_STYLES.items() if style.track == track and style.colour]
