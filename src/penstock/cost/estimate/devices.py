"""Devices and their links: the data file `devices.toml`, or a file of the user with the same keys."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any

from penstock.arguments import did_you_mean, printable
from penstock.cost.estimate.operations import Passes
from penstock.errors import EstimateError, FormatError, Parameter
from penstock.formats.files import read_keys


@dataclass(frozen=True)
class Attainable:
    """The share of each peak that large operations reach, and the seconds that each kernel adds."""

    matmul: float
    attention: float
    memory: float
    links: float
    kernel_seconds: float
    passes: Passes = Passes(1.0, 1.0, 1.0)
    """Factors on the seconds of each pass, 1 unless fitted to a measurement."""
    whole_backward: float = 1.0
    """Seconds of a whole backward over those of its two gradients run apart, 1 unless fitted."""


@dataclass(frozen=True)
class Device:
    """Peak rates and links of a device; links are those of one device in one direction, in bytes per second."""

    name: str
    source: str
    peak_flops: dict[str, float]
    """FLOP/s by precision."""
    memory_bytes: float
    memory_bandwidth: float
    node_devices: int
    """Devices of a node, which `node_link` connects."""
    node_link: float
    node_latency_seconds: float
    network_link: float
    """Between nodes."""
    network_latency_seconds: float
    host_link: float
    attainable: Attainable
    node_peer_link: float = inf
    """Between two devices of a node, if that is less than `node_link`, which then needs several of them."""

    def peak(self, precision: str) -> float:
        """FLOP/s of matrix products."""
        if precision not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise EstimateError(f"{self.name} has no {precision}: use ", Parameter("precision"), f" {known}")
        return self.peak_flops[precision]


@cache
def devices() -> dict[str, Device]:
    """Return every known device by name."""
    with resources.as_file(resources.files(__package__).joinpath("devices.toml")) as path:
        document: Any = read_keys(path)
    return {name: _device(keys, name, "devices.toml") for name, keys in document.items()}


def device(name: str) -> Device:
    """A known device by its name in any case, or the one that a `.toml` or `.json` file describes."""
    if Path(name).suffix.lower() in (".toml", ".json"):
        return _device(read_keys(name), Path(name).stem, name)
    found = devices().get(name.lower())
    if found is None:
        meant = did_you_mean(name, devices()) or ";"
        raise EstimateError(
            f"no device is called {printable(name)!r}{meant} known are {', '.join(devices())}, or a .toml file "
            "with the keys of one of these"
        )
    return found


def _device(keys: object, name: str, source: str) -> Device:
    if not isinstance(keys, dict):
        raise FormatError(source, ["a device is a table with keys such as peak_flops, memory_bytes"])
    wanted = {each.name for each in fields(Device)} - {"name"}
    problems = [f"missing {key}" for key in sorted(wanted - set(keys) - {"node_peer_link"})]
    problems += [f"{printable(str(key))}: unknown key of a device" for key in keys if key not in wanted]
    attainable, peaks = keys.get("attainable"), keys.get("peak_flops")
    shares = {each.name for each in fields(Attainable)} - {"passes", "whole_backward"}
    if not isinstance(attainable, dict) or set(attainable) != shares:
        problems.append(f"attainable: must have {', '.join(sorted(shares))}")
    if not isinstance(peaks, dict) or not peaks:
        problems.append("peak_flops: must have FLOP/s by precision, e.g. { bf16 = 312e12 }")
    numbers = [(key, keys.get(key)) for key in wanted - {"source", "attainable", "peak_flops"}]
    for group in (attainable, peaks):
        numbers += group.items() if isinstance(group, dict) else []
    problems += [
        f"{key}: must be a number above 0 (given {printable(repr(value))})"
        for key, value in numbers
        if value is not None and not (isinstance(value, int | float) and value > 0)
    ]
    if problems:
        raise FormatError(source, [f"{name}: {each}" for each in problems])
    return Device(name, **{**keys, "attainable": Attainable(**keys["attainable"])})
