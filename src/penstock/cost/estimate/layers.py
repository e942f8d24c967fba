"""The layers of a model on one rank: embedding, attention, feed-forward, blocks, output layer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import ceil

from penstock.cost.estimate.model_config import Experts, ModelConfig
from penstock.cost.estimate.operations import Collective, LayerOperations, Operation, Passes, Saved
from penstock.cost.estimate.parallel_config import ParallelConfig

# Building blocks of layers: matrix products, pointwise operations and collectives of tensor parallelism.


def matmul(
    name: str,
    parallel: ParallelConfig,
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
    moved = parallel.value_bytes * (tokens * (inner + outer) + matrices * inner * outer)
    kept = parallel.value_bytes * tokens * outer if output_gradient is None else output_gradient
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


def norm(name: str, config: ModelConfig, parallel: ParallelConfig, tokens: float, size: float) -> Operation:
    """LayerNorm or RMSNorm: saves its input; eager RMSNorm also saves the normalized values."""
    e = parallel.value_bytes
    saved = [Saved(f"input of {name}", e * tokens * size)]
    eager = parallel.kernels == "eager" and not config.layer_norm
    if eager:
        saved.append(Saved(f"normalized values of {name}", e * tokens * size, recomputed_at="pointwise"))
    weights = size * (2 if config.layer_norm else 1)
    moved = 2 * e * tokens * size * (3 if eager else 1)
    return pointwise(name, moved, weights=weights, saved=tuple(saved), kernels=5 if eager else 1)


def dropout(name: str, parallel: ParallelConfig, tokens: float, size: float) -> Operation:
    """Dropout: saves a mask of one byte per entry."""
    moved = (2 * parallel.value_bytes + 1) * tokens * size
    mask = Saved(f"mask of {name}", tokens * size)
    return pointwise(name, moved, backward=moved, saved=(mask,), repeated_at="full")


def gather_and_scatter(name: str, parallel: ParallelConfig, size: float) -> tuple[Collective, ...]:
    """Around a pair of matrix products that tensor parallel ranks share.

    With sequence parallelism: all-gather before, reduce-scatter after, both again for the input gradient, and
    one all-gather of the saved input for the weight gradient. Without it: one all-reduce in each pass.
    """
    t = parallel.tensor_parallel
    if t == 1:
        return ()
    part = parallel.value_bytes * parallel.tokens * size * (t - 1) / t
    again = part if parallel.sequence_parallel else 0.0
    calls = Passes(2, 2, 1) if again else Passes(1, 1, 0)
    return (Collective(name, "tensor", Passes(2 * part, 2 * part, again), calls),)


# Attention of one block: projections, rotary embedding, scores, output; multi-head, grouped or latent.


def attention_operations(config: ModelConfig, parallel: ParallelConfig) -> list[Operation]:
    """All operations from the norm before attention to the residual after it."""
    h, own, e = config.hidden, parallel.own_tokens, parallel.value_bytes
    shape = config.attention
    project = _latent_projections if shape.kv_rank is not None else _projections
    per_rank = _heads(parallel, shape.heads)
    out = per_rank * shape.value_size
    projection = matmul(
        *("attention output", parallel, parallel.tokens, out, h),
        saved=(
            Saved("input of attention output", parallel.input_bytes * parallel.tokens * out, for_weight=True),
        ),
        output_gradient=e * own * h,
        bias=shape.output_bias,
    )
    found = [norm("attention norm", config, parallel, own, h), *project(config, parallel)]
    found += [_core(config, parallel), projection]
    if config.dropout:
        found.append(dropout("attention dropout", parallel, own, h))
    found.append(pointwise("attention residual", 3 * e * own * h, backward=0.0, repeated_at="full"))
    return found


def attention_collectives(config: ModelConfig, parallel: ParallelConfig) -> list[Collective]:
    """Those of tensor parallelism, and keys and values that context parallel ranks exchange in a ring."""
    found = [*gather_and_scatter("attention", parallel, config.hidden)]
    c, shape = parallel.context_parallel, config.attention
    if c > 1:
        size = _heads(parallel, shape.kv_heads) * (shape.head_size + shape.value_size)
        part = parallel.value_bytes * parallel.tokens * size * (c - 1)
        found.append(Collective("keys and values", "context", Passes(part, 2 * part, 0), Passes(c - 1, c - 1)))
    return found


def _heads(parallel: ParallelConfig, heads: int) -> int:
    """Heads per rank; fewer key and value heads than ranks are replicated."""
    return ceil(heads / parallel.tensor_parallel)


def _linear_input(what: str, parallel: ParallelConfig, tokens: float, size: float) -> tuple[Saved, ...]:
    return (Saved(what, parallel.input_bytes * tokens * size, for_weight=True, recomputed_at="pointwise"),)


def _projections(config: ModelConfig, parallel: ParallelConfig) -> list[Operation]:
    shape, e, tokens = config.attention, parallel.value_bytes, parallel.tokens
    heads, kv_heads = _heads(parallel, shape.heads), _heads(parallel, shape.kv_heads)
    queries, keys, values = heads * shape.head_size, kv_heads * shape.head_size, kv_heads * shape.value_size
    found = [
        matmul(
            *("queries, keys, values", parallel, tokens, config.hidden, queries + keys + values),
            saved=_linear_input("input of queries, keys, values", parallel, parallel.own_tokens, config.hidden),
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


def _latent_projections(config: ModelConfig, parallel: ParallelConfig) -> list[Operation]:
    """Down to a low rank, on every tensor parallel rank, and up to the heads of this rank."""
    shape, h, tokens, own = config.attention, config.hidden, parallel.tokens, parallel.own_tokens
    assert shape.kv_rank is not None
    heads, plain = _heads(parallel, shape.heads), shape.head_size - shape.rotary_size
    queries, up = heads * shape.head_size, heads * (plain + shape.value_size)
    down = (shape.query_rank or 0) + shape.kv_rank + shape.rotary_size
    found = [
        matmul(
            *("latent down-projection", parallel, own, h, down),
            saved=_linear_input("input of the down-projection", parallel, own, h),
            bias=shape.biases,
        )
    ]
    for name, rank, size in (("query", shape.query_rank, queries), ("key-value", shape.kv_rank, up)):
        if rank is None:  # queries straight from the hidden states, whose tensor is saved already
            found.append(matmul("queries", parallel, tokens, h, size))
            continue
        found.append(norm(f"{name} norm", config, parallel, own, rank))
        saved = _linear_input(f"input of the {name} up-projection", parallel, own, rank)
        up_projection = (f"{name} up-projection", parallel, tokens, rank, size)
        found.append(matmul(*up_projection, saved=saved, repeated_at="latent"))
    rotated = (heads + 1) * shape.rotary_size
    moved = 2 * parallel.value_bytes * tokens * rotated
    found.append(pointwise("rotary embedding", moved, repeated_at="latent"))
    return found


def _core(config: ModelConfig, parallel: ParallelConfig) -> Operation:
    """Scores, softmax and the weighted values.

    Flash attention computes the lower triangle only, and the scores again for the gradient: 2.5 times the
    forward. Unfused attention computes and saves the whole square: as Megatron's formula counts it, softmax and
    dropout of a·s·s·b entries take 5 bytes each.
    """
    shape, e, tokens, s = config.attention, parallel.value_bytes, parallel.tokens, parallel.sequence
    heads, kv_heads = _heads(parallel, shape.heads), _heads(parallel, shape.kv_heads)
    if shape.kv_rank is not None:
        kv_heads = heads
    forward = 2.0 * tokens * s * heads * (shape.head_size + shape.value_size)
    queries, keys = tokens * heads * shape.head_size, tokens * kv_heads * shape.head_size
    values, out = tokens * kv_heads * shape.value_size, tokens * heads * shape.value_size
    level = "full" if shape.kv_rank is None else "latent"
    saved = [Saved("queries, keys, values", e * (queries + keys + values), recomputed_at=level)]
    if parallel.attention == "flash":
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


# The feed-forward of one block: dense, gated or not, or a mixture of experts with its all-to-all.


def feed_forward_operations(config: ModelConfig, parallel: ParallelConfig, *, dense: bool) -> list[Operation]:
    """All operations from the norm before the feed-forward to the residual after it."""
    h, own, e, t = config.hidden, parallel.own_tokens, parallel.value_bytes, parallel.tensor_parallel
    found = [norm("feed-forward norm", config, parallel, own, h)]
    if dense or config.experts is None:
        found += _mlp("feed-forward", config, parallel, parallel.tokens, config.width / t)
    else:
        found += _experts(config, config.experts, parallel)
    if config.dropout:
        found.append(dropout("feed-forward dropout", parallel, own, h))
    found.append(pointwise("feed-forward residual", 3 * e * own * h, backward=0.0, repeated_at="full"))
    return found


def feed_forward_collectives(config: ModelConfig, parallel: ParallelConfig, *, dense: bool) -> list[Collective]:
    """Those of tensor parallelism, or dispatch and combine between expert parallel ranks."""
    if dense or config.experts is None:
        return [*gather_and_scatter("feed-forward", parallel, config.hidden)]
    found: list[Collective] = []
    if config.experts.shared_width:
        found += gather_and_scatter("shared experts", parallel, config.hidden)
    ep = parallel.expert_parallel
    if ep > 1:
        sent = parallel.own_tokens * config.experts.top_k * config.hidden * (ep - 1) / ep
        dispatch, combine = parallel.input_bytes * sent, parallel.value_bytes * sent
        both = Passes(dispatch + combine, dispatch + combine)
        most = config.experts.node_limit or config.experts.top_k
        share = min(1.0, most / config.experts.top_k)
        found.append(Collective("dispatch and combine", "expert", both, Passes(2, 2), share))
    return found


def _mlp(
    name: str,
    config: ModelConfig,
    parallel: ParallelConfig,
    tokens: float,
    width: float,
    *,
    experts: float = 0,
) -> list[Operation]:
    """Up to the width, the activation function, and down; `experts` is the number of experts on this rank."""
    h, e, inner = config.hidden, parallel.value_bytes, parallel.input_bytes
    own = tokens if experts else parallel.own_tokens
    ups = 2 if config.gated else 1
    level = "full" if experts else "pointwise"
    up_input = Saved(f"input of {name} up", inner * own * h, for_weight=True, recomputed_at=level)
    middle = [Saved(f"input of {name} activation", e * tokens * ups * width)]
    if config.gated and parallel.kernels == "eager":
        middle.append(Saved(f"activated gate of {name}", e * tokens * width, recomputed_at="pointwise"))
    down_input = Saved(
        f"input of {name} down", inner * tokens * width, for_weight=True, recomputed_at="pointwise"
    )
    common = {"bias": config.biases, "matrices": experts or 1, "is_expert": bool(experts)}
    return [
        matmul(f"{name} up", parallel, tokens, h, ups * width, saved=(up_input,), **common),  # type: ignore[arg-type]
        pointwise(f"{name} activation", e * tokens * (ups + 1) * width, saved=tuple(middle)),
        matmul(
            *(f"{name} down", parallel, tokens, width, h),
            saved=(down_input,),
            output_gradient=e * own * h,
            **common,  # type: ignore[arg-type]
        ),
    ]


def _experts(config: ModelConfig, experts: Experts, parallel: ParallelConfig) -> list[Operation]:
    """Router, permutation, the experts on this rank with balanced loads, and the shared experts."""
    h, own, e = config.hidden, parallel.own_tokens, parallel.value_bytes
    routed = own * experts.top_k
    router = matmul(
        *("router", parallel, own, h, experts.count),
        saved=(Saved("router probabilities", 4 * own * experts.count),),
        output_gradient=4 * own * experts.count,
        bias=experts.selection_bias,
    )
    weighted = Saved("outputs of experts", e * routed * h)
    permute = pointwise(
        *("permute and unpermute", 4 * e * routed * h),
        backward=4 * e * routed * h,
        saved=(weighted,) if parallel.kernels == "eager" else (),
        repeated_at="full",
        kernels=4,
    )
    own_experts = experts.count / parallel.expert_parallel
    found = [router, permute, *_mlp("experts", config, parallel, routed, experts.width, experts=own_experts)]
    if experts.shared_width:
        width = experts.shared_width / parallel.tensor_parallel
        found += _mlp("shared experts", config, parallel, parallel.tokens, width)
        if experts.shared_gate:
            found.append(matmul("shared gate", parallel, own, h, 1))
    return found


# The layers of a model on one rank: embedding, blocks, multi-token-prediction blocks, output layer.


def layer_operations(config: ModelConfig, parallel: ParallelConfig) -> dict[str, LayerOperations]:
    """Each kind of layer that the model has, in the order of the model."""
    parallel.check(config)
    return {kind: _layer(kind, config, parallel) for kind in dict.fromkeys(config.kinds)}


def parameters_of_kind(config: ModelConfig, kind: str) -> float:
    """Weights of a layer; those of a tied output layer belong to the embedding."""
    whole = _layer(kind, config, ParallelConfig(sequence=1))
    return whole.weights(expert=False) + whole.weights(expert=True)


def parameters(config: ModelConfig, *, with_mtp: bool = False) -> float:
    """Weights of the model, without its multi-token-prediction blocks unless asked for."""
    kinds = [kind for kind in config.kinds if with_mtp or kind != "mtp block"]
    tied = config.vocabulary * config.hidden if config.tied else 0
    return sum(parameters_of_kind(config, kind) for kind in kinds) - tied


def active_parameters(config: ModelConfig) -> float:
    """Weights that a token is multiplied with: of the experts only those it is sent to."""
    if config.experts is None:
        return parameters(config)
    idle = 1 - config.experts.top_k / config.experts.count
    experts = _layer("expert block", config, ParallelConfig(sequence=1)).weights(expert=True)
    return parameters(config) - idle * experts * config.kinds.count("expert block")


@cache
def model_flops(config: ModelConfig, sequence: int) -> float:
    """FLOPs of a training step for one token, as model FLOPs utilization (MFU) counts them.

    Three times the forward's matrix products, with the whole square of attention scores, as Megatron and PaLM
    count: 6·(weights in products) + 12·layers·heads·head size·sequence for multi-head attention.
    """
    parallel = ParallelConfig(sequence=sequence, attention="unfused")
    layers = {kind: _layer(kind, config, parallel) for kind in dict.fromkeys(config.kinds)}
    return 3 * sum(layers[kind].model_flops.forward for kind in config.kinds) / sequence


def _layer(kind: str, config: ModelConfig, parallel: ParallelConfig) -> LayerOperations:
    h, e, own = config.hidden, parallel.value_bytes, parallel.own_tokens
    hidden_states = e * own * h
    if kind == "embedding":
        return _embedding(config, parallel)
    if kind == "output":
        return _output(config, parallel)
    dense = kind == "block"
    block = LayerOperations(
        kind,
        (
            *attention_operations(config, parallel),
            *feed_forward_operations(config, parallel, dense=dense),
        ),
        (
            *attention_collectives(config, parallel),
            *feed_forward_collectives(config, parallel, dense=dense),
        ),
        input_bytes=hidden_states,
        message=hidden_states,
        recompute=parallel.recompute_granularity,
    )
    return _with_prediction(block, config, parallel) if kind == "mtp block" else block


def _with_prediction(block: LayerOperations, config: ModelConfig, parallel: ParallelConfig) -> LayerOperations:
    """A block that also takes the next tokens' embeddings, and hands on both hidden states."""
    h, own, e = config.hidden, parallel.own_tokens, parallel.value_bytes
    both = Saved("input of the prediction's projection", parallel.input_bytes * own * 2 * h, for_weight=True)
    first: tuple[Operation, ...] = (
        norm("norm of hidden states", config, parallel, own, h),
        norm("norm of embeddings", config, parallel, own, h),
        matmul("prediction's projection", parallel, own, 2 * h, h, saved=(both,)),
        norm("norm of predictions", config, parallel, own, h),
    )
    return replace(block, operations=(*first, *block.operations), message=2 * e * own * h)


