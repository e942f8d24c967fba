"""Hosts on this machine: network namespaces, each with an address, a host name and a file of names of its own.

       host 0: eth0 --- port0 |        |
                              | bridge |   in a namespace of its own
       host 1: eth0 --- port1 |        |

A link that is cut gives no sign to TCP, as a cable that is pulled: packets are lost in both directions. Nothing
leaves the namespaces. They end with `close`, and those of a killed run with the next one.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Host", "Hosts", "hosts_on_this_machine", "why_no_hosts"]

_NAMESPACES = Path("/run/netns")
_PREFIX = "penstock"
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_count = itertools.count()


@dataclass(frozen=True)
class Host:
    """One host; any process can enter it."""

    number: int
    namespace: str
    names: str
    """Its file of names, /etc/hosts inside."""

    @property
    def name(self) -> str:
        """The name that `socket.gethostname()` gives inside."""
        return f"host{self.number}"

    @property
    def address(self) -> str:
        """The address at which the other hosts reach it."""
        return f"10.77.0.{self.number + 1}"

    def enter(self) -> None:
        """Move this process, which must have one thread, and its children to the host."""
        with (_NAMESPACES / self.namespace).open() as file:
            _call("setns", file.fileno(), _CLONE_NEWNET)
        _call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
        _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        _call("mount", self.names.encode(), b"/etc/hosts", None, _MS_BIND, None)
        socket.sethostname(self.name)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], directory: Path
    ) -> subprocess.Popen[str]:
        """Start a command on this host; stderr is a part of its output."""
        entering = [sys.executable, "-m", "tests.support.hosts", str(self.number), self.namespace, self.names]
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(  # noqa: S603 -- our own commands
            [*entering, *command],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@dataclass(frozen=True)
class Hosts:
    """Hosts that reach each other; any process, also one that has entered a host, can cut their links."""

    switch: str
    """The namespace of the bridge."""
    all: tuple[Host, ...]

    def cut(self, number: int) -> None:
        """Cut the link of a host, so that it and the others lose all packets to each other."""
        _ip("-n", self.switch, "link", "set", f"port{number}", "down")

    def restore(self, number: int) -> None:
        """Connect the host again."""
        _ip("-n", self.switch, "link", "set", f"port{number}", "up")


@contextmanager
def hosts_on_this_machine(count: int, *, loopback_names: bool = False) -> Iterator[Hosts]:
    """So many hosts with the interface eth0, as long as the context lasts; each knows the names of all.

    With `loopback_names` the name of a host is 127.0.1.1 on the host itself, as some installers set it.
    """
    _remove_leftovers()
    run = f"{_PREFIX}-{os.getpid()}-{next(_count)}"
    with tempfile.TemporaryDirectory() as folder:
        every = tuple(Host(number, f"{run}-{number}", f"{folder}/{number}") for number in range(count))
        hosts = Hosts(f"{run}-switch", every)
        try:
            _ip("netns", "add", hosts.switch)
            _ip("-n", hosts.switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", hosts.switch, "link", "set", "bridge", "up")
            for host in every:
                _write_names(host, every, loopback_names=loopback_names)
                _add(host, hosts.switch)
            yield hosts
        finally:
            _remove(run)


def _write_names(host: Host, every: Sequence[Host], *, loopback_names: bool) -> None:
    lines = ["127.0.0.1 localhost"]
    lines += [f"127.0.1.1 {host.name}"] if loopback_names else []
    for other in every:
        if other is not host or not loopback_names:
            # torch also looks up the names of addresses in the notation of IPv6
            lines += [f"{other.address} {other.name}", f"::ffff:{other.address} {other.name}"]
    Path(host.names).write_text("\n".join(lines) + "\n", encoding="ascii")


def _add(host: Host, switch: str) -> None:
    port = f"port{host.number}"
    _ip("netns", "add", host.namespace)
    _ip("-n", host.namespace, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for interface in ("lo", "eth0"):
        _ip("-n", host.namespace, "link", "set", interface, "up")


@cache
def why_no_hosts() -> str:
    """Why this machine cannot have hosts; empty if it can."""
    if sys.platform != "linux":
        return "network namespaces are a feature of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command `ip` (iproute2) is not installed"
    try:
        with hosts_on_this_machine(1) as hosts, hosts.all[0].start(["true"], {}, Path()) as entered:
            output, _ = entered.communicate()
            return "" if entered.returncode == 0 else f"namespaces cannot be entered: {output.strip()}"
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be created: {getattr(error, 'stderr', None) or error}"


def _remove(run: str) -> None:
    """Remove the namespaces of a run; links end with them."""
    for namespace in _NAMESPACES.glob(f"{run}-*"):
        with suppress(subprocess.CalledProcessError):  # another run has removed it
            _ip("netns", "del", namespace.name)


def _remove_leftovers() -> None:
    """Remove the namespaces of runs whose process has ended."""
    runs = {"-".join(each.name.split("-")[:2]) for each in _NAMESPACES.glob(f"{_PREFIX}-*-*")}
    for run in runs:
        if not Path("/proc", run.split("-")[1]).exists():
            _remove(run)


def _ip(*arguments: str) -> None:
    command = [shutil.which("ip") or "ip", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 -- our own arguments


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library, of which Python 3.11 has none for namespaces."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


if __name__ == "__main__":  # enter a host, and become a command there
    number, namespace, names, *command = sys.argv[1:]
    Host(int(number), namespace, names).enter()
    os.execvp(command[0], command)  # noqa: S606 -- no shell is needed
