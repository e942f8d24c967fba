"""Checks whether this machine has what Penstock needs; no check raises or hangs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import numpy as np

from penstock.arguments import install_command
from penstock.processes import call_within, free_port, usable_cores

Verdict = Literal["ok", "warn", "fail"]

EXTRAS = {
    "torch": ("training", "torch", "safetensors"),
    "view": ("PNG pictures", "PIL"),
    "search": ("fast and exact search", "numba", "ortools"),
    "serve": ("the playground", "starlette", "uvicorn"),
}
"""What each extra is for, and the modules that it installs."""

TORCH_TIMEOUT_SECONDS = 120
_GLOO_ADVICE = (
    "gloo needs a resolvable host name or an interface: see the names above, or set GLOO_SOCKET_IFNAME=lo"
)
RESOLUTION_TIMEOUT_SECONDS = 5.0
SLOW_RESOLUTION_SECONDS = 1.0
TORCHRUN_PORT = 29500
COARSE_CLOCK_SECONDS = 1e-6
LOW_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class Check:
    """The result of one check; the message says what to try if the verdict is not ok."""

    name: str
    verdict: Verdict
    message: str


def core_checks(version: str) -> list[Check]:
    """The versions of Python, Penstock and numpy, which the core needs."""
    return [
        Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Check("penstock", "ok", version),
        Check("numpy", "ok", np.__version__),
    ]


def extra_checks() -> list[Check]:
    """Which extras are installed; a missing extra is a warning, because some commands need it."""
    found = []
    for extra, (purpose, *modules) in EXTRAS.items():
        message = f"installed ({', '.join(modules)})"
        if missing := [name for name in modules if not _is_installed(name)]:
            message = f"{', '.join(missing)} not installed; for {purpose}: {install_command(extra)}"
        found.append(Check(f"extra {extra}", "warn" if missing else "ok", message))
    return found


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # sys.modules has None for it, so that it cannot be imported
        return False


def machine_checks() -> list[Check]:
    """Cores, memory, clock and ports."""
    return [_cores(), _memory(), _clock(), _free_ports(), _torchrun_port()]


def _cores() -> Check:
    count = usable_cores()
    if count > 1:
        return Check("cores", "ok", str(count))
    return Check("cores", "warn", "1: ranks on this machine share it, so measured times are not meaningful")


def _memory() -> Check:
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}) else "SC_PHYS_PAGES"
    try:
        free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return Check("memory", "ok", "free memory is unknown on this system")
    shown = f"{free / (1 << 30):.1f} GiB free"
    if free >= LOW_MEMORY_BYTES:
        return Check("memory", "ok", shown)
    return Check("memory", "warn", f"{shown}: every rank needs about 0.3 GiB without any parameters")


def _clock() -> Check:
    info = time.get_clock_info("perf_counter")
    step = min(_ticks())
    shown = f"{'monotonic' if info.monotonic else 'NOT monotonic'}, resolution {step * 1e9:.0f} ns"
    if not info.monotonic:
        return Check("clock", "fail", f"{shown}: it may go backwards, so measured timelines would be wrong")
    if step > COARSE_CLOCK_SECONDS:
        return Check("clock", "warn", f"{shown}: too coarse to profile short actions")
    return Check("clock", "ok", shown)


def _ticks() -> list[float]:
    found = []
    for _ in range(20):
        begin = time.perf_counter()
        while (now := time.perf_counter()) == begin:
            pass
        found.append(now - begin)
    return found


def _free_ports(count: int = 16) -> Check:
    with contextlib.ExitStack() as sockets:
        try:
            for _ in range(count):
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", 0))
        except OSError as error:
            none = f"no free TCP port on 127.0.0.1 ({error.strerror})"
            return Check("ports", "fail", f"{none}: ranks need free ports")
    return Check("ports", "ok", f"{count} free TCP ports found on 127.0.0.1")


def _torchrun_port(port: int = TORCHRUN_PORT) -> Check:
    name = f"port {port}"
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind(("127.0.0.1", port))
        except OSError as error:
            status = "in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
            message = f"{status}; it is torchrun's default: give --standalone or --master-port"
            return Check(name, "warn", message)
    return Check(name, "ok", "free; it is torchrun's default")


def name_checks() -> list[Check]:
    """Whether names resolve, and fast: torch and gloo resolve both ends of every connection."""
    host = socket.gethostname()
    return [
        _resolution(
            "host name",
            f"{host!r}",
            lambda: str(socket.getaddrinfo(host, None)[0][4][0]),
            f"add it to /etc/hosts ('127.0.0.1 {host}'), or set an interface: GLOO_SOCKET_IFNAME=lo "
            "(e.g. eth0 for several machines)",
        ),
        _resolution(
            "loopback name",
            "127.0.0.1",
            lambda: socket.getnameinfo(("127.0.0.1", 0), 0)[0],
            "add '127.0.0.1 localhost' to /etc/hosts, or set RES_OPTIONS='timeout:1 attempts:1': torch "
            "resolves it at every connection",
        ),
    ]


def _resolution(name: str, what: str, resolve: Callable[[], str], advice: str) -> Check:
    begin = time.monotonic()
    try:
        address = call_within(RESOLUTION_TIMEOUT_SECONDS, resolve)
    except TimeoutError:
        return Check(name, "warn", f"{what} was not resolved within {RESOLUTION_TIMEOUT_SECONDS:g} s: {advice}")
    except OSError as error:
        return Check(name, "warn", f"{what} cannot be resolved ({error.strerror}): {advice}")
    seconds = time.monotonic() - begin
    if seconds > SLOW_RESOLUTION_SECONDS:
        return Check(name, "warn", f"resolving {what} took {seconds:.1f} s: {advice}")
    return Check(name, "ok", f"{what} is {address}")


def torch_checks(seconds: int = TORCH_TIMEOUT_SECONDS) -> list[Check]:
    """Checks of torch in two processes, so that a crash or hang of torch does not affect this one."""
    port = free_port()
    started = [
        subprocess.Popen(  # noqa: S603 -- our own module
            [sys.executable, "-m", "penstock.runtime.doctor", str(rank), str(port), str(seconds // 2)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        for rank in range(2)
    ]
    end = time.monotonic() + seconds
    outputs = [_output_of(process, end) for process in started]
    checks = [Check(**json.loads(line)) for line in outputs[0][0].splitlines() if line.startswith("{")]
    if not any(check.name == "exchange" for check in checks):
        reason = next((error for _, error in outputs if error), f"they did not end within {seconds} s")
        failure = f"two processes could not exchange a tensor: {reason}; {_GLOO_ADVICE}"
        checks.append(Check("exchange", "fail", failure))
    return checks


def _output_of(process: subprocess.Popen[str], end: float) -> tuple[str, str]:
    """The stdout of a process and the last line of its stderr if it failed; killed after the deadline."""
    try:
        out, err = process.communicate(timeout=max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        return out, ""
    lines = [line for line in err.splitlines() if line.strip()]
    if process.returncode == 0:
        return out, ""
    return out, lines[-1] if lines else f"it ended with code {process.returncode}"
