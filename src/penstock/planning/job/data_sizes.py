"""Data parallel sizes of a job: those that its batch allows and excludes, and batches that allow more."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from penstock.arguments import some
from penstock.planning.job.layouts import divides_batch, parallel_sizes
from penstock.planning.job.request import JobRequest


@dataclass(frozen=True)
class DataSizes:
    """The data parallel sizes of all divisions of the devices, by whether they divide the batch."""

    request: JobRequest
    allowed: tuple[int, ...]
    excluded: tuple[int, ...]

    @property
    def nearest_batches(self) -> dict[int, tuple[int, ...]]:
        """The next smaller and the next larger batch that keep every allowed size, with the sizes they add."""
        batch, least = self.request.batch, self.request.microbatch_size or 1
        common = lcm(*self.allowed) * least
        steps = {lcm(common, size * least) for size in self.excluded}
        smaller = max((step * ((batch - 1) // step) for step in steps), default=0)
        larger = min((step * (batch // step + 1) for step in steps), default=0)
        return {
            near: tuple(size for size in self.excluded if divides_batch(near, size, least))
            for near in (smaller, larger)
            if near > 0
        }

    def __str__(self) -> str:
        """The rule that excludes sizes, and what to try; empty if none is excluded."""
        if not self.excluded:
            return ""
        fixed, verb = self.request.microbatch_size, "are" if len(self.excluded) > 1 else "is"
        size = "microbatch size" if fixed is None else f"--microbatch-size {fixed}"
        nearest = (
            f"--batch {near} also allows DP {some(added)}" for near, added in self.nearest_batches.items()
        )
        return (
            f"DP {some(self.excluded)} {verb} left out: --batch {self.request.batch} must be divisible by "
            f"DP x {size}; {', '.join(nearest)}"
        )


def data_sizes(request: JobRequest) -> DataSizes:
    """The data parallel sizes of a request."""
    every = sorted({data for _, _, _, data in parallel_sizes(request)})
    least = request.microbatch_size or 1
    allowed = tuple(size for size in every if divides_batch(request.batch, size, least))
    return DataSizes(request, allowed, tuple(size for size in every if size not in allowed))
