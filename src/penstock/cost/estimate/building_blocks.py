"""Building blocks of layers: matrix products, pointwise operations and collectives of tensor parallelism."""

from __future__ import annotations

from penstock.cost.estimate.model_config import ModelConfig
from penstock.cost.estimate.operations import Collective, Operation, Passes, Saved
from penstock.cost.estimate.setting import Setting

__all__ = ["dropout", "gather_and_scatter", "matmul", "norm", "pointwise"]


def matmul(
    name: str,
    setting: Setting,
    tokens: float,
    inner: float,
    outer: float,
    *,
    saved: tuple[Saved, ...] = (),
    output_gradient: float | None = None,
    bias: bool = False,
    matrices: float = 1,
    is_expert: bool = False,
    repeated_at: str = "full",
) -> Operation:
    """Tokens times a matrix of inner by outer: 2·tokens·inner·outer FLOPs in each pass."""
    flops = 2.0 * tokens * inner * outer
    moved = setting.value_bytes * (tokens * (inner + outer) + matrices * inner * outer)
    kept = setting.value_bytes * tokens * outer if output_gradient is None else output_gradient
    return Operation(
        name,
        "matmul",
        Passes(flops, flops, flops),
        Passes(moved, moved, moved),
        weights=matrices * (inner * outer + (outer if bias else 0)),
        saved=saved,
        output_gradient=kept,
        repeated_at=repeated_at,
        is_expert=is_expert,
    )


def pointwise(
    name: str,
    moved: float,
    *,
    backward: float | None = None,
    weights: float = 0.0,
    saved: tuple[Saved, ...] = (),
    kernels: int = 1,
    repeated_at: str = "pointwise",
) -> Operation:
    """An operation that is bound by memory bandwidth; `moved` bytes forward, one and a half times backward."""
    back = 1.5 * moved if backward is None else backward
    return Operation(
        *(name, "memory", Passes(), Passes(moved, back, 0)),
        weights=weights,
        saved=saved,
        repeated_at=repeated_at,
        kernels=kernels,
    )


def norm(name: str, config: ModelConfig, setting: Setting, tokens: float, size: float) -> Operation:
    """LayerNorm or RMSNorm: saves its input; eager RMSNorm also saves the normalized values."""
    e = setting.value_bytes
    saved = [Saved(f"input of {name}", e * tokens * size)]
    eager = setting.kernels == "eager" and not config.layer_norm
    if eager:
        saved.append(Saved(f"normalized values of {name}", e * tokens * size, recomputed_at="pointwise"))
    weights = size * (2 if config.layer_norm else 1)
    moved = 2 * e * tokens * size * (3 if eager else 1)
    return pointwise(name, moved, weights=weights, saved=tuple(saved), kernels=5 if eager else 1)


def dropout(name: str, setting: Setting, tokens: float, size: float) -> Operation:
    """Dropout: saves a mask of one byte per entry."""
    moved = (2 * setting.value_bytes + 1) * tokens * size
    mask = Saved(f"mask of {name}", tokens * size)
    return pointwise(name, moved, backward=moved, saved=(mask,), repeated_at="full")


def gather_and_scatter(name: str, setting: Setting, size: float) -> tuple[Collective, ...]:
    """Around a pair of matrix products that tensor parallel ranks share.

    With sequence parallelism: all-gather before, reduce-scatter after, both again for the input gradient, and
    one all-gather of the saved input for the weight gradient. Without it: one all-reduce in each pass.
    """
    t = setting.tensor_parallel
    if t == 1:
        return ()
    part = setting.value_bytes * setting.tokens * size * (t - 1) / t
    again = part if setting.sequence_parallel else 0.0
    calls = Passes(2, 2, 1) if again else Passes(1, 1, 0)
    return (Collective(name, "tensor", Passes(2 * part, 2 * part, again), calls),)
