"""Promise: a schedule that offloads trains to the same bits, and what is on the host is not on the device."""

from __future__ import annotations

import errno
from contextlib import closing
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock import Kind, PipelineError, Schedule, StepFailedError, build, simulate
from penstock.lowering import DEFAULT_PASSES, Offload, Pass, Recompute, SplitBackward, lower
from penstock.runtime import Pipeline
from penstock.runtime.execution.offloading import HostStore, Offloadable, SavedTensors
from tests.support.families import FAMILIES
from tests.support.grids import small
from tests.support.models import MODELS
from tests.support.pool import Pools
from tests.support.reference import TIMEOUT, Case, problems_of, run_cases

WAYS: tuple[list[Pass], ...] = (
    [Offload(ahead=0)],
    [Recompute(), Offload(ahead=0)],
    [Offload(stages=(0,), ahead=1)],
)


@pytest.mark.parametrize("p", [2, 4])
@small(lambda p: p == 2)
def test_families_train_to_the_same_bits(pools: Pools, p: int) -> None:
    ways, tasks = cycle(WAYS), cycle(("transformer", "dropout", "mlp", "checkpointed"))
    families = FAMILIES if p == 4 else ("gpipe", "zbv", "interleaved-1f1b", "dualpipev")
    cases = [
        Case(lower(build(family, ranks=p, microbatches=2 * p), next(ways)), next(tasks), steps=3)
        for family in families
    ]
    assert not problems_of(cases, pools(p).run(run_cases, cases))


@pytest.mark.parametrize("way", [0, 1])
@small(lambda way: False)  # noqa: ARG005
def test_every_model_trains_to_the_same_bits(pools: Pools, way: int) -> None:
    schedule = build("gpipe", ranks=2, microbatches=4)
    passes: list[Pass] = [*([SplitBackward()] if way else []), *WAYS[way], *DEFAULT_PASSES]
    cases = [Case(lower(schedule, passes), task, steps=3) for task in MODELS]
    assert not problems_of(cases, pools(2).run(run_cases, cases))


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


def test_a_full_disk_is_the_error_of_the_step_and_the_next_step_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with closing(Pipeline({0: Watched()}, ORDER, loss=nn.functional.mse_loss)) as pipeline:
        with monkeypatch.context() as patch:
            patch.setattr(HostStore, "put", full)
            with pytest.raises((OSError, PipelineError), match="No space left"):
                pipeline.step(torch.randn(4, 4), target=torch.randn(4, 4))
        assert pipeline.step(torch.randn(4, 4), target=torch.randn(4, 4)).loss is not None


def fail_on_rank_1() -> str:
    """A step of two ranks in which the disk of rank 1 is full, and one more step; the error of this rank."""
    rank, put, text = dist.get_rank(), HostStore.put, ""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    schedule = Offload(ahead=0)(build("gpipe", ranks=2, microbatches=4))
    modules = {stage: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for stage in range(2)}
    with closing(Pipeline(modules, schedule, loss=nn.functional.mse_loss, timeout=TIMEOUT)) as pipeline:
        batch = torch.ones(8, 4)
        HostStore.put = full if rank == 1 else put  # type: ignore[method-assign,assignment]
        try:
            pipeline.step(batch, target=batch)
        except StepFailedError as error:
            text = str(error)
        finally:
            HostStore.put = put  # type: ignore[method-assign]
        assert pipeline.step(batch, target=batch).loss is not None
    return text


def test_a_full_disk_of_one_rank_is_reported_on_all_ranks(pools: Pools) -> None:
    for text in pools(2).run(fail_on_rank_1):
        assert "step 1 failed on rank 1, stage 1, microbatch 0, in 1OFFLOAD0" in text
        assert "No space left on device" in text
