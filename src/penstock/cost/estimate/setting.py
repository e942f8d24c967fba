"""The setting of a training job: sequence, microbatch, parallel sizes, precision, sharding, recomputation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.arguments import printable, whole_number
from penstock.cost.estimate.model_config import ModelConfig
from penstock.cost.estimate.operations import RECOMPUTATION
from penstock.errors import EstimateError

PRECISIONS = ("bf16", "fp8", "fp32")
KERNELS = ("fused", "eager")
ATTENTION = ("flash", "unfused")
_SIZES = {
    "sequence": "--seq",
    "microbatch_size": "--microbatch-size",
    "tensor_parallel": "--tp",
    "context_parallel": "--cp",
    "expert_parallel": "--ep",
    "data_parallel": "--dp",
}
_LARGEST = 10**9


def size_problems(sizes: Mapping[str, object]) -> list[str]:
    """Which of these options are no integers from 1 to a thousand million."""
    problems = []
    for option, value in sizes.items():
        number = whole_number(value)
        if number is None or not 1 <= number <= _LARGEST:
            rule = "at most 1e9" if number is not None and number > _LARGEST else "an integer above 0"
            problems.append(f"{option} must be {rule} (given {printable(repr(value))})")
    return problems


@dataclass(frozen=True)
class Setting:
    """How a model is trained, apart from the pipeline."""

    sequence: int
    """Tokens of a sample."""
    microbatch_size: int = 1
    """Samples of a microbatch."""
    tensor_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    """Out of the tensor, context and data parallel ranks; an expert is never split."""
    data_parallel: int = 1
    sequence_parallel: bool = True
    """Tensor parallel ranks share the tokens outside of the matrix products, and their saved tensors."""
    precision: str = "bf16"
    """fp8: matrix products and their saved inputs in 8 bits, all else as bf16."""
    gradient_bytes: int = 4
    """Of each weight's gradient: 4, as Megatron and FSDP2 sum them, or 2."""
    zero: int = 1
    """What data parallel ranks shard: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too (FSDP)."""
    recompute: str = "none"
    attention: str = "flash"
    """flash: causal, no matrix of probabilities; unfused: the whole square is computed and saved."""
    kernels: str = "fused"
    """eager: norms and gates as PyTorch's eager mode runs them, with more saved tensors."""

    @property
    def value_bytes(self) -> int:
        """Of an activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def input_bytes(self) -> int:
        """Of an entry of a matrix product's saved input."""
        return 1 if self.precision == "fp8" else self.value_bytes

    @property
    def tokens(self) -> float:
        """Of a microbatch on each rank, shared by tensor parallel ranks."""
        return self.microbatch_size * self.sequence / self.context_parallel

    @property
    def own_tokens(self) -> float:
        """Of a microbatch on each rank where sequence parallelism applies."""
        return self.tokens / self.tensor_parallel if self.sequence_parallel else self.tokens

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights: data and context parallel ones."""
        return self.data_parallel * self.context_parallel

    @property
    def expert_replicas(self) -> float:
        """Ranks that hold the same experts."""
        return self.tensor_parallel * self.replicas / self.expert_parallel

    @property
    def ranks_per_stage(self) -> int:
        """Devices that run one pipeline stage."""
        return self.tensor_parallel * self.replicas

    def check(self, config: ModelConfig) -> None:
        """Raise all that does not fit together, each with what would."""
        problems = self._problems_of_values()
        if not problems:
            problems = [*self._problems_of_sizes(config), *self._problems_of_experts(config)]
        if problems:
            raise EstimateError("; ".join(problems))

    def _problems_of_values(self) -> list[str]:
        problems = size_problems({option: getattr(self, name) for name, option in _SIZES.items()})
        choices = {
            "--precision": (self.precision, PRECISIONS),
            "--recompute": (self.recompute, RECOMPUTATION),
            "--attention": (self.attention, ATTENTION),
            "--kernels": (self.kernels, KERNELS),
            "--zero": (self.zero, (0, 1, 2, 3)),
            "--gradient-bytes": (self.gradient_bytes, (2, 4)),
        }
        for option, (value, allowed) in choices.items():
            if value not in allowed:
                given = printable(str(value))
                problems.append(f"{option} must be one of {', '.join(map(str, allowed))} (given {given})")
        return problems

    def _problems_of_sizes(self, config: ModelConfig) -> list[str]:
        problems, t, heads = [], self.tensor_parallel, config.attention.heads
        divided = {"attention heads": heads, "the feed-forward's width": config.width}
        for what, size in divided.items():
            if size % t:
                near = max(n for n in range(1, min(t, size + 1)) if size % n == 0)
                problems.append(f"--tp {t} does not divide {size} ({what} of {config.name}): try --tp {near}")
        parts = 2 * self.context_parallel if self.context_parallel > 1 else 1
        if self.sequence_parallel:
            parts *= t
        if not problems and self.sequence % parts:
            why = f"--tp {t}, --cp {self.context_parallel}" if self.sequence_parallel else "twice --cp"
            near = self.sequence - self.sequence % parts
            problems.append(
                f"--seq {self.sequence} must be a multiple of {parts} for {why}: try --seq {near or parts}"
            )
        return problems

    def _problems_of_experts(self, config: ModelConfig) -> list[str]:
        ep, count = self.expert_parallel, config.experts.count if config.experts else 0
        if not count:
            return [f"--ep {ep}: {config.name} has no experts; leave --ep out"] if ep > 1 else []
        problems = []
        if count % ep:
            near = max(n for n in range(1, min(ep, count + 1)) if count % n == 0)
            problems.append(f"--ep {ep} does not divide the {count} experts of {config.name}: try --ep {near}")
        if self.ranks_per_stage % ep:
            product = f"--tp x --cp x --dp = {self.ranks_per_stage}"
            problems.append(
                f"--ep {ep} does not divide {product}, whose ranks share the experts: try --dp "
                f"{ep * self.data_parallel}"
            )
        if self.tensor_parallel > 1 and not self.sequence_parallel:
            problems.append("experts with --tp above 1 need sequence parallelism: remove --no-sp")
        return problems
