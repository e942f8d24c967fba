"""The installed torchtitan's own `Trainer` on CPUs, with a small Llama, for 0.2.2 and for 0.3.0.

torchtitan takes the device from `torchtitan.tools.utils` on import, and asks it for memory that CPUs do not
count. Its tokenizer and data are replaced, as they need a download; what remains is its own: the model, the
split, FSDP2 and tensor parallelism, the loss, the optimizer, clipping, and the loop.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp import FSDPModule

__all__ = ["BATCH", "IS_OLD", "SEQUENCE", "Run", "installed", "load", "run_trainer", "small_llama"]

BATCH, SEQUENCE, WORDS, LAYERS = 8, 16, 64, 6


def installed() -> str:
    """The version of torchtitan, or an empty text."""
    try:
        return version("torchtitan")
    except PackageNotFoundError:
        return ""


IS_OLD = installed().startswith("0.2")
"""Whether this torchtitan has one `job_config`, TOML files, and models without configs of their own."""


@dataclass(frozen=True)
class Run:
    """What to train: a schedule, and the sizes of the other parallelisms."""

    schedule: str
    order: str = ""
    """A CSV file, or what becomes one."""
    shards: int = 1
    """Of FSDP2."""
    tensors: int = 1
    """Ranks of tensor parallelism."""
    steps: int = 3
    validates: bool = False
    recomputes: bool = False
    """Whether it has torchtitan's default, selective activation checkpointing."""
    model: str = "llama3"
    """Of 0.3.0: another has the sizes of torchtitan's debug model."""
    backend: str = "spmd_types"
    """Of 0.3.0: how it keeps the placement of tensors."""

    def __str__(self) -> str:
        given = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        return "-".join([self.schedule, *(f"{k}={v}" for k, v in given.items() if v != getattr(Run, k))])


