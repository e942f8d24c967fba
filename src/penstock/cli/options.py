"""The options that several commands share, each declared once, with their completion and parsing."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeAlias, TypeVar

import typer

from penstock.arguments import did_you_mean, printable
from penstock.cost.presets import presets
from penstock.families import families
from penstock.validation import SendModel


class Objective(str, Enum):
    """The objective to minimize."""

    makespan = "makespan"
    span = "span"
    period = "period"


class Sharding(str, Enum):
    """Where UNSHARD, RESHARD and REDUCE_GRAD are placed."""

    look_ahead = "look-ahead"
    cost = "cost"


def complete_family(prefix: str) -> list[str]:
    """Family names with this prefix, for shell completion; the shell falls back to files."""
    return [name for name in families() if name.startswith(prefix)]


def _complete_preset(prefix: str) -> list[str]:
    return [name for name in presets() if name.startswith(prefix)]


SEND_MODELS = ", ".join(map(str, SendModel))

_Choice = TypeVar("_Choice", bound=Enum)


def _choice(option: str, kind: type[_Choice], name: _Choice | str) -> _Choice:
    """The member of this name, or a usage error that names the nearest; a default is a member already."""
    if isinstance(name, kind):
        return name
    known = [str(member.value) for member in kind]
    if name not in known:
        near = did_you_mean(str(name), known)
        raise typer.BadParameter(f"{option} is one of {', '.join(known)} (given {printable(str(name))}){near}")
    return kind(name)


def parse_send_model(name: SendModel | str) -> SendModel:
    """The send model of this name."""
    return _choice("--send-model", SendModel, name)


def _parse_objective(name: Objective | str) -> Objective:
    return _choice("--objective", Objective, name)


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for end, base in (("B", 1000), ("iB", 1024))
}


class MemorySize(float):
    """A memory limit: bytes, or activations where costs are relative; `unit` is what was typed, or empty."""

    unit = ""


def parse_bytes(text: str) -> MemorySize:
    """A number of bytes, with or without a unit."""
    number = text.strip().rstrip("BGKMTi")
    unit = text.strip()[len(number) :]
    try:
        size = MemorySize(float(number) * float(_UNITS[unit]))
    except (ValueError, KeyError):
        size = MemorySize(-1.0)
    if not 0 <= size < float("inf"):
        raise typer.BadParameter(f"--memory is a number of bytes, e.g. 80e9, 80GB or 74.5GiB (given {text})")
    size.unit = unit
    return size


ScheduleSource: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        help="A schedule family (see penstock list), or a .csv or .json file.",
        autocompletion=complete_family,
    ),
]
Ranks: TypeAlias = Annotated[int | None, typer.Option("--ranks", "-p", help="Number of pipeline ranks.")]
Microbatches: TypeAlias = Annotated[
    int | None, typer.Option("--microbatches", "-m", help="Number of microbatches.")
]


def parse_stages(text: str) -> int | list[int]:
    """One number for all ranks, or one for each, separated by commas."""
    try:
        return [int(part) for part in text.split(",")] if "," in text else int(text)
    except ValueError:
        raise typer.BadParameter(
            f"--stages-per-rank is a number, or one for each rank such as 1,2,2,1 (given {text})"
        ) from None


FamilyStages: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--stages-per-rank",
        "-v",
        metavar="NUMBER|LIST",
        help="Number of stages per rank, or one for each rank: 1,2,2,1.",
    ),
]
Group: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--group",
        help="Consecutive microbatches of a stage in interleaved families, from ranks to microbatches.",
    ),
]
GraphOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--graph",
        metavar="EDGES|FILE",
        help="Stage graph: edges such as '0>1,1>2,0>2', or a schedule file that has one.",
    ),
]
Lowered: TypeAlias = Annotated[
    bool, typer.Option("--lowered", help="Add communication, sharding and gradient reduction.")
]
ShardingOption: TypeAlias = Annotated[
    Sharding,
    typer.Option(
        "--sharding",
        help="With --lowered: unshard a fixed look-ahead, or where simulation says it pays, within --memory.",
    ),
]
RecomputeOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--recompute",
        metavar="[STAGES:]POLICY",
        help="Recompute forwards: all, every=N, longer=N steps, stages such as 0-2 or 0,3:every=2, or fit: "
        "what --memory needs.",
    ),
]
OffloadOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--offload", metavar="[STAGES:]POLICY", help="Offload activations to the host: as --recompute."
    ),
]
CostsSource: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--costs",
        "-c",
        metavar="FILE|PRESET",
        help="Cost model: a .json or .toml file, or a preset.",
        autocompletion=_complete_preset,
    ),
]
MemoryLimit: TypeAlias = Annotated[
    MemorySize | None,
    typer.Option(
        "--memory",
        metavar="BYTES",
        help="Memory limit per rank, e.g. 80e9, 80GB or 74.5GiB; at unit costs a number of activations.",
        parser=parse_bytes,
    ),
]
SendModelOption: TypeAlias = Annotated[
    SendModel,
    typer.Option(
        "--send-model",
        metavar="MODEL",
        help=f"Send model: {SEND_MODELS}. All but buffered add SEND and RECV where the schedule has none.",
        parser=parse_send_model,
    ),
]
ObjectiveOption: TypeAlias = Annotated[
    Objective,
    typer.Option(
        "--objective",
        metavar="makespan|span|period",
        help="Objective to minimize.",
        parser=_parse_objective,
    ),
]
JitterShare: TypeAlias = Annotated[
    float | None,
    typer.Option("--jitter", metavar="SHARE", help="Vary the time of every step by this share, e.g. 0.05."),
]
Quantile: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--quantile", help="With --jitter: rank by this quantile of the objective; 0.95 unless given."
    ),
]


def quantile_from(quantile: float | None, jitter: float | None) -> float:
    """The value of --quantile, which needs --jitter."""
    if quantile is not None and jitter is None:
        raise typer.BadParameter("--quantile needs --jitter: without it no step varies")
    return 0.95 if quantile is None else quantile


Seed: TypeAlias = Annotated[int, typer.Option("--seed", help="Random seed.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
