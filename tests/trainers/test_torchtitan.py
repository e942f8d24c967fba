"""Promise: torchtitan's own trainer trains on Penstock's runtime as on torch's, in each version that it has.

The losses, gradient norms and parameters are equal; the trainer is that of `tests/support/titan_trainer.py`.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock.errors import PipelineError
from penstock.planning.layout import parse_layout
from penstock.trainers import export_torchtitan
from tests.support.grids import small
from tests.support.pool import Pools
from tests.support.titan_trainer import BATCH, IS_OLD, Run, installed, load, run_trainer

pytestmark = pytest.mark.skipif(not installed(), reason="torchtitan is not installed")

STEPS = 3


SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "zb-h1")
"""Of the schedules below, those that split backwards."""

ONLY_NEW = [
    Run("Interleaved1F1B", validates=True),
    Run("Interleaved1F1B", model="deepseek_v3"),
    Run("1F1B", tensors=2, backend="full_dtensor"),
]

RUNS = [
    Run("GPipe"),
    Run("1F1B"),
    Run("Interleaved1F1B"),
    Run("LoopedBFS"),
    Run("InterleavedZeroBubble"),
    Run("ZBVZeroBubble"),
    Run("DualPipeV"),
    Run("1F1B", order="zb-h1"),
    Run("PipelineScheduleSingle", order="zb-h1"),
    Run("ZBVZeroBubble", recomputes=True),
    Run("Interleaved1F1B", shards=2),
    Run("1F1B", tensors=2),
    *([] if IS_OLD else ONLY_NEW),
]


def reference(run: Run) -> Run:
    """What torch's runtime runs in comparison: the same, or what has the same stages and no split backwards.

    torchtitan 0.3.0 has all stages in FSDP2, and with torch 2.15.0 torch's runtime loses gradients of split
    backwards there: the norm of InterleavedZeroBubble is 1.35 where that of Interleaved1F1B is 2.87. With
    selective checkpointing it refuses split backwards.
    """
    if (IS_OLD and not run.recomputes) or (run.order or run.schedule) not in SPLIT:
        return run
    if run.schedule in ("ZBVZeroBubble", "DualPipeV"):
        return replace(run, order="gpipe in a V")
    return replace(run, schedule="1F1B" if run.order else "Interleaved1F1B", order="")


def write_order(run: Run, folder: Path) -> Run:
    """The run with its order as CSV."""
    if not run.order:
        return run
    csv = folder / f"{run.order}.csv"
    if run.order == "gpipe in a V":
        rows = [["0F", "3F", "3B", "0B"], ["1F", "2F", "2B", "1B"]]
        actions = [[f"{each}{k}" for each in row for k in range(BATCH)] for row in rows]
        csv.write_text("\n".join(map(",".join, actions)) + "\n", encoding="utf-8")
    else:
        penstock.build(run.order, ranks=2, microbatches=BATCH).write(csv)
    return replace(run, order=str(csv))


@pytest.mark.parametrize("run", RUNS, ids=str)
@small(lambda run: run == Run("Interleaved1F1B"))  # torchtitan takes ten seconds to load
def test_the_trainer_logs_the_same_and_has_the_same_parameters(pools: Pools, run: Run, tmp_path: Path) -> None:
    pool, found = pools(2 * run.shards * run.tensors), []
    for ours, chosen in ((False, reference(run)), (True, run)):
        if pool.ranks > 2 and not IS_OLD:  # FSDP2 refuses the mesh of a second trainer in a process
            pool.stop()
        found.append(pool.run(partial(run_trainer, ours=ours), write_order(chosen, tmp_path), tmp_path))
    for (theirs, parameters, module), (ours_logged, own, our_module) in zip(*found, strict=True):
        assert module == "torch.distributed.pipelining.schedules"
        assert our_module == "penstock.pipelining.schedules"
        assert len(ours_logged) == run.steps + 2 * run.validates
        for expected, logged in zip(theirs, ours_logged, strict=True):
            assert logged == pytest.approx(expected, rel=1e-5)
        assert own.keys() == parameters.keys() != set()
        for name, parameter in own.items():
            torch.testing.assert_close(parameter, parameters[name], rtol=1e-4, atol=1e-6)
    assert any(loss > 0 for logged, _, _ in found[1] for _, loss, *_ in logged)


# --- a model of our own: its modules, and a vision encoder ------------------------------------------------


class Small(nn.Module):
    """A chain of modules with torchtitan's names, of which a stage may have any."""

    def __init__(self, head: str, *, sees: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(16, 8)
        self.vision_encoder = nn.Linear(8, 8) if sees else None
        self.layers = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in range(4)})
        self.norm = nn.LayerNorm(8)
        self.add_module(head, nn.Linear(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chain = [self.tok_embeddings, self.vision_encoder, *self.layers.values(), self.norm]
        for each in [*chain, getattr(self, "output", None), getattr(self, "lm_head", None)]:
            x = x if each is None else each(x)
        return x


HEAD = "output" if IS_OLD else "lm_head"


def pipelined(
    name: str, model: nn.Module, stages: list[list[str]] | None, *, ours: bool = True, **more: Any
) -> Any:
    """What a function of this name returns, called as the trainer of the installed torchtitan calls it."""
    load()
    from torchtitan.distributed import ParallelDims, pipeline_parallel  # noqa: PLC0415

    from penstock.trainers import torchtitan  # noqa: PLC0415

    function = getattr(torchtitan if ours else pipeline_parallel, name)
    sizes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1, "world_size": dist.get_world_size()}
    dims = ParallelDims(**sizes, pp=dist.get_world_size(), **({"etp": 1} if IS_OLD else {}))
    if IS_OLD:
        from torchtitan.config import JobConfig  # noqa: PLC0415

        config = JobConfig()
        set_stages(config, stages)
        arguments = SimpleNamespace(n_layers=4)
        return function(
            model, dims, config, torch.device("cpu"), arguments, lambda part, *_: part, loss, **more
        )
    from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: PLC0415

    config = SimpleNamespace(parallelism=ParallelismConfig(), training=TrainingConfig())
    set_stages(config, stages)
    return function(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=None,
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=SimpleNamespace(layers=range(4)),
        parallelize_fn=lambda part, **_: part,
        loss_fn=loss,
        **more,
    )


def set_stages(config: Any, stages: list[list[str]] | None) -> None:
    config.training.local_batch_size = BATCH
    config.parallelism.pipeline_parallel_degree = dist.get_world_size()
    config.parallelism.module_fqns_per_model_part = stages


def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
    """0.3.0 has losses that return metrics too."""
    found = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
    return found if IS_OLD else (found, {"tokens": torch.tensor(1)})


def refusals() -> list[str]:
    """Why models and stages that do not fit are refused."""
    cases: list[tuple[str, nn.Module, Any, dict[str, Any]]] = [
        (
            "pipeline_llm",
            Small(HEAD),
            [["tok_embeddings", "layers.0", "layers.2.weight"], ["norm", "head"]],
            {},
        ),
        ("pipeline_llm", Small("other"), None, {}),
        ("pipeline_llm", Small(HEAD, sees=True), None, {}),
        ("pipeline_vlm", Small(HEAD, sees=True), [["tok_embeddings"]], {}),
        ("pipeline_llm", Small(HEAD), None, {"unheard_of": 1}),
    ]
    found = []
    for name, model, stages, more in cases:
        with pytest.raises((PipelineError, TypeError)) as caught:
            pipelined(name, model, stages, **more)
        found.append(str(caught.value))
    return found


def test_names_of_modules_that_do_not_fit_the_model_are_refused(pools: Pools) -> None:
    remedy = "set parallelism.module_fqns_per_model_part to the modules of each stage, of tok_embeddings, "
    faults, other, sees, vision, unknown = pools(2).run(refusals)[0]
    assert faults.splitlines() == [
        "the stages do not have the modules of Small:",
        "  stage 0 has layers.2.weight, and the model has not",
        "  stage 1 has head, and the model has not",
        f"  no stage has layers.1, layers.2, layers.3, {HEAD}",
        f"  {remedy}layers.0 to layers.3, norm, {HEAD}",
    ]
    assert f"  torchtitan's own split has {HEAD}, and the model has not\n  no stage has other\n" in other
    assert "\n  no stage has vision_encoder\n" in sees
    own = (
        f"torchtitan {installed()} has no pipeline_vlm" if IS_OLD else "no stage has vision_encoder, layers.0, "
    )
    assert own in vision
    assert "unheard_of" in unknown


def losses_of_vlm(*, ours: bool) -> list[float]:
    torch.manual_seed(0)
    schedule, parts, has_first, has_last = pipelined("pipeline_vlm", Small(HEAD, sees=True), None, ours=ours)
    assert [part.vision_encoder is not None for part in parts] == [has_first]
    ids, target = torch.randint(16, (2, BATCH, 1, 4), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    found = []
    for _ in range(STEPS):
        losses: list[torch.Tensor] = []
        schedule.step(
            arg_mbs=[(each,) for each in ids] if has_first else None,
            kwarg_mbs=[{} for _ in ids],
            target_mbs=list(target) if has_last else None,
            losses=losses if has_last else None,
            return_outputs=False,
        )
        found += [float(each.detach()) for each in losses]
        optimizer.step()
        optimizer.zero_grad()
    return found


def both_vlm() -> tuple[list[float], list[float]]:
    return losses_of_vlm(ours=False), losses_of_vlm(ours=True)


@pytest.mark.skipif(IS_OLD, reason="torchtitan 0.2.2 has no pipeline_vlm")
def test_a_model_with_a_vision_encoder_trains_as_on_torchs_runtime(pools: Pools) -> None:
    (_, _), (theirs, ours) = pools(2).run(both_vlm)
    assert len(ours) == BATCH * STEPS
    assert ours == pytest.approx(theirs, rel=1e-6)


# --- what `penstock export` writes -------------------------------------------------------------------------


def parsed(flags: list[str], toml: str) -> dict[str, Any]:
    """What torchtitan reads from the flags, and from the file alone."""
    load()
    from torchtitan.config import ConfigManager  # noqa: PLC0415

    model = [] if IS_OLD else ["--module=llama3", "--config=llama3_debugmodel"]
    found = settings_of(ConfigManager().parse_args([*model, *flags]))
    assert not toml or settings_of(ConfigManager().parse_args([f"--job.config_file={toml}"])) == found
    return found


def settings_of(config: Any) -> dict[str, Any]:
    names = ("degree", "schedule", "schedule_csv", "microbatch_size")
    return {
        **{name: getattr(config.parallelism, f"pipeline_parallel_{name}") for name in names},
        "modules": config.parallelism.module_fqns_per_model_part,
        "batch": config.training.local_batch_size,
        "disable_cuda_graphs": getattr(config.training, "disable_cuda_graphs", None),
    }


def test_torchtitan_reads_what_export_writes(pools: Pools, tmp_path: Path) -> None:
    schedule = penstock.build("zb-h1", ranks=2, microbatches=4)
    export_torchtitan(schedule, parse_layout("Ett|tL"), 2, str(tmp_path)).write(tmp_path)
    made = export_torchtitan(schedule, parse_layout("Ett|tL"), 2, str(tmp_path))
    toml = tmp_path / "torchtitan.toml" if IS_OLD else None
    flags = shlex.split(
        " ".join(made.flags) if toml else (tmp_path / "flags.txt").read_text().replace("\\\n", "")
    )
    found = pools(2).run(parsed, flags, str(toml or ""))[0]
    assert penstock.read(found["schedule_csv"]) == schedule
    assert found == {
        "degree": 2,
        "schedule": "1F1B",
        "schedule_csv": str(tmp_path / "schedule.csv"),
        "microbatch_size": 2,
        "modules": [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "norm", HEAD]],
        "batch": 8,
        "disable_cuda_graphs": None if IS_OLD else True,
    }