def load() -> None:
    """Let torchtitan see a CPU; in 0.2.2 its kernels for experts need triton, which is not there."""
    if "torchtitan" in sys.modules:
        return
    if IS_OLD:
        kernels: Any = ModuleType("torchtitan.models.moe.kernels")
        kernels.generate_permute_indices = None
        sys.modules[kernels.__name__] = kernels
    device: Any = ModuleType("torch.cpu of the tests")
    vars(device).update(vars(torch.cpu))
    device.current_device = lambda: 0
    device.device_count = lambda: 1
    device.get_device_name = lambda *_: "CPU"
    device.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 30)
    device.memory_stats = lambda *_: {}
    device.empty_cache = device.reset_peak_memory_stats = lambda *_: None
    with (
        patch("torch._utils._get_available_device_type", lambda: "cpu"),
        patch("torch._utils._get_device_module", lambda _: device),
    ):
        import torchtitan.tools.utils  # noqa: PLC0415
    assert torchtitan.tools.utils.device_module is device
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_and_sum(module: Any, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor

    FSDPModule.set_gradient_divide_factor = set_factor_and_sum  # type: ignore[assignment, method-assign]


class Batches:
    """Random tokens, different on each data-parallel rank; 0.3.0 gets them by microbatches, with positions."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.rank)
        while True:
            ids, target = torch.randint(WORDS, (2, self.size, SEQUENCE), generator=generator)
            positions = torch.arange(SEQUENCE).repeat(self.size, 1)
            yield ({"input": ids} if IS_OLD else {"input": ids, "positions": positions}), target

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


def small_llama() -> Any:
    """The arguments of a small model: `TransformerModelArgs` of 0.2.2, or a `Llama3Model.Config` of 0.3.0."""
    load()
    if IS_OLD:
        from torchtitan.models.llama3.model.args import TransformerModelArgs  # noqa: PLC0415

        return TransformerModelArgs(dim=32, n_layers=LAYERS, n_heads=4, vocab_size=WORDS, max_seq_len=SEQUENCE)
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: PLC0415
    from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers  # noqa: PLC0415

    weights, norm = {"weight": torch.nn.init.normal_}, {"weight": torch.nn.init.ones_}
    rope = ComplexRoPE.Config(dim=8, max_seq_len=SEQUENCE, theta=500_000)
    layers = _build_llama3_layers(
        n_layers=LAYERS, dim=32, n_heads=4, hidden_dim=64, rope=rope, attn_backend="flex"
    )
    return Llama3Model.Config(
        dim=32,
        vocab_size=WORDS,
        tok_embeddings=Embedding.Config(num_embeddings=WORDS, embedding_dim=32, param_init=weights),
        norm=RMSNorm.Config(normalized_shape=32, param_init=norm),
        lm_head=Linear.Config(in_features=32, out_features=WORDS, param_init=weights),
        layers=layers,
    )


def run_trainer(run: Run, folder: Path, *, ours: bool) -> tuple[list[Any], dict[str, torch.Tensor], str]:
    """The losses and gradient norms that torchtitan logs, the parameters, and the module of the schedule."""
    load()
    from torchtitan.components.metrics import MetricsProcessor  # noqa: PLC0415

    logged: list[Any] = []

    def log(_self: Any, step: int, loss: float, _most: float, norm: float, **_: Any) -> None:
        logged.append((step, loss, norm))

    def log_validation(_self: Any, loss: float, step: int) -> None:
        logged.append((step, loss))

    before = MetricsProcessor.log, MetricsProcessor.log_validation
    MetricsProcessor.log, MetricsProcessor.log_validation = log, log_validation
    names = {"LOCAL_RANK": "0", "WORLD_SIZE": str(torch.distributed.get_world_size())}
    environment, os.environ = os.environ, {**os.environ, **names}  # type: ignore[assignment]
    try:
        trainer = (_old_trainer if IS_OLD else _new_trainer)(run, folder, ours=ours)
        trainer.train()
        trainer.close()
    finally:
        MetricsProcessor.log, MetricsProcessor.log_validation = before
        os.environ = environment  # noqa: B003 -- restored
        gc.enable()  # which torchtitan disables
    parts = enumerate(trainer.model_parts)
    state = {f"{i}.{name}": _local(p) for i, part in parts for name, p in part.named_parameters()}
    return logged, state, type(trainer.pp_schedule).__module__


def _local(parameter: Any) -> torch.Tensor:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach().clone()  # type: ignore[no-any-return]


def _old_trainer(run: Run, folder: Path, *, ours: bool) -> Any:
    from torchtitan.config import JobConfig  # noqa: PLC0415
    from torchtitan.models.llama3 import get_train_spec  # noqa: PLC0415
    from torchtitan.protocols import train_spec  # noqa: PLC0415
    from torchtitan.train import Trainer  # noqa: PLC0415

    from penstock.trainers.torchtitan import pipeline_llm  # noqa: PLC0415

    own = get_train_spec()
    train_spec._extra_train_specs["small"] = replace(
        own,
        model_args={"small": small_llama()},
        pipelining_fn=pipeline_llm if ours else own.pipelining_fn,
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda *, dp_rank, **_: Batches(dp_rank, BATCH),
        state_dict_adapter=None,
    )
    config = JobConfig()
    config.model.name = config.model.flavor = "small"
    config.job.dump_folder = str(folder)
    config.activation_checkpoint.mode = "selective" if run.recomputes else "none"
    config.training.mixed_precision_param = "float32"
    config.parallelism.pipeline_parallel_expert_parallel_overlap = False  # in DualPipeV it needs a GPU
    _set_sizes(config, run)
    return Trainer(config)


def _new_trainer(run: Run, folder: Path, *, ours: bool) -> Any:
    from torchtitan.components.dataloader import BaseDataLoader  # noqa: PLC0415
    from torchtitan.components.tokenizer import BaseTokenizer  # noqa: PLC0415
    from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: PLC0415

    from penstock.trainers.torchtitan import pipeline_llm  # noqa: PLC0415

    @dataclass(kw_only=True)
    class Data(BaseDataLoader.Config):  # type: ignore[misc]
        infinite: bool = True

        def build(self, *, dp_rank: int, local_batch_size: int, **_: Any) -> Batches:
            return Batches(dp_rank, local_batch_size)

    class Tokens(BaseTokenizer.Config):  # type: ignore[misc]
        def build(self, **_: Any) -> None:
            """No tokenizer."""

    registry = import_module(f"torchtitan.models.{run.model}.config_registry")
    config: Any = getattr(registry, f"{run.model}_debugmodel")()
    config.model_spec.state_dict_adapter = None
    if ours:
        config.model_spec.pipelining_fn = pipeline_llm
    if run.model == "llama3":
        config.model_spec.model = small_llama()
        config.loss.loss_fn.global_vocab_size = WORDS
    for layer in config.model_spec.model.layers:  # torch has no backward of flex attention on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dump_folder = str(folder)
    if not run.recomputes:
        config.activation_checkpoint = None
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = run.backend
    config.dataloader, config.tokenizer = Data(), Tokens()
    if run.validates:
        config.validator.enable, config.validator.freq, config.validator.steps = True, 2, 1
        config.validator.dataloader = Data()
    _set_sizes(config, run)
    return config.build()


def _set_sizes(config: Any, run: Run) -> None:
    """What both versions have."""
    config.training.local_batch_size, config.training.seq_len, config.training.steps = (
        BATCH,
        SEQUENCE,
        run.steps,
    )
    config.parallelism.pipeline_parallel_degree = (
        torch.distributed.get_world_size() // run.shards // run.tensors
    )
    config.parallelism.pipeline_parallel_schedule = run.schedule
    config.parallelism.pipeline_parallel_schedule_csv = run.order
    config.parallelism.data_parallel_shard_degree = run.shards
    config.parallelism.tensor_parallel_degree = run.tensors
    config.metrics.log_freq = 1
    config.checkpoint.enable = False
    config.debug.seed = 1
    config.lr_scheduler.warmup_steps = 1
