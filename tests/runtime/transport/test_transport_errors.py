"""Promise: only errors of messages and collectives are lost connections; others keep their traceback."""

from __future__ import annotations

from contextlib import closing, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock.runtime import Pipeline
from penstock.runtime.data_parallel import gradient_norm
from penstock.runtime.transport.message_spec import MessageSpec
from penstock.runtime.transport.transport_errors import TransportError, post, transport_errors
from tests.support.call_outcomes import SOON, CallOutcome, assert_one_report, attempt
from tests.support.pool import Pools
from tests.support.slowness import slowness


class HugeMask(nn.Module):
    """Its second output is small as a view, and 16 TiB as bytes."""

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.zeros(1).expand(2**42)


def step(first: nn.Module) -> CallOutcome:
    stages = {0: nn.Sequential(nn.Linear(4, 4), first), 1: nn.Linear(4, 4)}
    with closing(Pipeline(stages, "1f1b", microbatches=2, loss=mse_loss, timeout=60)) as pipeline:
        return attempt(lambda: pipeline.step(torch.randn(4, 4), target=torch.randn(4, 4)))


def pack_too_much() -> CallOutcome:
    return step(HugeMask())


def test_memory_that_runs_out_while_a_message_is_packed_is_the_reported_cause(pools: Pools) -> None:
    outcomes = pools(2).run(pack_too_much)
    assert_one_report(outcomes)
    assert outcomes[0].where == (0, "0SEND_F0", 0, 0, "exception")
    assert "can't allocate memory" in outcomes[0].text.splitlines()[1]
    assert "in acquire" in outcomes[0].details
    assert "can't allocate memory" in outcomes[0].cause


def unpack_badly() -> CallOutcome:
    error = RuntimeError("cannot be unpacked")
    broken = mock.patch.object(MessageSpec, "loads", side_effect=error)
    with broken if dist.get_rank() == 1 else nullcontext():
        return step(nn.Identity())


def test_an_error_while_a_message_is_unpacked_is_the_reported_cause(pools: Pools) -> None:
    outcomes = pools(2).run(unpack_badly)
    assert_one_report(outcomes)
    assert outcomes[0].where == (1, "1F0", 1, 0, "exception")
    assert outcomes[0].text.splitlines()[1] == "  RuntimeError: cannot be unpacked"
    assert "in _receive_with_spec" in outcomes[0].details


def clip_badly() -> CallOutcome:
    stages = {stage: nn.Linear(4, 4) for stage in range(2)}
    error = RuntimeError("no norm")
    with closing(Pipeline(stages, "1f1b", microbatches=2, loss=mse_loss, timeout=60)) as pipeline:
        pipeline.step(torch.randn(4, 4), target=torch.randn(4, 4))
        broken = mock.patch.object(gradient_norm, "_norm", side_effect=error)
        with broken if dist.get_rank() == 0 else nullcontext():
            return attempt(partial(pipeline.clip_grad_norm_, 1.0))


def test_an_error_while_norms_are_computed_is_raised_as_it_is_and_wakes_the_other_rank(pools: Pools) -> None:
    failed, other = pools(2).run(clip_badly)
    assert (failed.error, failed.text) == ("RuntimeError", "no norm")
    assert other.error == "PipelineError"
    assert other.seconds < SOON * slowness()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("Connection closed by peer"), TransportError),
        (dist.DistBackendError("NCCL error"), TransportError),
        (torch.OutOfMemoryError("out of memory"), torch.OutOfMemoryError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError),
        (ValueError("not contiguous"), ValueError),
    ],
    ids=str,
)
def test_errors_of_a_device_are_no_transport_errors(error: Exception, raised: type[Exception]) -> None:
    with pytest.raises(raised) as found, transport_errors():
        raise error
    assert type(found.value) is raised
    with pytest.raises(raised):
        post(mock.Mock(side_effect=error))


@pytest.mark.parametrize(("text", "timed_out"), [("gloo: Timed out waiting 1000ms", True), ("closed", False)])
def test_a_timeout_of_gloo_is_a_field_of_the_error(text: str, *, timed_out: bool) -> None:
    with pytest.raises(TransportError) as found, transport_errors():
        raise RuntimeError(text)
    assert found.value.timed_out is timed_out
