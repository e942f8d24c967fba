"""Attention of one block: projections, rotary embedding, scores, output; multi-head, grouped or latent."""

from __future__ import annotations

from math import ceil

from penstock.cost.estimate.building_blocks import dropout, gather_and_scatter, matmul, norm, pointwise
from penstock.cost.estimate.model_config import ModelConfig
from penstock.cost.estimate.operations import Collective, Operation, Passes, Saved
from penstock.cost.estimate.setting import Setting

__all__ = ["attention_collectives", "attention_operations"]


def attention_operations(config: ModelConfig, setting: Setting) -> list[Operation]:
    """All operations from the norm before attention to the residual after it."""
    h, own, e = config.hidden, setting.own_tokens, setting.value_bytes
    shape = config.attention
    project = _latent_projections if shape.kv_rank is not None else _projections
    per_rank = _heads(setting, shape.heads)
    out = per_rank * shape.value_size
    projection = matmul(
        *("attention output", setting, setting.tokens, out, h),
        saved=(
            Saved("input of attention output", setting.input_bytes * setting.tokens * out, for_weight=True),
        ),
        output_gradient=e * own * h,
        bias=shape.output_bias,
    )
    found = [norm("attention norm", config, setting, own, h), *project(config, setting)]
    found += [_core(config, setting), projection]
    if config.dropout:
        found.append(dropout("attention dropout", setting, own, h))
    found.append(pointwise("attention residual", 3 * e * own * h, backward=0.0, repeated_at="full"))
    return found


def attention_collectives(config: ModelConfig, setting: Setting) -> list[Collective]:
    """Those of tensor parallelism, and keys and values that context parallel ranks exchange in a ring."""
    found = [*gather_and_scatter("attention", setting, config.hidden)]
    c, shape = setting.context_parallel, config.attention
    if c > 1:
        size = _heads(setting, shape.kv_heads) * (shape.head_size + shape.value_size)
        part = setting.value_bytes * setting.tokens * size * (c - 1)
        found.append(Collective("keys and values", "context", Passes(part, 2 * part, 0), Passes(c - 1, c - 1)))
    return found


def _heads(setting: Setting, heads: int) -> int:
    """Heads per rank; fewer key and value heads than ranks are replicated."""
    return ceil(heads / setting.tensor_parallel)


def _linear_input(what: str, setting: Setting, tokens: float, size: float) -> tuple[Saved, ...]:
    return (Saved(what, setting.input_bytes * tokens * size, for_weight=True, recomputed_at="pointwise"),)


def _projections(config: ModelConfig, setting: Setting) -> list[Operation]:
    shape, e, tokens = config.attention, setting.value_bytes, setting.tokens
    heads, kv_heads = _heads(setting, shape.heads), _heads(setting, shape.kv_heads)
    queries, keys, values = heads * shape.head_size, kv_heads * shape.head_size, kv_heads * shape.value_size
    found = [
        matmul(
            *("queries, keys, values", setting, tokens, config.hidden, queries + keys + values),
            saved=_linear_input("input of queries, keys, values", setting, setting.own_tokens, config.hidden),
            bias=shape.biases,
        )
    ]
    if shape.head_norms:
        both = queries + keys
        saved = Saved("input of head norms", e * tokens * both)
        found.append(
            pointwise("head norms", 2 * e * tokens * both, weights=2 * shape.head_size, saved=(saved,))
        )
    if not config.positions:
        found.append(pointwise("rotary embedding", 2 * e * tokens * (queries + keys), repeated_at="full"))
    return found


def _latent_projections(config: ModelConfig, setting: Setting) -> list[Operation]:
    """Down to a low rank, on every tensor parallel rank, and up to the heads of this rank."""
    shape, h, tokens, own = config.attention, config.hidden, setting.tokens, setting.own_tokens
    assert shape.kv_rank is not None
    heads, plain = _heads(setting, shape.heads), shape.head_size - shape.rotary_size
    queries, up = heads * shape.head_size, heads * (plain + shape.value_size)
    down = (shape.query_rank or 0) + shape.kv_rank + shape.rotary_size
    found = [
        matmul(
            *("latent down-projection", setting, own, h, down),
            saved=_linear_input("input of the down-projection", setting, own, h),
        )
    ]
    for name, rank, size in (("query", shape.query_rank, queries), ("key-value", shape.kv_rank, up)):
        if rank is None:  # queries straight from the hidden states, whose tensor is saved already
            found.append(matmul("queries", setting, tokens, h, size))
            continue
        found.append(norm(f"{name} norm", config, setting, own, rank))
        saved = _linear_input(f"input of the {name} up-projection", setting, own, rank)
        up_projection = (f"{name} up-projection", setting, tokens, rank, size)
        found.append(matmul(*up_projection, saved=saved, repeated_at="latent"))
    rotated = (heads + 1) * shape.rotary_size
    moved = 2 * setting.value_bytes * tokens * rotated
    found.append(pointwise("rotary embedding", moved, repeated_at="latent"))
    return found


def _core(config: ModelConfig, setting: Setting) -> Operation:
    """Scores, softmax and the weighted values.

    Flash attention computes the lower triangle only, and the scores again for the gradient: 2.5 times the
    forward. Unfused attention computes and saves the whole square: as Megatron's formula counts it, softmax and
    dropout of a·s·s·b entries take 5 bytes each.
    """
    shape, e, tokens, s = config.attention, setting.value_bytes, setting.tokens, setting.sequence
    heads, kv_heads = _heads(setting, shape.heads), _heads(setting, shape.kv_heads)
    if shape.kv_rank is not None:
        kv_heads = heads
    forward = 2.0 * tokens * s * heads * (shape.head_size + shape.value_size)
    queries, keys = tokens * heads * shape.head_size, tokens * kv_heads * shape.head_size
    values, out = tokens * kv_heads * shape.value_size, tokens * heads * shape.value_size
    level = "full" if shape.kv_rank is None else "latent"
    saved = [Saved("queries, keys, values", e * (queries + keys + values), recomputed_at=level)]
    if setting.attention == "flash":
        forward /= 2
        saved.append(Saved("log of the softmax sums", 4 * tokens * heads))
        flops, square = Passes(forward, 2.5 * forward), 0.0
    else:
        flops, square = Passes(forward, 2 * forward), tokens * s * heads
        saved.append(Saved("softmax", e * square, recomputed_at="selective"))
        if config.dropout:
            saved.append(Saved("dropout of softmax", (e + 1) * square, recomputed_at="selective"))
    moved = e * (queries + keys + values + out) + 4 * e * square
    repeated = "selective" if square else "full"
    return Operation(
        *("attention scores", "attention", flops, Passes(moved, 2 * moved)),
        saved=tuple(saved),
        repeated_at=repeated,
    )
