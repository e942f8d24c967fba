"""Promises of tensor parallelism: stages whose weights and outputs are DTensors train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from penstock import build
from penstock.errors import PenstockError, PipelineError
from penstock.lowering import Offload, Recompute, lower
from penstock.runtime import Pipeline
from penstock.runtime.config import ActionCall
from penstock.runtime.dtensors import Meshes, is_dtensor, sharding_of
from penstock.runtime.stage.memory import HostStore, Offloadable, SavedTensors
from tests.support.grids import small, thinned
from tests.support.models import TASKS, numbers
from tests.support.pool import Pools
from tests.support.reference import TIMEOUT, problems_of, run_cases
from tests.support.tensor_models import WIDTH, Crossing, squared
from tests.support.tensor_parallel import WAYS, TensorCase, mesh_of, train

FAMILIES = ("1f1b", "interleaved-1f1b", "zb-h1", "zbv")


def assert_trains(pools: Pools, cases: list[TensorCase]) -> None:
    ranks = cases[0].schedule.num_ranks * cases[0].dp * cases[0].tp
    assert not problems_of(cases, pools(ranks).run(run_cases, cases, train, seconds=600))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.full
def test_every_family_trains_as_one_process(pools: Pools, family: str) -> None:
    assert_trains(pools, [TensorCase(build(family, ranks=2, microbatches=3), "pieces as dtensors")])


@pytest.mark.parametrize("way", [way for way in WAYS if way != "pieces as dtensors"])
@small(lambda way: way == "all kinds")
def test_a_pipeline_trains_as_one_process_with(pools: Pools, way: str) -> None:
    fused, split = (build(family, ranks=2, microbatches=3) for family in ("1f1b", "zbv"))
    assert_trains(pools, [TensorCase(fused, way, optimizer="adamw"), TensorCase(split, way)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.full
def test_recomputed_and_offloaded_stages_train_as_one_process(pools: Pools, way: str) -> None:
    fused, split = (build(family, ranks=2, microbatches=3) for family in ("gpipe", "zbv"))
    out = Offload(ahead=0)
    cases = [TensorCase(lower(fused, passes), way) for passes in ([Recompute(), out], [out])]
    cases.append(TensorCase(lower(split, [Recompute(stages=(1,)), out]), way))
    assert_trains(pools, thinned(cases, 3, 2))


def offloaded_pieces() -> tuple[bool, bool, bool]:
    """Of a DTensor that is offloaded and reloaded: whether it was moved, its values and its placements."""
    values = torch.arange(12.0).reshape(4, 3)
    mesh = mesh_of(1, 1, 2)["tp"]
    local = values.chunk(2)[mesh.get_local_rank()].clone()  # a scatter may hold what it gave for a while
    piece = DTensor.from_local(local, mesh, [Shard(0)])
    del local
    store, entry = HostStore(), Offloadable.of(piece)
    placements = piece.placements
    del piece
    saved = SavedTensors([entry])
    saved.offload(store)
    moved = entry.tensor is None
    saved.reload(store)
    found = entry.value
    assert isinstance(found, DTensor)
    return moved, torch.equal(found.full_tensor(), values), found.placements == placements


def test_the_local_tensor_of_a_dtensor_is_offloaded(pools: Pools) -> None:
    assert pools(2).run(offloaded_pieces) == [(True, True, True)] * 2


@pytest.mark.full
def test_float32_results_are_those_of_one_process(pools: Pools) -> None:
    schedule = build("zb-h1", ranks=2, microbatches=2)
    assert_trains(pools, [TensorCase(schedule, "pieces", dtype=torch.float32, steps=1)])


@pytest.mark.parametrize(
    "case",
    [
        TensorCase(build("zbv", ranks=4, microbatches=4), "uneven pieces", steps=2),
        TensorCase(build("zbv", ranks=2, microbatches=4), "loss parallel", dp=2),
        TensorCase(build("1f1b", ranks=2, microbatches=2), "replicated dtensors", tp=4, steps=1),
    ],
    ids=str,
)
@pytest.mark.full
def test_more_stages_and_sharded_replicas_train_as_one_process(pools: Pools, case: TensorCase) -> None:
    assert_trains(pools, [case])


# --- what is carried, and when it is computed ------------------------------------------------------


def gradients_carried() -> set[str]:
    """The placements of the gradients that came back to the first stage."""
    mesh, task = mesh_of(2, 1, 2), TASKS["crossing"]
    stages = dict(enumerate(task.stages(2, torch.float32)))
    own = stages[mesh["pp"].get_local_rank()]
    assert isinstance(own, Crossing)
    own.spread(mesh["tp"])
    with closing(
        Pipeline(stages, "1f1b", microbatches=2, loss=squared, group=mesh["pp"], timeout=TIMEOUT)
    ) as it:
        batch = task.batch(0, 2, torch.float32)
        it.step(*batch.args, target=batch.target)
    return own.seen


def test_a_gradient_may_have_other_placements_than_its_output(pools: Pools) -> None:
    seen = pools(4).run(gradients_carried)
    # of what every rank has all of, the gradient is a sum that is not yet made; of such a sum, it is whole
    assert seen[0] == seen[1] == {"(Partial(sum),)", "(Shard(dim=1),)", "(Replicate(),)"}


def computed_in_input_backward() -> tuple[list[str], list[str]]:
    """The parameters that have a gradient after the first I of the second step, and those that have none."""
    mesh, way = mesh_of(2, 1, 2), WAYS["pieces as dtensors"]
    schedule = build("zb-h1", ranks=2, microbatches=3)
    rank = mesh["pp"].get_local_rank()
    stage = way.parallel(TASKS[way.task].stages(2, torch.float32)[rank], mesh["tp"])
    found: list[tuple[list[str], list[str]]] = []

    def look(custom: ActionCall) -> None:
        custom.run()
        there = {name: weight.grad is not None for name, weight in stage.named_parameters()}
        found.append(([name for name in there if there[name]], [name for name in there if not there[name]]))

    batch = TASKS[way.task].batch(0, 3, torch.float32)
    options: dict[str, Any] = {"group": mesh["pp"], "functions": {"I": look}, "timeout": TIMEOUT}
    with closing(Pipeline([stage], schedule, loss=TASKS[way.task].loss, **options)) as pipeline:
        pipeline.step(*batch.args, target=batch.target)
        stage.zero_grad()
        found.clear()
        pipeline.step(*batch.args, target=batch.target)
    return found[0]


def test_weight_gradients_of_tensor_parallel_layers_are_deferred(pools: Pools) -> None:
    for early, late in pools(4).run(computed_in_input_backward):
        assert all("norm" in name for name in early)
        assert late
        assert not any("norm" in name for name in late)


class Turned(nn.Module):
    """Passes on a function of its input, as a DTensor of which each rank has a shard."""

    def __init__(self, mesh: DeviceMesh, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.mesh, self.turn = nn.Linear(WIDTH, WIDTH), mesh, turn

    def forward(self, x: Tensor) -> Tensor:
        whole = DTensor.from_local(self.layer(x), self.mesh, [Replicate()])
        return self.turn(whole.redistribute(placements=[Shard(1)]))


def outputs_of_a_stage_without_weights() -> bool:
    mesh = mesh_of(2, 1, 2)
    x, y = numbers(1, 4, 5, WIDTH, dtype=torch.float32), numbers(2, 4, 5, WIDTH, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stages = {0: Turned(mesh["tp"], torch.sin), 1: nn.Identity()}
    options: dict[str, Any] = {"group": mesh["pp"], "loss": squared, "timeout": TIMEOUT}
    with closing(Pipeline(stages, "1f1b", microbatches=2, **options)) as pipeline:
        found = [
            call(x, target=y, return_outputs=True).outputs
            for call in (pipeline.step, pipeline.eval, pipeline.step)
        ]
    first = stages[0]
    assert isinstance(first, Turned)
    wanted = first.layer(x).sin()
    return all(out is None or (is_dtensor(out) and torch.equal(out.full_tensor(), wanted)) for out in found)


def test_a_stage_without_weights_finds_its_mesh_from_the_pipelines(pools: Pools) -> None:
    assert pools(4).run(outputs_of_a_stage_without_weights) == [True] * 4


# --- what is refused --------------------------------------------------------------------------------


def message_of(turn: Callable[[Tensor], Tensor], *, knows_mesh: bool = True, **options: Any) -> str:
    """The error of a step whose first stage passes on such a tensor."""
    mesh = mesh_of(2, 1, 2)
    group = mesh["pp"] if knows_mesh else mesh["pp"].get_group()
    stages = {0: Turned(mesh["tp"], turn), 1: nn.Identity()}
    x = numbers(1, 4, 5, WIDTH, dtype=torch.float32)
    pipeline = Pipeline(stages, "1f1b", microbatches=2, loss=squared, group=group, timeout=TIMEOUT, **options)
    with closing(pipeline):
        try:
            pipeline.step(x, target=x)
        except PenstockError as error:
            return str(error)
    return ""


def message_without_a_mesh() -> str:
    return message_of(torch.sin, knows_mesh=False)


def test_a_dtensor_without_a_matching_mesh_is_rejected(pools: Pools) -> None:
    for text in pools(4).run(message_without_a_mesh):
        assert "in 1F0" in text
        assert "received a DTensor on a mesh (tp: 2) of cpu, this rank at [" in text
        assert "this rank has no such mesh, but none at all" in text
        assert 'group=mesh["pp"]' in text


def _broken_piece(x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    factor = torch.ones(1, 5, 1)
    factor[0, 4] = torch.nan  # a place of the second rank's piece
    return x * distribute_tensor(factor, x.device_mesh, x.placements)


def message_about_numbers() -> str:
    return message_of(_broken_piece, check_finite=True)


def test_a_nonfinite_value_in_one_shard_is_reported_by_all_ranks(pools: Pools) -> None:
    for text in pools(4).run(message_about_numbers):
        assert f"stage 0: {2 * WIDTH} of {2 * 5 * WIDTH} elements of its output" in text


def _words_by_rank(x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    words = distribute_tensor(torch.zeros(2, 5, dtype=torch.long), x.device_mesh, [Replicate()])
    table: Any = x.sum((0, 1))[:, None]
    return nn.functional.embedding(words, table.redistribute(placements=[Shard(0)]))


def message_about_masks() -> str:
    return message_of(_words_by_rank)


def test_the_partial_sum_of_an_embedding_is_rejected_with_a_remedy(pools: Pools) -> None:
    for text in pools(4).run(message_about_masks):
        assert "stage 0, output for rank 1: a DTensor with the placement MaskP" in text
        assert "call `redistribute()` on it first" in text


def two_meshes_alike() -> str:
    mesh = mesh_of(2, 1, 2)["tp"]
    other = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("pp", "tp"))["tp"]
    module = nn.Module()
    one, two = (distribute_tensor(torch.zeros(4), known, [Shard(0)]) for known in (mesh, other))
    module.register_buffer("one", one)
    module.register_buffer("two", two)
    coordinates = mesh.get_coordinate(), other.get_coordinate()
    try:
        found = Meshes([module]).matching(sharding_of(one).mesh)
    except PipelineError as error:
        return str(error) if coordinates[0] == coordinates[1] else ""
    return "right" if found is mesh and coordinates[0] != coordinates[1] else "wrong"


def test_two_matching_meshes_are_rejected(pools: Pools) -> None:
    first, second, third, last = pools(4).run(two_meshes_alike)
    assert "has 2 such meshes, of world ranks [0, 1] and [0, 2]: give their dimensions" in first
    assert "has 2 such meshes, of world ranks [2, 3] and [1, 3]: give their dimensions" in last
    assert second == third == "right"
