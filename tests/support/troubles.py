"""The troubles of docs/troubleshooting.md in one process: each function raises or returns the quoted text."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import penstock
from penstock import Costs, diagnostics
from penstock.runtime import Pipeline, load_checkpoint, save_checkpoint, split
from penstock.view.png import png

__all__ = ["ALONE", "model", "step"]

ALONE: dict[str, Callable[[], object]] = {}
"""Troubles of one process: what they raise is the text, or what they return."""


def alone(trouble: Callable[[], object]) -> Callable[[], object]:
    ALONE[trouble.__name__] = trouble
    return trouble


def model(stages: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(stages)))


def pipeline(**options: Any) -> Pipeline:
    given: dict[str, Any] = {"microbatches": 4, "loss": mse_loss} | options
    return Pipeline([model()], "1f1b", **given)


def step(made: Pipeline, rows: int = 8) -> None:
    made.step(torch.randn(rows, 4), target=torch.randn(rows, 4))


# --- schedules and files ---------------------------------------------------------------------------


@alone
def deadlock() -> str:
    return str(penstock.validate(penstock.Schedule.parse("0F0 0B0 0F1 0B1 | 1F1 1B1 1F0 1B0"))[0])


@alone
def missing_backward() -> str:
    return str(penstock.validate(penstock.Schedule.parse("0F0 0F1 0B0"))[0])


@alone
def lowering_a_bad_schedule() -> object:
    return penstock.lower(penstock.Schedule.parse("0B0 0F0"))


@alone
def unknown_family() -> object:
    return penstock.build("1f1c", ranks=4, microbatches=8)


@alone
def stages_per_rank() -> object:
    return penstock.build("zbv", ranks=4, microbatches=8, stages_per_rank=3)


@alone
def bad_csv() -> object:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.csv").write_text("0F0,0B0\n1F0,1X0\n", encoding="utf-8")
        return penstock.read(Path(folder) / "mine.csv")


@alone
def bad_costs() -> object:
    return penstock.simulate(penstock.build("1f1b", ranks=4, microbatches=8), Costs(forward=(1, 1, 2)))


@alone
def missing_torch() -> str:
    code = "import sys; sys.modules['torch'] = None; import penstock.runtime"
    done = subprocess.run(  # noqa: S603 -- our own code
        [sys.executable, "-c", code], stderr=subprocess.PIPE, encoding="utf-8", check=False
    )
    return done.stderr


@alone
def missing_pillow() -> None:
    with mock.patch.dict(sys.modules, {"PIL": None}):
        png([penstock.simulate(penstock.build("1f1b", ranks=2, microbatches=2))])


# --- the machine -----------------------------------------------------------------------------------


@alone
def host_name() -> str:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with (
        mock.patch.object(socket, "gethostname", return_value="node7"),
        mock.patch.object(socket, "getaddrinfo", side_effect=unknown),
    ):
        return diagnostics.name_checks()[0].message


@alone
def slow_names() -> str:
    def late(*_: object) -> tuple[str, str]:
        time.sleep(1)
        return "localhost", "0"

    with (
        mock.patch.object(diagnostics, "RESOLUTION_TIMEOUT_SECONDS", 0.1),
        mock.patch.object(socket, "getnameinfo", late),
    ):
        return diagnostics.name_checks()[1].message


@alone
def port_taken() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        return diagnostics._torchrun_port(taken.getsockname()[1]).message


# --- making a pipeline -----------------------------------------------------------------------------


@alone
def wrong_number_of_ranks() -> object:
    return Pipeline([model()], penstock.build("1f1b", ranks=4, microbatches=8), loss=mse_loss)


@alone
def no_microbatches() -> object:
    return Pipeline([model()], "1f1b", loss=mse_loss)


@alone
def one_module() -> object:
    return Pipeline(model(), "1f1b", microbatches=4, loss=mse_loss)  # type: ignore[arg-type]


@alone
def wrong_number_of_stages() -> object:
    schedule = penstock.build("zbv", ranks=1, microbatches=4)
    return Pipeline([model()], schedule, loss=mse_loss)


@alone
def meta_device() -> object:
    with torch.device("meta"):
        return Pipeline([model()], "1f1b", microbatches=4, loss=mse_loss)


@alone
def cannot_be_split() -> object:
    return split(nn.TransformerEncoderLayer(8, 2), at=["linear1"])


@alone
def partly_sharded() -> None:
    """One child of two is sharded, the stage itself is not."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        stage = model()
        fully_shard(stage[0], mesh=init_device_mesh("cpu", (1,)))
        step(Pipeline([stage], "1f1b", microbatches=4, loss=mse_loss))
    finally:
        dist.destroy_process_group()


# --- a step ----------------------------------------------------------------------------------------


@alone
def too_few_rows() -> None:
    step(pipeline(), rows=3)


@alone
def no_target() -> None:
    pipeline().step(torch.randn(8, 4))


@alone
def detached_loss() -> None:
    step(pipeline(loss=lambda output, target: mse_loss(output, target).detach()))


@alone
def not_finite() -> None:
    pipeline(check_finite=True).step(torch.full((8, 4), torch.inf), target=torch.zeros(8, 4))


@alone
def other_checkpoint() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder) / "last", model(1))
        load_checkpoint(Path(folder) / "last", nn.Sequential(nn.Linear(4, 5)))


@alone
def damaged_checkpoint() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder) / "last", model(1))
        data = Path(folder) / "last" / "__0_0.distcp"
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
        load_checkpoint(Path(folder) / "last", model(1))


@alone
def mixed_checkpoint() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("old", "last"):
            save_checkpoint(Path(folder) / name, model(1))
        shutil.copy(Path(folder) / "old" / "__0_0.distcp", Path(folder) / "last")
        load_checkpoint(Path(folder) / "last", model(1))


@alone
def no_checkpoint() -> None:
    load_checkpoint("runs/lost", model())
