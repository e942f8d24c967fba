"""`ParallelConfig`: sequence, microbatch, parallel sizes, precision, sharding and recomputation of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.arguments import printable, whole_number
from penstock.cost.estimate.model_config import ModelConfig
from penstock.cost.estimate.operations import RECOMPUTATION
from penstock.errors import EstimateError, Message, Parameter

PRECISIONS = ("bf16", "fp8", "fp32")
KERNELS = ("fused", "eager")
ATTENTION = ("flash", "unfused")
_SIZES = (
    *("sequence", "microbatch_size", "tensor_parallel", "context_parallel", "expert_parallel"),
    "data_parallel",
)
_LARGEST = 10**9


def size_problems(sizes: Mapping[str, object]) -> list[Message]:
    """List the parameters that are not integers from 1 to a thousand million."""
    problems = []
    for name, value in sizes.items():
        number = whole_number(value)
        if number is None or not 1 <= number <= _LARGEST:
            rule = "at most 1e9" if number is not None and number > _LARGEST else "an integer above 0"
            problems.append(Message(Parameter(name), f" must be {rule} (given {printable(repr(value))})"))
    return problems


@dataclass(frozen=True)
class ParallelConfig:
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
    recompute_granularity: str = "none"
    """What each layer recomputes in the backward."""
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
            raise EstimateError(Message.join("; ", problems))

    def _problems_of_values(self) -> list[Message]:
        problems = size_problems({name: getattr(self, name) for name in _SIZES})
        choices: dict[str, tuple[object, ...]] = {
            "precision": PRECISIONS,
            "recompute_granularity": RECOMPUTATION,
            "attention": ATTENTION,
            "kernels": KERNELS,
            "zero": (0, 1, 2, 3),
            "gradient_bytes": (2, 4),
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                known = f" must be one of {', '.join(map(str, allowed))} (given {printable(str(value))})"
                problems.append(Message(Parameter(name), known))
        return problems

    def _problems_of_sizes(self, config: ModelConfig) -> list[Message]:
        problems, t, heads = [], self.tensor_parallel, config.attention.heads
        divided = {"attention heads": heads, "the feed-forward's width": config.width}
        for what, size in divided.items():
            if size % t:
                near = max(n for n in range(1, min(t, size + 1)) if size % n == 0)
                divides = f" does not divide {size} ({what} of {config.name}): try "
                tensor = Parameter("tensor_parallel", t), Parameter("tensor_parallel", near)
                problems.append(Message(tensor[0], divides, tensor[1]))
        parts = 2 * self.context_parallel if self.context_parallel > 1 else 1
        if self.sequence_parallel:
            parts *= t
        if not problems and self.sequence % parts:
            context = Parameter("context_parallel", self.context_parallel)
            why = Message(Parameter("tensor_parallel", t), ", ") if self.sequence_parallel else Message()
            given, must = Parameter("sequence", self.sequence), f" must be a multiple of {parts} for "
            nearest = Parameter("sequence", self.sequence - self.sequence % parts or parts)
            problems.append(Message(given, must, why, context, ": try ", nearest))
        return problems

    def _problems_of_experts(self, config: ModelConfig) -> list[Message]:
        ep, count = self.expert_parallel, config.experts.count if config.experts else 0
        if not count:
            refusal = Message(Parameter("expert_parallel", ep), f": {config.name} has no experts; leave it out")
            return [refusal] if ep > 1 else []
        problems, expert = [], Parameter("expert_parallel", ep)
        if count % ep:
            near = max(n for n in range(1, min(ep, count + 1)) if count % n == 0)
            divides = f" does not divide the {count} experts of {config.name}: try "
            problems.append(Message(expert, divides, Parameter("expert_parallel", near)))
        if self.ranks_per_stage % ep:
            names = ("tensor_parallel", "context_parallel", "data_parallel")
            product = Message.join(" x ", [Message(Parameter(name)) for name in names])
            share = f" = {self.ranks_per_stage}, whose ranks share the experts: try "
            larger = Parameter("data_parallel", ep * self.data_parallel)
            problems.append(Message(expert, " does not divide ", product, share, larger))
        if self.tensor_parallel > 1 and not self.sequence_parallel:
            tensor, parallel = Parameter("tensor_parallel"), Parameter("sequence_parallel", value=True)
            problems.append(Message("experts with ", tensor, " above 1 need ", parallel))
        return problems
