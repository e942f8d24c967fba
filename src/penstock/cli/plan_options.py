"""The options of `penstock plan` that model files and model configs share, in two groups: input and output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.arguments import printable
from penstock.cli.options import (
    AsJson,
    FamilyStages,
    JitterShare,
    MemoryLimit,
    Objective,
    ObjectiveOption,
    Quantile,
    Ranks,
    Seed,
)
from penstock.planning.technique_text import TECHNIQUES

BatchSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--batch", metavar="SAMPLES", help="Samples per step of this pipeline; with a config: of the whole job."
    ),
]
TimeLimit: TypeAlias = Annotated[
    float, typer.Option("--seconds", help="Time limit of the search; 0 evaluates families only.")
]
Explained: TypeAlias = Annotated[
    bool, typer.Option("--explain", help="Explain why the best plan wins, and what would improve it.")
]
Techniques: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--techniques",
        metavar="LIST",
        help="Also offer plans with these: recompute (stages), offload (activations to the host), or both: "
        "recompute,offload.",
    ),
]
RowCount: TypeAlias = Annotated[int, typer.Option("--top", min=1, help="Number of rows to print.")]
PlotFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Plot memory against time: .svg, .png or .html."),
]
PlanDirectory: TypeAlias = Annotated[
    Path | None,
    typer.Option("--write", metavar="DIR", help="Write schedule, costs and layout of the best plan."),
]


def names_in(text: str | None) -> tuple[str, ...]:
    """The names in a list that is separated by commas."""
    return tuple(name for part in (text or "").split(",") if (name := part.strip()))


@dataclass(frozen=True)
class PlanArguments:
    """What to plan, and how."""

    ranks: Ranks = None
    memory: MemoryLimit = None
    batch: BatchSize = None
    stages_per_rank: FamilyStages = None
    objective: ObjectiveOption = Objective.makespan
    seconds: TimeLimit = 10.0
    seed: Seed = 0
    jitter: JitterShare = None
    quantile: Quantile = None
    techniques: Techniques = None

    @property
    def chosen_techniques(self) -> tuple[str, ...]:
        """The names in --techniques."""
        return names_in(self.techniques)

    def check(self) -> None:
        """Raise a usage error for a value that has no meaning, or an unknown technique."""
        rules = {
            "--memory must be more than 0": (self.memory, self.memory is None or self.memory > 0),
            "--batch must be at least 1": (self.batch, self.batch is None or self.batch > 0),
            "--seconds must be 0 or more": (self.seconds, self.seconds >= 0),
            "--seed must be 0 or more": (self.seed, self.seed >= 0),
        }
        for rule, (given, is_met) in rules.items():
            if not is_met:
                raise typer.BadParameter(f"{rule} (given {given:g})")
        if unknown := [name for name in self.chosen_techniques if name not in TECHNIQUES]:
            raise typer.BadParameter(
                f"--techniques are {', '.join(TECHNIQUES)} (given {printable(unknown[0])})"
            )


@dataclass(frozen=True)
class PlanOutput:
    """What to print and write."""

    explained: Explained = False
    top: RowCount = 10
    picture: PlotFile = None
    folder: PlanDirectory = None
    as_json: AsJson = False
