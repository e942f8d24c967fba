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

__all__ = ["PlanArguments", "PlanOutput"]

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
    quantile: Quantile = 0.95
    techniques: Techniques = None

    @property
    def chosen_techniques(self) -> tuple[str, ...]:
        """The names in --techniques."""
        return () if self.techniques is None else tuple(self.techniques.split(","))

    def check(self) -> None:
        """Raise a usage error for an unknown technique."""
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
