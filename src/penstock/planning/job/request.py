"""The arguments of a job's plan, checked: all errors are reported at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from penstock.arguments import did_you_mean, listed, plural, printable
from penstock.cost.estimate.devices import Device
from penstock.cost.estimate.model_config import ModelConfig
from penstock.cost.estimate.parallel_config import ParallelConfig, size_problems
from penstock.cost.units import bytes_text
from penstock.errors import BuildError, EstimateError, Message, Parameter, PlanError
from penstock.families import build, families
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement

# What bounds depend on in a schedule family: stages per rank, placement, split backward, overlapped pairs.


_STAGES_PER_RANK = (2, 3, 4, 6, 8, 12)


class FamilyShape(NamedTuple):
    """What families have in common that have the same bound."""

    stages_per_rank: int
    is_v: bool
    split: bool
    paired: bool


@cache
def families_by_shape(only: tuple[str, ...] = ()) -> dict[FamilyShape, tuple[str, ...]]:
    """The training families, or only these, by what bounds depend on; those that offload are left out."""
    found: dict[FamilyShape, list[str]] = {}
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
            found.setdefault(FamilyShape(count, is_v, table.has(Kind.I), table.has_pairs), []).append(name)
    return {shape: tuple(names) for shape, names in found.items()}


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
        sizes = {name: getattr(self, name) for name in ("devices", "batch", "sequence")}
        for name in ("tensor", "context", "expert", "pipeline", "microbatch_size"):
            if (value := getattr(self, name)) is not None:
                sizes[name] = value
        problems = size_problems(sizes)
        if not problems:
            problems = [*self._sizes_that_do_not_divide(), *self._sizes_without_the_model()]
        problems += self._unknown_families()
        if not self.budget > 0:
            problems.append(Message(Parameter("budget"), f" must be a number above 0 (given {self.budget})"))
        if self.jitter is not None and not 0 <= self.jitter <= 1:
            must = f" must be a share from 0 to 1 (given {self.jitter})"
            problems.append(Message(Parameter("jitter"), must))
        if not 0 < self.quantile < 1:
            problems.append(Message(Parameter("quantile"), f" must be between 0 and 1 (given {self.quantile})"))
        if problems:
            raise PlanError(Message.join("; ", problems))

    def _sizes_that_do_not_divide(self) -> list[Message]:
        product, given, problems = 1, [], []
        for name in ("tensor", "context", "pipeline"):
            if (value := getattr(self, name)) is not None:
                product *= value
                given.append(Message(Parameter(name, value)))
        if self.devices % product:
            near = max(product, self.devices - self.devices % product)
            devices = Parameter("devices", self.devices), ": try ", Parameter("devices", near)
            problems.append(Message(Message.join(" x ", given), " does not divide ", *devices))
        blocks = self.config.layers
        if self.pipeline is not None and self.pipeline > blocks:
            few = f": {self.config.name} has {plural(blocks, 'block')}, one for each rank at least"
            problems.append(Message(Parameter("pipeline", self.pipeline), few))
        return problems

    def _unknown_families(self) -> list[Message]:
        known = {name for names in families_by_shape().values() for name in names}
        unknown = (name for name in self.families if name not in known)
        must = f" are of {listed(sorted(known))}"
        return [
            Message(Parameter("families"), f"{must} (given {printable(name)}){did_you_mean(name, known)}")
            for name in unknown
        ]

    def _sizes_without_the_model(self) -> list[Message]:
        """Sizes that are given and do not divide heads, experts, width or sequence."""
        expert = self.expert or 1
        fixed = ParallelConfig(
            *(self.sequence, 1, self.tensor or 1, self.context or 1, expert, expert),
            precision=self.precision,
            zero=self.zero,
            recompute=self.recompute or "none",
        )
        try:
            fixed.check(self.config)
            self.device.peak(self.precision)
        except EstimateError as error:
            return [error.message]
        return []
