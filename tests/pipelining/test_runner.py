"""Tests of evaluation, accumulation, custom functions, unusual batches and modules with torch's schedules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support import pipelining_functions, pipelining_modules, pipelining_usage
from tests.support.grids import small
from tests.support.pipelining_scripts import (
    NAMES,
    OURS,
    TORCH,
    assert_alike,
    batch,
    modules,
    stages_of,
    train_alone,
)
from tests.support.pool import Pools

# --- custom functions ------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", ["one after the other", "in parallel"])
def test_functions_for_forwards_and_pairs_are_called_once_for_each(pools: Pools, threads: str) -> None:
    found = pools(4).run(pipelining_functions.train_with_functions, threads == "in parallel")
    assert_alike(found, train_alone(8, 8, steps=1))
    for run in found:
        counts, wanted = run.about
        assert counts == {kind: wanted[kind] for kind in ("F", "OVERLAP_F_B")}


def test_a_function_is_called_for_every_action_of_its_kind_inside_of_pairs_too(pools: Pools) -> None:
    found = pools(4).run(pipelining_functions.train_with_a_function_for_each_kind)
    assert_alike(found, train_alone(8, 8))
    for run in found:
        counts, wanted = run.about
        assert counts == {kind: count for kind, count in wanted.items() if count}


def test_invalid_functions_are_rejected(pools: Pools) -> None:
    for messages in pools(4).run(pipelining_functions.rejected_functions):
        assert messages[0] == "ValueError"
        assert "but it replaces" in messages[1]
        assert "differ from those of step()" in messages[2]


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "DualPipeV", "Interleaved1F1B"])
@small(lambda name: name == "DualPipeV")
def test_a_dw_builder_is_called_in_the_backward_and_runs_in_w(pools: Pools, name: str) -> None:
    m = 8 if name == "DualPipeV" else 4
    yours, mine = (
        pools(4).run(pipelining_modules.train_with_dw_builder, package, name, m) for package in (TORCH, OURS)
    )
    for (wanted, their_log), (found, log) in zip(yours, mine):
        assert log == their_log
        assert found.keys() == wanted.keys()
        for key, gradient in wanted.items():
            torch.testing.assert_close(found[key], gradient)


# --- evaluation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@small(lambda name: name in {"1F1B", "DualPipeV"})
def test_eval_gives_losses_and_outputs_and_changes_nothing(pools: Pools, name: str) -> None:
    x, y = batch(0, 8)
    whole = nn.Sequential(*modules(stages_of(name, 4)))
    wanted = whole(x).detach()
    for losses, output, unchanged in pools(4).run(pipelining_usage.evaluate, name):
        assert all(unchanged)
        if output is not None:
            torch.testing.assert_close(output, wanted)
            right = [float(functional.mse_loss(*pair)) for pair in zip(wanted.chunk(4), y.chunk(4))]
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(right))


@pytest.mark.parametrize("name", ["GPipe", "ZBVZeroBubble"])
@small(lambda name: name == "ZBVZeroBubble")
def test_two_steps_give_twice_the_gradient(pools: Pools, name: str) -> None:
    assert all(pools(4).run(pipelining_usage.accumulate, name))


def test_a_schedule_without_a_loss_returns_outputs_and_rejects_targets(pools: Pools) -> None:
    wanted = nn.Sequential(*modules(4))(batch(0, 8)[0]).detach()
    for rank, (outputs, messages) in enumerate(pools(4).run(pipelining_usage.forward_only)):
        for output in outputs:
            assert (output is not None) == (rank == 3)
            if output is not None:
                torch.testing.assert_close(output, wanted)
        assert "forward-only" in messages[0]


# --- batches ---------------------------------------------------------------------------------------


def test_chunk_specs_of_arguments_keywords_and_outputs_are_used(pools: Pools) -> None:
    value, y = batch(0, 8)
    shift = torch.arange(8.0).reshape(8, 1) * 0.5
    for _ in range(4):
        value = pipelining_usage.Shifted(last=False).inner(value).detach() + shift
    means = [part.mean() for part in value.chunk(4)]
    outputs = pools(4).run(pipelining_usage.with_specs)
    assert [output for output, _ in outputs[:3]] == [None] * 3
    (merged, total), losses = outputs[3]
    torch.testing.assert_close(merged, value)
    torch.testing.assert_close(total, torch.stack(means).sum())
    right = [3 * float(functional.mse_loss(*pair)) for pair in zip(value.chunk(4), y.chunk(4))]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(right))


def test_a_batch_that_one_rank_rejects_fails_on_all_and_the_next_one_trains(pools: Pools) -> None:
    found = pools(4).run(pipelining_usage.failures_on_all_ranks, seconds=300)
    for rank, messages in enumerate(found):
        assert len(messages) == 5, messages
        assert "4 arg_mbs but got 3" in messages[0]
        assert messages[0].startswith("ValueError" if rank == 0 else "StepFailedError")
        assert "needs a target" in messages[2]
        assert messages[3].startswith("RuntimeError: step() computes gradients")
        assert messages[4].startswith("TypeError" if rank == 3 else "StepFailedError")
        assert "losses must be a list" in messages[4]


# --- modules ---------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_stages_of_a_traced_pipe_train(pools: Pools) -> None:
    assert_alike(pools(4).run(pipelining_modules.train_traced, seconds=600), train_alone(4, 4))


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
@pytest.mark.full
def test_a_traced_pipe_with_skip_connections_trains(pools: Pools, name: str) -> None:
    models = [
        pipelining_modules.Skips,
        *([pipelining_modules.SkipsWithSplits] if name in ("GPipe", "1F1B") else []),
    ]
    for model in models:
        assert pools(4).run(pipelining_modules.train_skips, name, model, seconds=600) == [[]] * 4


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble"])
@small(lambda name: name == "ZBVZeroBubble")
def test_outputs_that_are_views_train_with_split_backward(pools: Pools, name: str) -> None:
    assert_alike(pools(4).run(pipelining_modules.train_views, name), train_alone(8, 4))


@pytest.mark.full  # tests/runtime/backward compiles stages too
def test_compiled_stages_train_with_zero_bubble(pools: Pools) -> None:
    assert_alike(
        pools(4).run(pipelining_modules.train_compiled, "ZBVZeroBubble", seconds=600), train_alone(8, 4)
    )


# --- other parallelism -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble"])
@small(lambda name: name == "ZBVZeroBubble")
def test_sharded_stages_train_as_one_process_with_all_batches(pools: Pools, name: str) -> None:
    whole = nn.Sequential(*modules(4))
    for replica in range(2):
        x, y = batch(replica, 8)
        torch.autograd.backward(functional.mse_loss(whole(x), y) / 2)
    wanted = {key: parameter.grad for key, parameter in whole.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for gradients, replica in pools(4).run(pipelining_modules.train_sharded, name):
        if replica == 0:
            found |= gradients
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient)


def test_a_failure_after_pairs_run_by_a_function_is_reported_on_all_ranks(pools: Pools) -> None:
    for messages in pools(4).run(pipelining_functions.fail_after_a_pair, seconds=300):
        assert "too late" in messages
        assert "REDUCE_GRAD" in messages
