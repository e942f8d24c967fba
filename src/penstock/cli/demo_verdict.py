"""The verdict of `penstock demo`: one sentence that compares the measured gain with the noise of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, stdev

__all__ = ["Gain", "measured_gain"]

_Z = 1.96  # 95 % of a normal distribution


@dataclass(frozen=True)
class Gain:
    """How much faster the schedule found is than the first one, as shares of the first one's step time."""

    measured: float
    noise: float
    """Half of the 95 % confidence interval of `measured`; `inf` for a single pair of steps."""
    predicted: float
    steps: int
    same_order: bool = False
    """Whether the search gave back the order of the first schedule."""

    @property
    def headline(self) -> str:
        """The result in one sentence, for someone who does not know schedules."""
        if self.same_order:
            return "1f1b is already the best schedule that the search finds for this machine and its memory."
        if abs(self.measured) <= self.noise:
            return "The schedule found and 1f1b are equally fast, as far as this run can tell."
        return (
            f"The schedule found trains {_change(self.measured)} than 1f1b, with the same memory and the same "
            f"results.{'' if self.measured > 0 else ' Keep 1f1b on this machine.'}"
        )

    @property
    def reason(self) -> str:
        """The gain, the noise, and what was predicted."""
        chance = f"with {self.steps} steps of each, up to {self.noise:.1%} is chance"
        if self.noise == inf:
            chance = "one step of each is too few to tell a gain from chance"
        if self.same_order:
            return f"There was nothing else to measure; {chance}."
        within = "within" if abs(self.measured) <= self.noise else "more than"
        busy = (
            " Other programs seem to use this machine: repeat it when they do not." if self.noise > 0.1 else ""
        )
        return (
            f"Measured: {_change(self.measured)} per step, which is {within} the noise of this run: {chance}. "
            f"The simulator predicted {_change(self.predicted)}.{busy}"
        )


def measured_gain(
    first: Sequence[float], found: Sequence[float], predicted: float, *, same_order: bool
) -> Gain:
    """The gain over pairs of steps, each measured one after the other, so that load changes both."""
    differences = [before - after for before, after in zip(first, found, strict=True)]
    whole, count = fmean(first), len(differences)
    noise = inf if count < 2 else _quantile(count - 1) * stdev(differences) / sqrt(count) / whole
    return Gain(fmean(differences) / whole, noise, predicted, count, same_order)


def _quantile(freedom: int) -> float:
    """Student's t for 95 %, by the expansion of Cornish and Fisher: 2.26 for 9 degrees of freedom."""
    first = (_Z**3 + _Z) / (4 * freedom)
    return _Z + first + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)


def _change(gain: float) -> str:
    if abs(gain) < 0.0005:
        return "0.0% faster"
    return f"{abs(gain):.1%} {'faster' if gain > 0 else 'slower'}"
