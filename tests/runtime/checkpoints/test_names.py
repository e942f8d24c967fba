"""Promise: ranks combine their parts into one model, or all report why they cannot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from penstock import CheckpointError
from penstock.runtime import Pipeline, load_checkpoint, save_checkpoint
from tests.support.checkpointing import Bits, bits, bits_of_model, bits_of_optimizer, named_model, stages_of
from tests.support.models import TASKS, WIDTH, squared
from tests.support.pool import Pools
from tests.support.reference import TIMEOUT


def piped(stages: dict[int, Any], family: str = "1f1b", **options: Any) -> Pipeline:
    return Pipeline(stages, family, microbatches=4, loss=squared, timeout=TIMEOUT, **options)


def message(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except CheckpointError as error:
        return str(error)
    return "no error"


# --- problems of all ranks -------------------------------------------------------------------------


def load_what_does_not_fit(path: Path) -> tuple[str, bool]:
    with closing(piped(stages_of(2))) as pipeline:
        save_checkpoint(path, pipeline, AdamW(pipeline.parameters()))
    stages = stages_of(2)
    first: Any = stages[0]
    last: Any = stages[1]
    first.layers[0].lin = nn.Linear(WIDTH + 1, WIDTH)
    last.tail = last.head
    del last.head
    with closing(piped(stages)) as pipeline:
        before = bits_of_model(pipeline.modules)
        text = message(load_checkpoint, path, pipeline, AdamW(pipeline.parameters()))
        return text, before == bits_of_model(pipeline.modules)


def test_every_rank_reports_the_problems_of_all_and_changes_nothing(pools: Pools, tmp_path: Path) -> None:
    answers = pools(2).run(load_what_does_not_fit, tmp_path / "c")
    for text, unchanged in answers:
        assert unchanged
        assert text.splitlines() == [
            f"the checkpoint {tmp_path / 'c'} cannot be loaded:",
            "  'layers.0.lin.weight' is float32 [8, 8] in the checkpoint, but float32 [8, 9] in the model",
            "  the model has names that are missing in the checkpoint: tail.weight, tail.bias",
            (
                "  the checkpoint has no optimizer options for these parameters of the optimizer: tail.weight, "
                "tail.bias; create the optimizer with the same parameters, or load without optimizer="
            ),
            "  the checkpoint has names that no rank's model has: head.weight, head.bias",
            (
                "  the checkpoint has optimizer options for parameters that no rank's optimizer has: "
                "head.weight, head.bias"
            ),
        ]


def save_equal_names(path: Path) -> str:
    with closing(piped({stage: nn.Linear(WIDTH, WIDTH) for stage in range(2)})) as pipeline:
        return message(save_checkpoint, path, pipeline)


def test_different_parameters_of_the_same_name_are_rejected(pools: Pools, tmp_path: Path) -> None:
    for text in pools(2).run(save_equal_names, tmp_path / "c"):
        assert "different parameters have the same name: 'weight' in stages 0, 1, 'bias' in stages 0, 1" in text
        assert "split() keeps these names" in text
    assert not list(tmp_path.iterdir())


def save_what_differs(path: Path) -> list[str]:
    rank = dist.get_rank()
    same = nn.Linear(2, 2)
    kinds: Any = [SGD, AdamW][rank](same.parameters())
    alone: Any = [dist.new_group([0]), dist.new_group([1])][rank]
    whole = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
    return [
        message(save_checkpoint, path, nn.Linear(2, 2 + rank)),
        message(save_checkpoint, path, same, kinds),
        message(save_checkpoint, path, same, extra=print if rank == 0 else None),
        message(save_checkpoint, path.with_name(f"alone-{rank}"), whole, group=alone),
        message(load_checkpoint, path if rank == 0 else path.with_name("elsewhere"), same),
    ]


def test_problems_on_one_rank_are_reported_on_all(pools: Pools, tmp_path: Path) -> None:
    for shapes, kinds, extra, group, paths in pools(2).run(save_what_differs, tmp_path / "c"):
        assert "'weight' is float32 [3, 2] on rank 1 and float32 [2, 2] on another rank" in shapes
        assert "the ranks have different optimizers: SGD, AdamW" in kinds
        assert "extra is a builtin_function_or_method, which cannot be stored" in extra
        assert "is sharded over world ranks 0, 1, but rank" in group
        assert f"{tmp_path / 'c'} does not exist" in paths
        assert f"{tmp_path / 'elsewhere'} does not exist" in paths
    assert not list(tmp_path.iterdir())


# --- replicas and groups ---------------------------------------------------------------------------


def save_replicas(path: Path) -> bool:
    model = named_model()
    wrapped = DistributedDataParallel(model)
    save_checkpoint(path, wrapped, AdamW(wrapped.parameters()))
    again = named_model()
    nn.init.zeros_(again.head.weight)
    load_checkpoint(path, again)
    return bool(torch.equal(again.head.weight, model.head.weight))


def test_tensors_of_replicas_are_written_once_under_their_plain_names(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(save_replicas, tmp_path / "c") == [True, True]
    entries = [index.fqn for index in FileSystemReader(tmp_path / "c").read_metadata().storage_data]
    assert len(entries) == len(set(entries))
    assert set(entries) == {"penstock", *(f"model.{name}" for name in named_model().state_dict())}


def save_in_a_half_of_the_world(path: Path) -> dict[str, Bits]:
    """Two pipelines of two ranks, each saving for itself; then one loads the other's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    half = dist.get_rank() // 2
    stages = stages_of(2)
    for stage in stages.values():
        for parameter in stage.parameters():
            nn.init.constant_(parameter, half)
    with closing(piped(stages, group=mesh["pp"])) as pipeline:
        save_checkpoint(path / str(half), pipeline, extra=half, group=mesh["pp"])
        dist.barrier()
        assert load_checkpoint(path / str(1 - half), pipeline, group=mesh["pp"].get_group()) == 1 - half
        return {name: bits(value) for m in pipeline.modules.values() for name, value in m.named_parameters()}


