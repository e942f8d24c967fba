"""Where a command takes its schedule and its costs from, and the options that all of them share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.cost.costs import Costs
from penstock.cost.presets import preset, presets
from penstock.errors import FormatError
from penstock.families import build, families
from penstock.formats import format_of, read
from penstock.ir.schedule import Schedule
from penstock.validation import MODELS

__all__ = [
    "CostsFrom",
    "Lowered",
    "Memory",
    "Microbatches",
    "Ranks",
    "Sends",
    "Source",
    "StagesPerRank",
    "bytes_from",
    "checked_sends",
    "costs_from",
    "families_beginning",
    "is_file",
    "presets_beginning",
    "read_schedule",
    "schedule_from",
]


def families_beginning(typed: str) -> list[str]:
    """The families whose names begin so: what a shell offers; it falls back to files."""
    return [name for name in families() if name.startswith(typed)]


def presets_beginning(typed: str) -> list[str]:
    """The presets whose names begin so."""
    return [name for name in presets() if name.startswith(typed)]


Source: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        help="A family (see penstock list), or a .csv or .json file.",
        autocompletion=families_beginning,
    ),
]
Ranks: TypeAlias = Annotated[int | None, typer.Option("--ranks", "-p", help="How many ranks.")]
Microbatches: TypeAlias = Annotated[
    int | None, typer.Option("--microbatches", "-m", help="How many microbatches.")
]
StagesPerRank: TypeAlias = Annotated[
    int | None, typer.Option("--stages-per-rank", "-v", help="How many stages each rank holds.")
]
Lowered: TypeAlias = Annotated[
    bool, typer.Option("--lowered", help="With communication, sharding and gradient reduction.")
]
CostsFrom: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--costs",
        "-c",
        metavar="FILE|PRESET",
        help="Costs from a .json or .toml file, or a preset.",
        autocompletion=presets_beginning,
    ),
]
Memory: TypeAlias = Annotated[
    str | None,
    typer.Option("--memory", metavar="BYTES", help="What a rank may hold, all told, as 80e9, 80GB or 74.5GiB."),
]
Sends: TypeAlias = Annotated[
    str, typer.Option("--sends", metavar="HOW", help=f"How sends behave: {', '.join(MODELS)}.")
]


def read_schedule(path: Path) -> Schedule:
    """Read a file; an ending that cannot be a schedule is bad usage, not a bad schedule."""
    try:
        format_of(path)
    except FormatError as error:
        raise typer.BadParameter(str(error)) from None
    return read(path)


def is_file(source: str) -> bool:
    """Whether it names a file rather than a family."""
    path = Path(source)
    return path.suffix.lower() in (".csv", ".json") or "/" in source or (path.suffix != "" and path.exists())


def schedule_from(
    source: str, ranks: int | None, microbatches: int | None, stages_per_rank: int | None
) -> Schedule:
    """Read a file, which has its own numbers, or build a family, which needs them."""
    numbers = {"--ranks": ranks, "--microbatches": microbatches, "--stages-per-rank": stages_per_rank}
    if is_file(source):
        if given := [option for option, number in numbers.items() if number is not None]:
            raise typer.BadParameter(f"{source} is a file and has its own numbers; drop {' and '.join(given)}")
        return read_schedule(Path(source))
    if ranks is None or microbatches is None:
        missing = [option for option in ("--ranks", "--microbatches") if numbers[option] is None]
        example = f"penstock show {source} --ranks 4 --microbatches 8"
        raise typer.BadParameter(f"to build {source}, say {' and '.join(missing)}, as in: {example}")
    return build(source, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)


def costs_from(source: str | None) -> Costs:
    """From a file or a preset; unit costs if nothing is said."""
    if source is None:
        return Costs()
    if Path(source).suffix.lower() in (".json", ".toml"):
        try:
            return Costs.read(source)
        except FormatError as error:
            raise typer.BadParameter(str(error)) from None
    if source not in presets():
        what = f"--costs is a .json or .toml file, or one of {', '.join(presets())} (given {source})"
        raise typer.BadParameter(what)
    return preset(source)


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for end, base in (("B", 1000), ("iB", 1024))
}


def bytes_from(text: str | None) -> float | None:
    """A number of bytes, with or without a unit."""
    if text is None:
        return None
    number = text.strip().rstrip("BGKMTi")
    unit = text.strip()[len(number) :]
    try:
        size = float(number) * float(_UNITS[unit])
    except (ValueError, KeyError):
        size = -1.0
    if not 0 <= size < float("inf"):
        raise typer.BadParameter(f"--memory is a number of bytes, as 80e9, 80GB or 74.5GiB (given {text})")
    return size


def checked_sends(sends: str) -> str:
    """One of the ways of sending, or bad usage."""
    if sends not in MODELS:
        raise typer.BadParameter(f"--sends is one of {', '.join(MODELS)} (given {sends})")
    return sends
