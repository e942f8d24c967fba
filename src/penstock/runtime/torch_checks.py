"""What `penstock doctor` runs in two processes of their own: what torch is like here, and whether gloo works.

Each prints lines of JSON as it goes, so that whoever started it knows how far it came if it does not end.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.diagnostics import Check

__all__ = ["TESTED_WITH", "main", "torch_checks"]

TESTED_WITH = (2, 13)


def main() -> None:
    """One of the two: its rank, the port to meet at, and how many seconds that may take."""
    rank, port, seconds = (int(word) for word in sys.argv[1:])
    for check in torch_checks():
        print(json.dumps(asdict(check)), flush=True)  # noqa: T201 -- to the process that started this one
    print(json.dumps(asdict(_exchange(rank, port, seconds))), flush=True)  # noqa: T201


def torch_checks() -> list[Check]:
    """The version of torch, and the backends it has."""
    return [_version(torch.__version__), _gloo(), _gpus()]


def _version(given: str) -> Check:
    wanted = ".".join(map(str, TESTED_WITH))
    found = tuple(int(part) for part in given.split(".")[:2])
    if found < TESTED_WITH:
        return Check("torch", "fail", f"{given}, older than {wanted}: pip install 'penstock[torch]'")
    if found > TESTED_WITH:
        return Check(
            "torch",
            "warn",
            f"{given}; tested with {wanted}: sharded stages reach into fields of FSDP2 that may have changed",
        )
    return Check("torch", "ok", f"{given} (tested with {wanted})")


def _gloo() -> Check:
    if dist.is_available() and dist.is_gloo_available():
        return Check("gloo", "ok", "in this build of torch")
    return Check("gloo", "fail", "not in this build of torch: install one that has torch.distributed")


def _gpus() -> Check:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        if built is None:
            return Check("gpu", "ok", "none, and torch is built without: ranks run on CPUs")
        return Check("gpu", "warn", f"torch is built for {built} but finds no GPU: is there a driver?")
    if not dist.is_nccl_available():
        return Check("gpu", "fail", "there are GPUs, but NCCL is not in this build of torch")
    found = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return Check("gpu", "warn", f"{found}, with NCCL; Penstock's path over NCCL is written but not tested")


def _exchange(rank: int, port: int, seconds: int) -> Check:
    """Rank 0 sends three numbers, rank 1 gives them back doubled."""
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
    took = time.monotonic() - begin
    if rank == 0 and numbers.tolist() != [0.0, 2.0, 4.0]:
        return Check("exchange", "fail", f"two processes exchanged [0, 1, 2] and got {numbers.tolist()} back")
    return Check("exchange", "ok", f"two processes met and exchanged a tensor in {took:.1f} s")


if __name__ == "__main__":
    main()