def test_a_group_saves_and_loads_without_the_rest_of_the_world(pools: Pools, tmp_path: Path) -> None:
    for rank, found in enumerate(pools(4).run(save_in_a_half_of_the_world, tmp_path)):
        other = 1 - rank // 2
        assert found
        assert all(data == bits(torch.full(shape, float(other)))[2] for _, shape, data in found.values())


def train_shards_in_a_pipeline(path: Path, what: str) -> dict[str, dict[str, Bits]]:
    """Two ranks of a pipeline, each stage sharded over two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stages = {stage: fully_shard(module, mesh=mesh["dp"]) for stage, module in stages_of(2).items()}
    with closing(piped(stages, group=mesh["pp"])) as pipeline:
        optimizer = AdamW(pipeline.parameters())
        if what == "save":
            batch = TASKS["mlp"].batch(0, 4, torch.float32)
            pipeline.step(*batch.args, target=batch.target)
            optimizer.step()
            save_checkpoint(path, pipeline, optimizer)
        else:
            load_checkpoint(path, pipeline, optimizer)
        own = pipeline.modules
        return {"model": bits_of_model(own), "optimizer": bits_of_optimizer(optimizer, own)}


def save_and_load_after_an_evaluation(path: Path) -> list[float]:
    """A forward without a backward leaves the root's parameters gathered."""
    model: Any = fully_shard(nn.Linear(2, 2, bias=False), mesh=init_device_mesh("cpu", (2,)))
    found = []
    with torch.no_grad():
        nn.init.ones_(model.weight)
        model(torch.ones(1, 2))
        save_checkpoint(path, model)
        model.reshard()
        nn.init.zeros_(model.weight)
        found.append(float(model(torch.ones(1, 2)).sum()))
        load_checkpoint(path, model)
        found.append(float(model(torch.ones(1, 2)).sum()))
    return found


