"""Promise: torchtitan's Llama trains on Penstock's runtime as on torch's: the same losses and parameters."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import penstock
from tests.support.grids import small
from tests.support.pool import Pools

STEPS, BATCH, LENGTH, WORDS = 3, 8, 16, 64


def load_torchtitan() -> Any:
    """Torchtitan on CPU: it takes the device type on import, and its kernels for experts need triton."""
    kernels: Any = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None
    sys.modules.setdefault(kernels.__name__, kernels)
    import torchtitan.tools.utils  # noqa: PLC0415

    torchtitan.tools.utils.device_type = "cpu"
    from torchtitan.config import JobConfig  # noqa: PLC0415
    from torchtitan.distributed import ParallelDims, pipeline_parallel  # noqa: PLC0415
    from torchtitan.models.llama3.model.args import TransformerModelArgs  # noqa: PLC0415
    from torchtitan.models.llama3.model.model import Transformer  # noqa: PLC0415

    return types.SimpleNamespace(
        JobConfig=JobConfig,
        ParallelDims=ParallelDims,
        pipeline_llm=pipeline_parallel.pipeline_llm,
        TransformerModelArgs=TransformerModelArgs,
        Transformer=Transformer,
    )


def trained(name: str, csv: str, *, ours: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all steps, and the parameters of this rank after them."""
    titan = load_torchtitan()
    from penstock.trainers.torchtitan import pipeline_llm  # noqa: PLC0415

    config = titan.JobConfig()
    config.parallelism.pipeline_parallel_degree = dist.get_world_size()
    config.parallelism.pipeline_parallel_schedule = name
    config.parallelism.pipeline_parallel_schedule_csv = csv
    config.training.local_batch_size = BATCH
    sizes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1, "etp": 1}
    dims = titan.ParallelDims(**sizes, pp=dist.get_world_size(), world_size=dist.get_world_size())
    arguments = titan.TransformerModelArgs(dim=32, n_layers=6, n_heads=4, vocab_size=WORDS, max_seq_len=LENGTH)
    torch.manual_seed(0)
    model = titan.Transformer(arguments)
    with torch.no_grad():
        model.init_weights()
    schedule, parts, has_first, has_last = (pipeline_llm if ours else titan.pipeline_llm)(
        model, dims, config, torch.device("cpu"), arguments, lambda part, *_: part, cross_entropy
    )
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids, target = torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator)
        losses: list[torch.Tensor] | None = [] if has_last else None
        given = (ids,) if has_first else ()
        schedule.step(*given, target=target if has_last else None, losses=losses)
        found += [float(loss.detach()) for loss in losses or ()]
        optimizer.step()
        optimizer.zero_grad()
    return found, {f"{i}.{n}": p.detach() for i, part in enumerate(parts) for n, p in part.named_parameters()}


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def compare(name: str, csv: str) -> tuple[list[float], list[float], bool]:
    theirs, parameters = trained(name, csv, ours=False)
    ours, own = trained(name, csv, ours=True)
    same = all(torch.allclose(own[each], parameters[each], rtol=1e-5, atol=1e-7) for each in parameters)
    return theirs, ours, same and bool(parameters) and own.keys() == parameters.keys()


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "zb-h1 as CSV"])
@small(lambda name: name == "")  # torchtitan takes ten seconds to load
def test_losses_and_parameters_are_those_of_torchs_runtime(pools: Pools, name: str, tmp_path: Path) -> None:
    csv = ""
    if name.endswith("CSV"):
        csv, name = str(tmp_path / "zb-h1.csv"), "1F1B"
        penstock.build("zb-h1", ranks=2, microbatches=BATCH).write(csv)
    results = pools(2).run(compare, name, csv)
    losses = [found for found, _, _ in results if found]
    assert losses
    assert len(losses[0]) == STEPS * BATCH
    for theirs, ours, same in results:
        assert same
        assert ours == pytest.approx(theirs, rel=1e-6)
