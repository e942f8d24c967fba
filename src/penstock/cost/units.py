"""Times and sizes as text: seconds and bytes in a fitting unit, or units and activations of relative costs.

    real costs       18.52 ms    1.5 GiB
    unit costs       33 units    4 activations

Every command and every view takes its numbers from here; `Costs.units` says which of the two a cost model has.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import floor, inf, isfinite, log2, log10
from typing import NamedTuple

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_PLURALS = ("units", "activations")
_COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Scale(NamedTuple):
    """A common unit for the numbers of a column or an axis."""

    size: float
    """How much one of it is, in seconds or bytes."""
    name: str

    def number(self, value: float, digits: int = 5) -> str:
        """The value in this unit, without its name."""
        return number_text(value / self.size, digits)

    def text(self, value: float, digits: int = 5) -> str:
        """The value in this unit, with its name."""
        number = self.number(value, digits)
        return f"{number} {self.name[:-1] if number == '1' and self.name in _PLURALS else self.name}"


class Units(NamedTuple):
    """Whether times are seconds and sizes are bytes; otherwise they are units of time and activations."""

    seconds: bool = True
    bytes: bool = True

    @property
    def time_name(self) -> str:
        """`seconds` or `units`."""
        return "seconds" if self.seconds else "units"

    @property
    def memory_name(self) -> str:
        """`bytes` or `activations`."""
        return "bytes" if self.bytes else "activations"

    @classmethod
    def common(cls, each: Iterable[Units]) -> Units:
        """Of several cost models in one picture: real as soon as one of them is."""
        found = list(each)
        return cls(any(units.seconds for units in found), any(units.bytes for units in found))

    def time_scale(self, longest: float) -> Scale:
        """The unit for times up to this one."""
        return _second_scale(longest) if self.seconds else Scale(1.0, _PLURALS[0])

    def memory_scale(self, largest: float) -> Scale:
        """The unit for sizes up to this one."""
        return _byte_scale(largest) if self.bytes else Scale(1.0, _PLURALS[1])

    def time(self, value: float, digits: int = 5) -> str:
        """A time: `18.52 ms` or `33 units`."""
        return self.time_scale(abs(value)).text(value, digits)

    def memory(self, value: float, digits: int = 4) -> str:
        """A size in memory: `1.5 GiB` or `4 activations`."""
        return self.memory_scale(value).text(value, 3 if self.bytes else digits)

    def column(self, name: str, longest: float) -> str:
        """The head of a column of times: `makespan, ms`, or just the name at unit costs."""
        return f"{name}, {self.time_scale(longest).name}" if self.seconds else name


def _second_scale(longest: float) -> Scale:
    fitting = (Scale(size, name) for size, name in _SECONDS if longest >= size)
    return next(fitting, Scale(*_SECONDS[-1] if longest > 0 else _SECONDS[0]))


def _byte_scale(largest: float) -> Scale:
    power = min(int(log2(largest)) // 10, len(_BYTES) - 1) if 1 <= largest < inf else 0
    return Scale(1024.0**power, _BYTES[power])


def seconds_text(seconds: float, digits: int = 4) -> str:
    """Seconds in a fitting unit."""
    return _second_scale(abs(seconds)).text(seconds, digits)


def bytes_text(count: float) -> str:
    """Bytes in a fitting unit."""
    return _byte_scale(count).text(count, 3)


def count_text(number: float, unit: str = "", digits: int = 3) -> str:
    """A large count with its decimal prefix: `312 TFLOPs`."""
    for factor, letter in _COUNTS:
        if number >= factor:
            return f"{number_text(number / factor, digits)} {letter}{unit}"
    return f"{number_text(number, digits)} {unit}".rstrip()


def number_text(value: float, digits: int = 5) -> str:
    """A number of so many significant digits, all digits of its whole part, and no exponent above 1e-4."""
    if not isfinite(value):
        return f"{value:g}"
    if value and floor(log10(abs(value))) + 1 >= digits:
        return f"{value:.0f}"
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e+" in text else text
