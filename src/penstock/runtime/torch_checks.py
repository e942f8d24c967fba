"""The checks that `penstock doctor` runs in two processes: the torch installation, and an exchange over gloo.

Each process prints one line of JSON per check, so that the parent knows how far it came if it hangs.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.arguments import install_command
from penstock.diagnostics import Check
from penstock.runtime.torch_internals.registry import VERIFIED, all_features, missing

TESTED_WITH = tuple(int(part) for part in VERIFIED[0].split("."))


def main() -> None:
    """Run one of the two processes; its arguments are its rank, the rendezvous port, and a timeout."""
    rank, port, seconds = (int(argument) for argument in sys.argv[1:])
    for check in torch_checks():
        print(json.dumps(asdict(check)), flush=True)  # noqa: T201 -- for the parent process
    print(json.dumps(asdict(_exchange(rank, port, seconds))), flush=True)  # noqa: T201
    for check in internals_checks() if rank == 0 else ():
        print(json.dumps(asdict(check)), flush=True)  # noqa: T201


def torch_checks() -> list[Check]:
    """The version of torch, and its backends."""
    return [_version(torch.__version__), _gloo(), _gpus()]


def _version(installed: str) -> Check:
    wanted = ".".join(map(str, TESTED_WITH))
    found = tuple(int(part) for part in installed.split(".")[:2])
    if found < TESTED_WITH:
        return Check("torch", "fail", f"{installed}, older than {wanted}: {install_command('torch')}")
    if found > TESTED_WITH:
        return Check(
            "torch",
            "warn",
            f"{installed}; tested with {wanted}: private names may have changed: see internals",
        )
    return Check("torch", "ok", f"{installed} (tested with {wanted})")


def _gloo() -> Check:
    if dist.is_available() and dist.is_gloo_available():
        return Check("gloo", "ok", "in this build of torch")
    return Check("gloo", "fail", "not in this build of torch: install one that has torch.distributed")


def _gpus() -> Check:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        if built is None:
            return Check("gpu", "ok", "none, and torch is built without GPU support: ranks run on CPUs")
        return Check("gpu", "warn", f"torch is built for {built} but finds no GPU: check the driver")
    if not dist.is_nccl_available():
        return Check("gpu", "fail", "there are GPUs, but NCCL is not in this build of torch")
    found = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return Check("gpu", "warn", f"{found}, with NCCL; Penstock's path over NCCL is written but not tested")


def internals_checks() -> list[Check]:
    """Return the features whose private names of torch are all there, and a warning for each other feature."""
    lost = {feature: missing(feature.names) for feature in all_features()}
    present = [feature.title for feature, names in lost.items() if not names]
    found = f"torch has the private names that these features need: {', '.join(present)}"
    return [
        Check("internals", "ok", found),
        *(
            Check(
                "internals",
                "warn",
                f"{feature.title}: torch has no {', '.join(names)}; {feature.without} works",
            )
            for feature, names in lost.items()
            if names
        ),
    ]


def _exchange(rank: int, port: int, seconds: int) -> Check:
    """Rank 0 sends three numbers, rank 1 sends them back doubled."""
    begin = time.monotonic()
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timeout=limit, rank=rank, world_size=2)
    numbers = torch.arange(3.0)
    if rank == 0:
        dist.send(numbers, 1)
        dist.recv(numbers, 1)
    else:
        dist.recv(numbers, 0)
        dist.send(2 * numbers, 0)
    dist.destroy_process_group()
    elapsed = time.monotonic() - begin
    if rank == 0 and numbers.tolist() != [0.0, 2.0, 4.0]:
        return Check("exchange", "fail", f"two processes exchanged [0, 1, 2] and received {numbers.tolist()}")
    return Check("exchange", "ok", f"two processes connected and exchanged a tensor in {elapsed:.1f} s")


if __name__ == "__main__":
    main()