def _embedding(config: ModelConfig, parallel: ParallelConfig) -> LayerOperations:
    h, e, own = config.hidden, parallel.value_bytes, parallel.own_tokens
    weights = (config.vocabulary / parallel.tensor_parallel + config.positions) * h
    look_up = Operation(
        *("look-up", "memory", Passes(), Passes(2 * e * own * h, 0, 3 * e * own * h)), weights=weights
    )
    found = [look_up]
    if config.dropout:
        found.append(dropout("embedding dropout", parallel, own, h))
    reduced = gather_and_scatter("embedding", parallel, h)[:1]
    once = tuple(
        replace(each, bytes=each.bytes.times(0.5)._replace(weight_gradient=0), messages=Passes(1, 1))
        for each in reduced
    )
    return LayerOperations("embedding", tuple(found), once, message=e * own * h)


def _output(config: ModelConfig, parallel: ParallelConfig) -> LayerOperations:
    """Final norm, logits, and the loss in fp32: once, and once more for each multi-token prediction."""
    h, e, own, tokens = config.hidden, parallel.value_bytes, parallel.own_tokens, parallel.tokens
    part = config.vocabulary / parallel.tensor_parallel
    found: list[Operation] = []
    for number in range(1 + config.mtp_layers):
        which = f" of prediction {number + 1}" if number else ""
        saved = (Saved(f"input of the logits{which}", e * own * h, for_weight=True),)
        product = matmul(f"logits{which}", parallel, tokens, h, part, saved=saved)
        loss = pointwise(
            *(f"softmax and loss{which}", (e + 3 * 4) * tokens * part),
            backward=(e + 4) * tokens * part,
            saved=(Saved(f"softmax{which}", 4 * tokens * part),),
            repeated_at="full",
        )
        if number:  # the weights are those of the first
            product = replace(product, weights=0.0)
        else:
            found.append(norm("final norm", config, parallel, own, h))
        found += [product, loss]
    collectives = gather_and_scatter("logits", parallel, h)[:1]
    once = tuple(replace(each, bytes=each.bytes.times(0.5), messages=Passes(1, 1, 1)) for each in collectives)
    return LayerOperations("output", tuple(found), once)
