"""Promise: weights are exported to and imported from plain safetensors files."""

from __future__ import annotations

import builtins
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from penstock import CheckpointError, MissingExtraError
from penstock.runtime import Pipeline, export_safetensors, import_safetensors, split
from penstock.runtime.checkpoints import safetensors as safetensors_export
from tests.runtime.checkpoints.test_names import TIES, tied_stages
from tests.support.checkpointing import Bits, Layout, bits, bits_of_model, named_model, sharded, stages_of
from tests.support.grids import small
from tests.support.hub_models import decoder
from tests.support.models import WIDTH, next_word, squared
from tests.support.pool import Pools
from tests.support.reference import TIMEOUT

LAYOUTS = {
    "a pipeline with stages in a V": (4, Layout("zbv", 8)),
    "a pipeline of two": (2, Layout("1f1b", 2)),
    "a pipeline of one": (1, Layout("1f1b", 1)),
    "shards": (2, Layout(sharded=True)),
    "shards of tensor-parallel layers": (4, Layout(sharded=True, tensor_parallel=True)),
    "replicas": (2, Layout()),
}


def mixed(module: nn.Module) -> nn.Module:
    """The heads in bfloat16, which NumPy does not know."""
    for name, part in module.named_modules():
        if name == "head":
            part.bfloat16()
    return module


def model_of(layout: Layout) -> Pipeline | nn.Module:
    if layout.family:
        stages = {stage: mixed(module) for stage, module in stages_of(layout.stages).items()}
        return Pipeline(stages, layout.family, microbatches=8, loss=squared, timeout=TIMEOUT)
    model: Any = named_model()
    whole: nn.Module = (
        sharded(model, tensor_parallel=layout.tensor_parallel) if layout.sharded else mixed(model)
    )
    return whole


def go_out(layout: Layout, directory: Path) -> None:
    model = model_of(layout)
    export_safetensors(directory, model)
    if isinstance(model, Pipeline):
        model.close()


def come_in(layout: Layout, place: Path) -> dict[str, Bits]:
    model = model_of(layout)
    modules = model.modules if isinstance(model, Pipeline) else {0: model}
    for module in modules.values():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.detach().zero_()
    import_safetensors(place, model)
    found = bits_of_model(modules)
    if isinstance(model, Pipeline):
        model.close()
    return found


