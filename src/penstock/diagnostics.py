"""Whether this machine has what Penstock needs: one `Check` for each thing; none raises, none hangs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, TypeVar

import numpy as np

__all__ = [
    "EXTRAS",
    "Check",
    "Verdict",
    "core_checks",
    "extra_checks",
    "machine_checks",
    "name_checks",
    "torch_checks",
]

Verdict = Literal["ok", "warn", "fail"]
T = TypeVar("T")

EXTRAS = {"torch": ("torch", "safetensors"), "view": ("PIL",), "search": ("numba", "ortools")}
"""What each extra brings, as it is imported."""
WHAT_FOR = {"torch": "to train", "view": "to draw PNG pictures", "search": "to search fast, and to prove"}

TORCH_SECONDS = 120
TO_DO = "gloo needs this machine's name or an interface: see the names above, or set GLOO_SOCKET_IFNAME=lo"
LOOKUP_SECONDS = 5.0
SLOW_LOOKUP_SECONDS = 1.0
TORCHRUN_PORT = 29500
COARSE_SECONDS = 1e-6
LITTLE_MEMORY = 1 << 30


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: how it is, and if it is not well, what to try."""

    name: str
    verdict: Verdict
    message: str


def core_checks(ours: str) -> list[Check]:
    """What the core is made of: if it runs at all, these are there. `ours` is the version of Penstock."""
    return [
        Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Check("penstock", "ok", ours),
        Check("numpy", "ok", np.__version__),
    ]


def extra_checks() -> list[Check]:
    """Which extras are installed; a missing one is no fault, but some commands need it."""
    found = []
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if not _is_installed(name)]
        found.append(
            Check(
                f"extra {extra}",
                "warn" if missing else "ok",
                f"{', '.join(missing)} not installed; {WHAT_FOR[extra]}: pip install 'penstock[{extra}]'"
                if missing
                else f"installed ({', '.join(modules)})",
            )
        )
    return found


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # somebody has put None in its place to say that it must not be imported
        return False


def machine_checks() -> list[Check]:
    """Cores, memory, clock and ports."""
    return [_cores(), _memory(), _clock(), _free_ports(), _torchrun_port()]


def _cores() -> Check:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count > 1:
        return Check("cores", "ok", str(count))
    return Check("cores", "warn", "1: ranks on this machine take turns, so times measured here mean little")


def _memory() -> Check:
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}) else "SC_PHYS_PAGES"
    try:
        free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return Check("memory", "ok", "this system does not say how much is free")
    shown = f"{free / (1 << 30):.1f} GiB free"
    if free >= LITTLE_MEMORY:
        return Check("memory", "ok", shown)
    return Check("memory", "warn", f"{shown}: every rank needs about 0.3 GiB before it holds any parameter")


def _clock() -> Check:
    info = time.get_clock_info("perf_counter")
    step = min(_ticks())
    shown = f"{'monotonic' if info.monotonic else 'NOT monotonic'}, in steps of {step * 1e9:.0f} ns"
    if not info.monotonic:
        return Check("clock", "fail", f"{shown}: it may jump back, so measured timelines would be wrong")
    if step > COARSE_SECONDS:
        return Check("clock", "warn", f"{shown}: too coarse to measure short actions in a profile")
    return Check("clock", "ok", shown)


def _ticks() -> list[float]:
    found = []
    for _ in range(20):
        begin = time.perf_counter()
        while (now := time.perf_counter()) == begin:
            pass
        found.append(now - begin)
    return found


def _free_ports(wanted: int = 16) -> Check:
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(wanted):
                opened.enter_context(socket.socket()).bind(("127.0.0.1", 0))
        except OSError as error:
            return Check("ports", "fail", f"no free TCP port on 127.0.0.1 ({error.strerror}): ranks need some")
    return Check("ports", "ok", f"{wanted} free TCP ports found on 127.0.0.1")


def _torchrun_port(port: int = TORCHRUN_PORT) -> Check:
    name = f"port {port}"
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError as error:
            taken = "taken" if error.errno == errno.EADDRINUSE else str(error.strerror)
            message = f"{taken}; torchrun takes it unless told otherwise: give --standalone or --master-port"
            return Check(name, "warn", message)
    return Check(name, "ok", "free; torchrun takes it unless told otherwise")


def name_checks() -> list[Check]:
    """Whether names are looked up, and soon: torch and gloo ask for those of both ends of a connection."""
    own = socket.gethostname()
    return [
        _looked_up(
            "host name",
            f"{own!r}",
            lambda: str(socket.getaddrinfo(own, None)[0][4][0]),
            f"add it to /etc/hosts ('127.0.0.1 {own}'), or name an interface: GLOO_SOCKET_IFNAME=lo "
            "(eth0 or the like for several machines)",
        ),
        _looked_up(
            "loopback name",
            "127.0.0.1",
            lambda: socket.getnameinfo(("127.0.0.1", 0), 0)[0],
            "have '127.0.0.1 localhost' in /etc/hosts, or RES_OPTIONS='timeout:1 attempts:1' in the "
            "environment: torch asks for it at every connection",
        ),
    ]


def _looked_up(name: str, what: str, ask: Callable[[], str], to_do: str) -> Check:
    begin = time.monotonic()
    try:
        answer = _within(LOOKUP_SECONDS, ask)
    except OSError as error:
        return Check(name, "warn", f"{what} cannot be looked up ({error.strerror}): {to_do}")
    if answer is None:
        return Check(name, "warn", f"{what} was not looked up within {LOOKUP_SECONDS:g} s: {to_do}")
    seconds = time.monotonic() - begin
    if seconds > SLOW_LOOKUP_SECONDS:
        return Check(name, "warn", f"looking up {what} took {seconds:.1f} s: {to_do}")
    return Check(name, "ok", f"{what} is {answer}")


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What `ask` gives, or None if it takes longer; a lookup cannot be called off, so it is left behind."""
    answers: list[T] = []
    faults: list[OSError] = []

    def try_it() -> None:
        try:
            answers.append(ask())
        except OSError as error:
            faults.append(error)

    asking = threading.Thread(target=try_it, daemon=True)
    asking.start()
    asking.join(seconds)
    if faults:
        raise faults[0]
    return answers[0] if answers else None


def torch_checks(seconds: int = TORCH_SECONDS) -> list[Check]:
    """What two processes with torch find out: whatever torch does there, this one goes on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun = [
        subprocess.Popen(  # noqa: S603 -- our own module
            [sys.executable, "-m", "penstock.runtime.torch_checks", str(rank), str(port), str(seconds // 2)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        for rank in range(2)
    ]
    end = time.monotonic() + seconds
    said = [_ended(process, end) for process in begun]
    checks = [Check(**json.loads(line)) for line in said[0][0].splitlines() if line.startswith("{")]
    if not any(check.name == "exchange" for check in checks):
        fault = next((err for _, err in said if err), f"they did not end within {seconds} s")
        checks.append(Check("exchange", "fail", f"two processes could not exchange a tensor: {fault}; {TO_DO}"))
    return checks


def _ended(process: subprocess.Popen[str], end: float) -> tuple[str, str]:
    """What a process printed, and the last line of its complaint; it is ended if it does not end."""
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
