"""Promise: a schedule that offloads trains to the same bits, and what is on the host is not on the device."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock import Kind, PipelineError, Schedule, StepFailedError, build, simulate
from penstock.lowering import Offload
from penstock.runtime import Pipeline
from penstock.runtime.stage.memory import HostStore, Offloadable, SavedTensors
from tests.support.pool import Pools
from tests.support.reference import TIMEOUT

# --- on one rank -----------------------------------------------------------------------------------


class Watched(nn.Module):
    """Remembers its intermediate results weakly, to see which of them live."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.hidden: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).exp()
        self.hidden.append(StorageWeakRef(hidden.untyped_storage()))  # type: ignore[no-untyped-call]
        return torch.add((hidden * hidden).sum(-1, keepdim=True), x)


ORDER = Schedule.parse("0F0 0OFFLOAD0 0F1 0B1 0RELOAD0 0B0")


def test_what_is_offloaded_is_not_held_until_it_is_reloaded() -> None:
    module, seen = Watched(), []

    def look(custom: Any) -> None:
        custom.run()
        seen.append((str(custom.action), not module.hidden[0].expired()))

    functions: dict[Kind | str, Any] = dict.fromkeys(("F", "OFFLOAD", "RELOAD", "B"), look)
    with closing(Pipeline({0: module}, ORDER, loss=nn.functional.mse_loss, functions=functions)) as pipeline:
        pipeline.step(torch.randn(4, 4), target=torch.randn(4, 4))
        assert pipeline.peak_live_activations == max(simulate(ORDER).peak_memory) == 1
    # the storage that comes back is another one
    assert seen[:2] == [("0F0", True), ("0OFFLOAD0", False)]


def test_a_storage_comes_back_with_all_its_views() -> None:
    store, base = HostStore(), torch.arange(12.0).reshape(3, 4)
    wanted = [base.clone(), base.t()[1:].clone(), base[:, 2].clone()]
    entries = [Offloadable.of(base), Offloadable.of(base.t()[1:]), Offloadable.of(base[:, 2])]
    alive = StorageWeakRef(base.untyped_storage())  # type: ignore[no-untyped-call]
    del base
    saved = SavedTensors(entries)
    saved.offload(store)
    assert [entry.tensor for entry in entries] == [None] * 3
    assert alive.expired()  # type: ignore[no-untyped-call]
    saved.reload(store)
    found = [entry.tensor for entry in entries if entry.tensor is not None]
    assert all(map(torch.equal, found, wanted))
    assert found[1].stride() == (1, 4)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1


def test_the_file_is_as_long_as_the_most_that_is_on_the_host_at_once() -> None:
    store, waiting, longest = HostStore(), list[tuple[int, int, Any]](), 0

    def take_back() -> None:
        value, size, place = waiting.pop(0)
        found = torch.empty(0, dtype=torch.uint8).set_(store.get(size, place, torch.device("cpu")))
        assert torch.equal(found, torch.full_like(found, value))

    for turn in range(20):
        waiting.append((turn, *store.put(torch.full((1000 + turn % 2,), turn, dtype=torch.uint8))))
        longest = max(longest, os.fstat(store._file.fileno()).st_size)
        if turn >= 3:
            take_back()
    assert longest == 2 * 1000 + 2 * 1001
    while waiting:
        take_back()
    assert os.fstat(store._file.fileno()).st_size == 0


def test_what_others_hold_stays() -> None:
    held = torch.ones(3)
    entry = Offloadable.of(held)
    SavedTensors([entry]).offload(HostStore())
    assert entry.tensor is not None


def test_a_tensor_that_was_changed_after_it_was_saved_is_an_error() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x).exp()
            z = y * 2
            y.add_(1)
            return torch.add(z, y)

    with (
        closing(Pipeline({0: Changes()}, ORDER, loss=nn.functional.mse_loss)) as pipeline,
        pytest.raises(PipelineError, match="was changed in place after the forward saved it"),
    ):
        pipeline.step(torch.randn(4, 4), target=torch.randn(4, 4))


# --- faults ----------------------------------------------------------------------------------------


@contextmanager
def fault(name: str, directory: str) -> Iterator[None]:
    """A host whose disk fails, with temporary files in this directory."""
    before, limits, get = tempfile.tempdir, resource.getrlimit(resource.RLIMIT_FSIZE), HostStore.get

    def get_from_a_truncated_file(store: HostStore, *arguments: Any) -> Any:
        os.ftruncate(store._file.fileno(), 3)
        return get(store, *arguments)

    tempfile.tempdir = f"{directory}/missing" if name == "no directory" else directory
    try:
        if name == "disk full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
        if name == "file gone":
            HostStore.get = get_from_a_truncated_file  # type: ignore[method-assign,assignment]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        tempfile.tempdir, HostStore.get = before, get  # type: ignore[method-assign]


FAULTS = {
    "disk full": ("OFFLOAD0", "OFFLOAD cannot write 128 bytes to a temporary file in "),
    "no directory": ("OFFLOAD0", "free space there, or set TMPDIR to another directory"),
    "file gone": ("RELOAD", "RELOAD cannot read 128 bytes from its temporary file in "),
}


def fail_on_rank_1(directory: str) -> list[tuple[str, list[str]]]:
    """Steps in which the disk of rank 1 fails, each followed by one that works: errors, and files left over."""
    found = []
    schedule = Offload(ahead=0)(build("gpipe", ranks=2, microbatches=4))
    modules = {stage: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)) for stage in range(2)}
    for name in FAULTS:
        batch, text = torch.ones(8, 4), ""
        with closing(Pipeline(modules, schedule, loss=nn.functional.mse_loss, timeout=TIMEOUT)) as pipeline:
            with fault(name, directory) if dist.get_rank() == 1 else nullcontext():
                try:
                    pipeline.step(batch, target=batch)
                except StepFailedError as error:
                    text = str(error)
            assert pipeline.step(batch, target=batch).loss is not None
            found.append((text, [path.name for path in Path(directory).iterdir()]))
    return found


def test_a_failing_disk_of_one_rank_is_reported_on_all_ranks_and_leaves_no_files(
    pools: Pools, tmp_path: Path
) -> None:
    for outcomes in pools(2).run(fail_on_rank_1, str(tmp_path)):
        for (where, what), (text, files) in zip(FAULTS.values(), outcomes, strict=True):
            assert "step 1 failed on rank 1, stage 1, microbatch " in text
            assert f", in 1{where}" in text
            assert what in text
            assert not files