def test_unsharded_parameters_are_saved_and_loaded_as_shards(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(save_and_load_after_an_evaluation, tmp_path / "c") == [[0.0, 4.0]] * 2
    chunks = FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata["model.weight"]
    assert [list(chunk.sizes) for chunk in getattr(chunks, "chunks", [])] == [[1, 2], [1, 2]]


def load_whole(path: Path) -> dict[str, dict[str, Bits]]:
    model = named_model()
    optimizer = AdamW(model.parameters())
    load_checkpoint(path, model, optimizer)
    return {"model": bits_of_model({0: model}), "optimizer": bits_of_optimizer(optimizer, {0: model})}


@pytest.mark.full
def test_sharded_stages_form_one_model(pools: Pools, tmp_path: Path) -> None:
    saved = pools(4).run(train_shards_in_a_pipeline, tmp_path / "c", "save")
    (whole,) = pools(1).run(load_whole, tmp_path / "c")
    for kind in ("model", "optimizer"):
        parts = [part[kind] for part in saved]
        assert whole[kind]
        assert {name: value for part in parts for name, value in part.items()} == whole[kind]
    assert pools(4).run(train_shards_in_a_pipeline, tmp_path / "c", "load") == saved


# --- tied weights ----------------------------------------------------------------------------------


def tied_stages() -> dict[int, nn.Module]:
    """Stage 0 and the last one hold one weight under two names, and one under the same name."""
    made: dict[int, Any] = {
        stage: nn.ModuleDict({f"mid{stage}": nn.Linear(WIDTH, WIDTH)}) for stage in range(4)
    }
    made[0]["embed"] = nn.Linear(WIDTH, WIDTH, bias=False)
    made[0]["both"] = nn.Linear(WIDTH, WIDTH, bias=False)
    made[3]["head"], made[3]["both"] = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
    for stage, module in made.items():
        for index, parameter in enumerate(module.parameters()):
            nn.init.constant_(parameter, 10 * stage + index)
    nn.init.constant_(made[0]["embed"].weight, 77)
    nn.init.constant_(made[3]["head"].weight, 77)
    nn.init.constant_(made[0]["both"].weight, 88)
    nn.init.constant_(made[3]["both"].weight, 88)
    return dict(made)


TIES = ({0: "embed.weight", 3: "head.weight"}, {0: "both.weight", 3: "both.weight"})


def save_ties(path: Path, family: str) -> None:
    with closing(piped(tied_stages(), family, tied=TIES)) as pipeline:
        optimizer = SGD(pipeline.parameters(), momentum=0.9)
        for parameter in pipeline.parameters():
            optimizer.state[parameter]["momentum_buffer"] = parameter.detach() + 0.5
        save_checkpoint(path, pipeline, optimizer)


def load_ties(path: Path, family: str) -> list[tuple[str, float, float]]:
    """The names of this rank, with weight and momentum."""
    with closing(piped(tied_stages(), family, tied=TIES)) as pipeline:
        for parameter in pipeline.parameters():
            nn.init.zeros_(parameter)
        optimizer = SGD(pipeline.parameters(), momentum=0.9)
        load_checkpoint(path, pipeline, optimizer)
        return [
            (
                name,
                float(parameter.flatten()[0]),
                float(optimizer.state[parameter]["momentum_buffer"].flatten()[0]),
            )
            for module in pipeline.modules.values()
            for name, parameter in module.named_parameters()
        ]


@pytest.mark.parametrize("saving", [(4, "1f1b"), (2, "zbv"), (2, "interleaved-1f1b")])
@pytest.mark.parametrize("loading", [(4, "1f1b"), (2, "zbv")])
def test_every_stage_loads_a_tied_weight_with_its_state(
    pools: Pools, tmp_path: Path, saving: tuple[int, str], loading: tuple[int, str]
) -> None:
    pools(saving[0]).run(save_ties, tmp_path / "c", saving[1])
    found = [entry for part in pools(loading[0]).run(load_ties, tmp_path / "c", loading[1]) for entry in part]
    assert all(momentum == weight + 0.5 for _, weight, momentum in found)
    values = {name: {weight for other, weight, _ in found if other == name} for name, _, _ in found}
    assert {name: values[name] for name in ("embed.weight", "head.weight", "both.weight")} == {
        "embed.weight": {77},
        "head.weight": {77},
        "both.weight": {88},
    }
    entries = [index.fqn for index in FileSystemReader(tmp_path / "c").read_metadata().storage_data]
    assert sorted(name for name in entries if "mid" not in name) == [
        "model.both.weight",
        "model.embed.weight",
        "model.head.weight",
        "optimizer.both.weight.momentum_buffer",
        "optimizer.embed.weight.momentum_buffer",
        "penstock",
    ]
