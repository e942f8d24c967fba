"""The arguments of a job's plan, checked: all errors are reported at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from penstock.arguments import did_you_mean, listed, plural, printable
from penstock.cost.estimate.devices import Device
from penstock.cost.estimate.model_config import ModelConfig
from penstock.cost.estimate.setting import Setting, size_problems
from penstock.cost.units import bytes_text
from penstock.errors import BuildError, EstimateError, PlanError
from penstock.families import build, families
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement

# What bounds depend on in a schedule family: stages per rank, placement, split backward, overlapped pairs.


_STAGES_PER_RANK = (2, 3, 4, 6, 8, 12)


class Traits(NamedTuple):
    """What families have in common that have the same bound."""

    stages_per_rank: int
    is_v: bool
    split: bool
    paired: bool


@cache
def families_by_traits(only: tuple[str, ...] = ()) -> dict[Traits, tuple[str, ...]]:
    """The training families, or only these, by what bounds depend on; those that offload are left out."""
    found: dict[Traits, list[str]] = {}
    for name, family in families().items():
        if only and name not in only:
            continue
        fixed = family.stages_per_rank
        for count in _STAGES_PER_RANK if fixed is None else (fixed,):
            try:
                small = build(name, ranks=2, microbatches=4, stages_per_rank=count)
            except BuildError:
                continue
            table = small.table
            if not table.has(Kind.B, Kind.I) or table.has(Kind.OFFLOAD) or table.has(Kind.RECOMPUTE):
                continue
            is_v = count > 1 and small.placement == Placement.v(2, count)
            found.setdefault(Traits(count, is_v, table.has(Kind.I), table.has_pairs), []).append(name)
    return {traits: tuple(names) for traits, names in found.items()}


HEADROOM = 0.1
"""Share of a device's memory that plans leave free by default, because the estimated memory does not count
fragmentation, buffers of collectives and the CUDA context.
"""


@dataclass(frozen=True)
class JobRequest:
    """What to plan: a model, devices and a batch; sizes that are given are not searched."""

    config: ModelConfig
    device: Device
    devices: int
    batch: int
    """Samples per step of the whole job."""
    sequence: int
    precision: str = "bf16"
    zero: int = 1
    gradient_bytes: int = 4
    memory_limit: float = 0.0
    """Bytes per device; 0 for all that the device has but HEADROOM."""
    tensor: int | None = None
    context: int | None = None
    expert: int | None = None
    pipeline: int | None = None
    microbatch_size: int | None = None
    recompute: str | None = None
    families: tuple[str, ...] = ()
    """The schedules to choose from; empty for all, and for orders that are searched."""
    budget: float = 1.0
    """How many more steps are simulated than by default."""
    search: bool = True
    """Whether orders are searched for the best options."""
    techniques: tuple[str, ...] = ()
    """Of schedules: `recompute` whole stages, `offload` activations to the host."""
    jitter: float | None = None
    """Share by which the duration of steps varies; options are then ranked by a quantile of the step time."""
    quantile: float = 0.95
    seed: int = 0

    @property
    def limit_share(self) -> str:
        """Which part of a device the memory limit is."""
        whole = self.device.memory_bytes
        return f"{self.memory_limit / whole:.0%} of {bytes_text(whole)}"

    def __post_init__(self) -> None:
        if not self.memory_limit:
            object.__setattr__(self, "memory_limit", (1 - HEADROOM) * self.device.memory_bytes)
        required = {"--devices": self.devices, "--batch": self.batch, "--seq": self.sequence}
        optional = {
            "--tp": self.tensor,
            "--cp": self.context,
            "--ep": self.expert,
            "--ranks": self.pipeline,
            "--microbatch-size": self.microbatch_size,
        }
        given = required | {name: value for name, value in optional.items() if value is not None}
        problems = size_problems(given)
        if not problems:
            problems = [*self._sizes_that_do_not_divide(), *self._sizes_without_the_model()]
        problems += self._unknown_families()
        if not self.budget > 0:
            problems.append(f"--budget must be a number above 0 (given {self.budget})")
        if self.jitter is not None and not 0 <= self.jitter <= 1:
            problems.append(f"--jitter must be a share from 0 to 1 (given {self.jitter})")
        if not 0 < self.quantile < 1:
            problems.append(f"--quantile must be between 0 and 1 (given {self.quantile})")
        if problems:
            raise PlanError("; ".join(problems))

    def _sizes_that_do_not_divide(self) -> list[str]:
        fixed = {"--tp": self.tensor, "--cp": self.context, "--ranks": self.pipeline}
        product, names = 1, []
        for name, value in fixed.items():
            if value is not None:
                product *= value
                names.append(f"{name} {value}")
        problems = []
        if self.devices % product:
            near = max(product, self.devices - self.devices % product)
            given = " x ".join(names)
            problems.append(f"{given} does not divide --devices {self.devices}: try --devices {near}")
        blocks = self.config.layers
        if self.pipeline is not None and self.pipeline > blocks:
            problems.append(
                f"--ranks {self.pipeline}: {self.config.name} has {plural(blocks, 'block')}, one for each rank "
                "at least"
            )
        return problems

    def _unknown_families(self) -> list[str]:
        known = {name for names in families_by_traits().values() for name in names}
        unknown = (name for name in self.families if name not in known)
        return [
            f"--schedules are of {listed(sorted(known))} (given {printable(name)}){did_you_mean(name, known)}"
            for name in unknown
        ]

    def _sizes_without_the_model(self) -> list[str]:
        """Sizes that are given and do not divide heads, experts, width or sequence."""
        expert = self.expert or 1
        fixed = Setting(
            *(self.sequence, 1, self.tensor or 1, self.context or 1, expert, expert),
            precision=self.precision,
            zero=self.zero,
            recompute=self.recompute or "none",
        )
        try:
            fixed.check(self.config)
            self.device.peak(self.precision)
        except EstimateError as error:
            return [str(error)]
        return []
