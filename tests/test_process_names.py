"""Promise: the name of a process says where it is, and whether it still exists if that is here."""

from __future__ import annotations

import os
import subprocess
import sys

from penstock.processes import has_ended, local_pid, process_name


def test_a_name_has_the_pid_of_a_process_on_this_machine() -> None:
    assert local_pid(process_name()) == os.getpid()
    assert local_pid(f"pid {os.getpid()} on another.machine") is None


def test_only_processes_of_this_machine_are_known_to_have_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    gone = process_name().replace(str(os.getpid()), str(child.pid))
    assert has_ended(gone)
    assert not has_ended(process_name())
    assert not has_ended(f"pid {child.pid} on another.machine")