def read_as_the_hub_does(directory: Path) -> dict[str, Tensor]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return load_file(directory / "model.safetensors")
    contents = json.loads(index.read_text(encoding="utf-8"))
    parts = {file: load_file(directory / file) for file in set(contents["weight_map"].values())}
    found = {name: parts[file][name] for name, file in contents["weight_map"].items()}
    assert sum(map(len, parts.values())) == len(found)
    assert contents["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@small(lambda layout: layout != "shards of tensor-parallel layers")
def test_weights_are_exported_and_imported_in_any_layout(pools: Pools, tmp_path: Path, layout: str) -> None:
    ranks, chosen = LAYOUTS[layout]
    pools(ranks).run(go_out, chosen, tmp_path)
    wanted = named_model() if chosen.sharded else mixed(named_model())
    assert {name: bits(tensor) for name, tensor in read_as_the_hub_does(tmp_path).items()} == bits_of_model(
        {0: wanted}
    )
    files = sorted(path.name for path in tmp_path.iterdir())
    if chosen.stages > 1:
        parts = [f"model-{rank + 1:05}-of-{ranks:05}.safetensors" for rank in range(ranks)]
        assert files == [*parts, "model.safetensors.index.json"]
    else:
        assert files == ["model.safetensors"]
    for part in pools(ranks).run(come_in, chosen, tmp_path):
        assert part
        assert part.items() <= bits_of_model({0: wanted}).items()


def test_one_file_is_imported_into_a_pipeline_and_into_shards(pools: Pools, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({name: value.clone() for name, value in named_model().state_dict().items()}, file)
    wanted = bits_of_model({0: named_model()})
    (found,) = {tuple(part.items()) for part in pools(4).run(come_in, Layout(sharded=True), file)}
    assert dict(found) == wanted
    parts = pools(4).run(come_in, Layout("zbv", 8), file)
    together = {name: value for part in parts for name, value in part.items()}
    assert together.keys() == wanted.keys()
    assert {name for name in wanted if together[name] != wanted[name]} == {"head.weight", "head.bias"}
    assert together["head.bias"] == bits(named_model().head.bias.bfloat16())  # the model's own type


# --- tied weights ----------------------------------------------------------------------------------


def ties_go_out_and_come_in(directory: Path) -> dict[str, float]:
    for parameters in (1.0, 0.0):
        stages = tied_stages()
        for stage in stages.values():
            for parameter in stage.parameters():
                parameter.detach().mul_(parameters)
        with closing(Pipeline(stages, "1f1b", microbatches=4, loss=squared, tied=TIES)) as pipeline:
            if parameters:
                export_safetensors(directory, pipeline)
            else:
                import_safetensors(directory, pipeline)
                named = [each for module in pipeline.modules.values() for each in module.named_parameters()]
                return {name: float(parameter.flatten()[0]) for name, parameter in named}
    raise AssertionError


def test_a_tied_weight_is_exported_once_and_imported_in_every_stage(pools: Pools, tmp_path: Path) -> None:
    parts = pools(4).run(ties_go_out_and_come_in, tmp_path)
    assert (parts[0]["embed.weight"], parts[3]["head.weight"]) == (77, 77)
    assert (parts[0]["both.weight"], parts[3]["both.weight"]) == (88, 88)
    names = read_as_the_hub_does(tmp_path)
    assert sorted(name for name in names if "mid" not in name) == ["both.weight", "embed.weight"]


# --- what does not fit -----------------------------------------------------------------------------


def import_wrongly(directory: Path) -> tuple[str, bool]:
    with closing(Pipeline(stages_of(2), "1f1b", microbatches=4, loss=squared, timeout=TIMEOUT)) as pipeline:
        before = bits_of_model(pipeline.modules)
        try:
            import_safetensors(directory, pipeline)
        except CheckpointError as error:
            return str(error), before == bits_of_model(pipeline.modules)
    return "no error", False


def test_all_problems_are_reported_on_all_ranks_and_nothing_is_changed(pools: Pools, tmp_path: Path) -> None:
    weights = {name: value.clone() for name, value in named_model().state_dict().items()}
    del weights["layers.0.lin.bias"], weights["head.bias"]
    weights["layers.1.lin.bias"] = torch.zeros(WIDTH + 1)
    weights["layers.2.norm.num_batches_tracked"] = torch.zeros(())
    weights["strange"] = torch.zeros(1)
    save_file(weights, tmp_path / "model.safetensors")
    for text, unchanged in pools(2).run(import_wrongly, tmp_path):
        assert unchanged
        assert text.splitlines() == [
            f"the weights of {tmp_path} cannot be imported:",
            "  'layers.1.lin.bias' is F32 [9] in model.safetensors, but float32 [8] in the model",
            "  'layers.2.norm.num_batches_tracked' is F32 [] in model.safetensors, but int64 [] in the model",
            "  the model has names that are missing in the files: layers.0.lin.bias",
            "  the model has names that are missing in the files: head.bias",
            "  the files have names that no rank's model has: strange",
        ]


def test_existing_weights_are_not_overwritten_and_other_files_stay(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / ".unfinished").mkdir()
    (tmp_path / ".unfinished" / "rubbish").touch()
    export_safetensors(tmp_path, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(CheckpointError, match=r"already has weights \(model.safetensors\)"):
        export_safetensors(tmp_path, nn.Linear(2, 2))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], model.weight)


def test_a_missing_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return original(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    for call in (export_safetensors, import_safetensors):
        with pytest.raises(MissingExtraError, match=r"pip install 'penstock\[torch\]'"):
            call(tmp_path, nn.Linear(2, 2))


def fill_disk(directory: Path) -> tuple[str, list[str]]:
    """One rank cannot write."""
    model: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    files: Any = safetensors_export
    written = files._write

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if torch.distributed.get_rank() == 0:
        files._write = full
    try:
        export_safetensors(directory, model)
    except CheckpointError as error:
        torch.distributed.barrier()
        return str(error), [path.name for path in directory.iterdir()]
    finally:
        files._write = written
    raise AssertionError


def test_a_failed_export_leaves_no_files(pools: Pools, tmp_path: Path) -> None:
    for text, left in pools(2).run(fill_disk, tmp_path):
        assert "rank 0: OSError: [Errno 28] No space left on device" in text
        assert left == []


# --- with transformers -----------------------------------------------------------------------------


def decoder_goes_out(directory: Path, theirs: Path) -> None:
    """A decoder with a tied head in two stages is exported, and files that transformers wrote are imported."""
    stages = split(decoder("llama", tied=True), at=["model.layers.2"])
    with closing(Pipeline(stages, "1f1b", microbatches=2, loss=next_word, timeout=TIMEOUT)) as pipeline:
        export_safetensors(directory, pipeline)
        before = bits_of_model(pipeline.modules)
        for parameter in pipeline.parameters():
            parameter.detach().zero_()
        import_safetensors(theirs, pipeline)
        assert bits_of_model(pipeline.modules) == before


@pytest.mark.full
def test_files_are_exchanged_with_transformers(pools: Pools, tmp_path: Path) -> None:
    model = decoder("llama", tied=True)
    model.save_pretrained(tmp_path / "theirs")
    model.config.save_pretrained(tmp_path / "ours")
    pools(2).run(decoder_goes_out, tmp_path / "ours", tmp_path / "theirs")
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    assert "lm_head.weight" not in read_as_the_hub_does(tmp_path / "ours")
    again = type(model).from_pretrained(tmp_path / "ours")
    assert bits_of_model({0: again}) == bits_of_model({0: model})
