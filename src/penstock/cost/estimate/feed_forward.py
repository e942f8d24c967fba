"""The feed-forward of one block: dense, gated or not, or a mixture of experts with its all-to-all."""

from __future__ import annotations

from penstock.cost.estimate.building_blocks import dropout, gather_and_scatter, matmul, norm, pointwise
from penstock.cost.estimate.model_config import Experts, ModelConfig
from penstock.cost.estimate.operations import Collective, Operation, Passes, Saved
from penstock.cost.estimate.setting import Setting

__all__ = ["feed_forward_collectives", "feed_forward_operations"]


def feed_forward_operations(config: ModelConfig, setting: Setting, *, dense: bool) -> list[Operation]:
    """All operations from the norm before the feed-forward to the residual after it."""
    h, own, e, t = config.hidden, setting.own_tokens, setting.value_bytes, setting.tensor_parallel
    found = [norm("feed-forward norm", config, setting, own, h)]
    if dense or config.experts is None:
        found += _mlp("feed-forward", config, setting, setting.tokens, config.width / t)
    else:
        found += _experts(config, config.experts, setting)
    if config.dropout:
        found.append(dropout("feed-forward dropout", setting, own, h))
    found.append(pointwise("feed-forward residual", 3 * e * own * h, backward=0.0, repeated_at="full"))
    return found


def feed_forward_collectives(config: ModelConfig, setting: Setting, *, dense: bool) -> list[Collective]:
    """Those of tensor parallelism, or dispatch and combine between expert parallel ranks."""
    if dense or config.experts is None:
        return [*gather_and_scatter("feed-forward", setting, config.hidden)]
    found: list[Collective] = []
    if config.experts.shared_width:
        found += gather_and_scatter("shared experts", setting, config.hidden)
    ep = setting.expert_parallel
    if ep > 1:
        sent = setting.own_tokens * config.experts.top_k * config.hidden * (ep - 1) / ep
        dispatch, combine = setting.input_bytes * sent, setting.value_bytes * sent
        both = Passes(dispatch + combine, dispatch + combine)
        most = config.experts.node_limit or config.experts.top_k
        share = min(1.0, most / config.experts.top_k)
        found.append(Collective("dispatch and combine", "expert", both, Passes(2, 2), share))
    return found


def _mlp(
    name: str,
    config: ModelConfig,
    setting: Setting,
    tokens: float,
    width: float,
    *,
    experts: float = 0,
) -> list[Operation]:
    """Up to the width, the activation function, and down; `experts` is the number of experts on this rank."""
    h, e, inner = config.hidden, setting.value_bytes, setting.input_bytes
    own = tokens if experts else setting.own_tokens
    ups = 2 if config.gated else 1
    level = "full" if experts else "pointwise"
    up_input = Saved(f"input of {name} up", inner * own * h, for_weight=True, recomputed_at=level)
    middle = [Saved(f"input of {name} activation", e * tokens * ups * width)]
    if config.gated and setting.kernels == "eager":
        middle.append(Saved(f"activated gate of {name}", e * tokens * width, recomputed_at="pointwise"))
    down_input = Saved(
        f"input of {name} down", inner * tokens * width, for_weight=True, recomputed_at="pointwise"
    )
    common = {"bias": config.biases, "matrices": experts or 1, "is_expert": bool(experts)}
    return [
        matmul(f"{name} up", setting, tokens, h, ups * width, saved=(up_input,), **common),  # type: ignore[arg-type]
        pointwise(f"{name} activation", e * tokens * (ups + 1) * width, saved=tuple(middle)),
        matmul(
            *(f"{name} down", setting, tokens, width, h),
            saved=(down_input,),
            output_gradient=e * own * h,
            **common,  # type: ignore[arg-type]
        ),
    ]


def _experts(config: ModelConfig, experts: Experts, setting: Setting) -> list[Operation]:
    """Router, permutation, the experts on this rank with balanced loads, and the shared experts."""
    h, own, e = config.hidden, setting.own_tokens, setting.value_bytes
    routed = own * experts.top_k
    router = matmul(
        *("router", setting, own, h, experts.count),
        saved=(Saved("router probabilities", 4 * own * experts.count),),
        output_gradient=4 * own * experts.count,
        bias=experts.selection_bias,
    )
    weighted = Saved("outputs of experts", e * routed * h)
    permute = pointwise(
        *("permute and unpermute", 4 * e * routed * h),
        backward=4 * e * routed * h,
        saved=(weighted,) if setting.kernels == "eager" else (),
        repeated_at="full",
        kernels=4,
    )
    own_experts = experts.count / setting.expert_parallel
    found = [router, permute, *_mlp("experts", config, setting, routed, experts.width, experts=own_experts)]
    if experts.shared_width:
        width = experts.shared_width / setting.tensor_parallel
        found += _mlp("shared experts", config, setting, setting.tokens, width)
        if experts.shared_gate:
            found.append(matmul("shared gate", setting, own, h, 1))
    return found
