"""Turns the values of shared options into schedules and costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from penstock.cost.costs import Costs
from penstock.cost.presets import preset, presets
from penstock.errors import FormatError
from penstock.families import build, find
from penstock.formats import format_of, read
from penstock.ir.schedule import Schedule
from penstock.lowering import AddCommunication, lower
from penstock.validation import SendModel

__all__ = ["costs_from", "for_send_model", "is_file", "read_schedule", "schedule_from", "schedules_from"]


def read_schedule(path: Path) -> Schedule:
    """Read a file; a suffix that no schedule format has is a usage error, not an invalid schedule."""
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
    source: str,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    *,
    lowered: bool = False,
) -> Schedule:
    """Read a file, which has its own sizes, or build a family, which needs them; lower it on demand."""
    sizes = {"--ranks": ranks, "--microbatches": microbatches, "--stages-per-rank": stages_per_rank}
    if is_file(source):
        if superfluous := [option for option, size in sizes.items() if size is not None]:
            raise typer.BadParameter(
                f"{source} is a file with its own sizes; remove {' and '.join(superfluous)}"
            )
        schedule = read_schedule(Path(source))
    else:
        if ranks is None or microbatches is None:
            missing = [option for option in ("--ranks", "--microbatches") if sizes[option] is None]
            example = f"penstock show {source} --ranks 4 --microbatches 8"
            raise typer.BadParameter(f"{source} needs {' and '.join(missing)}, e.g. {example}")
        schedule = build(source, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    return lower(schedule) if lowered else schedule


def for_send_model(schedule: Schedule, send_model: SendModel, *, blocking_receives: bool = False) -> Schedule:
    """The schedule with SEND and RECV where the send model, or blocking receives, are about them."""
    needed = blocking_receives or not send_model.is_buffered
    if not needed or schedule.table.has_communication or schedule.num_ranks == 1:
        return schedule
    return lower(schedule, [AddCommunication()])


def schedules_from(
    sources: Sequence[str],
    ranks: int | None,
    microbatches: Sequence[int],
    stages_per_rank: int | None,
) -> Iterator[Schedule]:
    """Files and families mixed, each family once per microbatch count.

    With several sources, the number of stages per rank applies only to families that leave it open.
    """
    if all(map(is_file, sources)) and (ranks or microbatches or stages_per_rank):
        raise typer.BadParameter(
            "files have their own sizes; remove --ranks, --microbatches, --stages-per-rank"
        )
    counts: Sequence[int | None] = microbatches or [None]
    for source in sources:
        if is_file(source):
            yield schedule_from(source, None, None, None)
            continue
        fixed = find(source).stages_per_rank is not None and len(sources) > 1
        for count in counts:
            yield schedule_from(source, ranks, count, None if fixed else stages_per_rank)


def costs_from(source: str | None) -> Costs:
    """Costs from a file or a preset; unit costs by default."""
    if source is None:
        return Costs()
    if Path(source).suffix.lower() in (".json", ".toml"):
        try:
            return Costs.read(source)
        except FormatError as error:
            raise typer.BadParameter(str(error)) from None
    if source not in presets():
        raise typer.BadParameter(
            f"--costs is a .json or .toml file, or one of {', '.join(presets())} (given {source})"
        )
    return preset(source)
