"""The layers of a model on one rank: embedding, blocks, multi-token-prediction blocks, output layer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from penstock.cost.estimate.attention import attention_collectives, attention_operations
from penstock.cost.estimate.building_blocks import dropout, gather_and_scatter, matmul, norm, pointwise
from penstock.cost.estimate.feed_forward import feed_forward_collectives, feed_forward_operations
from penstock.cost.estimate.model_config import ModelConfig
from penstock.cost.estimate.operations import LayerOperations, Operation, Passes, Saved
from penstock.cost.estimate.setting import Setting

__all__ = ["active_parameters", "layer_operations", "model_flops", "parameters", "parameters_of_kind"]


def layer_operations(config: ModelConfig, setting: Setting) -> dict[str, LayerOperations]:
    """Each kind of layer that the model has, in the order of the model."""
    setting.check(config)
    return {kind: _layer(kind, config, setting) for kind in dict.fromkeys(config.kinds)}


def parameters_of_kind(config: ModelConfig, kind: str) -> float:
    """Weights of a layer; those of a tied output layer belong to the embedding."""
    whole = _layer(kind, config, Setting(sequence=1))
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
    experts = _layer("expert block", config, Setting(sequence=1)).weights(expert=True)
    return parameters(config) - idle * experts * config.kinds.count("expert block")


@cache
def model_flops(config: ModelConfig, sequence: int) -> float:
    """FLOPs of a training step for one token, as model FLOPs utilization (MFU) counts them.

    Three times the forward's matrix products, with the whole square of attention scores, as Megatron and PaLM
    count: 6·(weights in products) + 12·layers·heads·head size·sequence for multi-head attention.
    """
    setting = Setting(sequence=sequence, attention="unfused")
    layers = {kind: _layer(kind, config, setting) for kind in dict.fromkeys(config.kinds)}
    return 3 * sum(layers[kind].model_flops.forward for kind in config.kinds) / sequence


def _layer(kind: str, config: ModelConfig, setting: Setting) -> LayerOperations:
    h, e, own = config.hidden, setting.value_bytes, setting.own_tokens
    hidden_states = e * own * h
    if kind == "embedding":
        return _embedding(config, setting)
    if kind == "output":
        return _output(config, setting)
    dense = kind == "block"
    block = LayerOperations(
        kind,
        (
            *attention_operations(config, setting),
            *feed_forward_operations(config, setting, dense=dense),
        ),
        (
            *attention_collectives(config, setting),
            *feed_forward_collectives(config, setting, dense=dense),
        ),
        input_bytes=hidden_states,
        message=hidden_states,
        recompute=setting.recompute,
    )
    return _with_prediction(block, config, setting) if kind == "mtp block" else block


def _with_prediction(block: LayerOperations, config: ModelConfig, setting: Setting) -> LayerOperations:
    """A block that also takes the next tokens' embeddings, and hands on both hidden states."""
    h, own, e = config.hidden, setting.own_tokens, setting.value_bytes
    both = Saved("input of the prediction's projection", setting.input_bytes * own * 2 * h, for_weight=True)
    first: tuple[Operation, ...] = (
        norm("norm of hidden states", config, setting, own, h),
        norm("norm of embeddings", config, setting, own, h),
        matmul("prediction's projection", setting, own, 2 * h, h, saved=(both,)),
        norm("norm of predictions", config, setting, own, h),
    )
    return replace(block, operations=(*first, *block.operations), message=2 * e * own * h)


def _embedding(config: ModelConfig, setting: Setting) -> LayerOperations:
    h, e, own = config.hidden, setting.value_bytes, setting.own_tokens
    weights = (config.vocabulary / setting.tensor_parallel + config.positions) * h
    look_up = Operation(
        *("look-up", "memory", Passes(), Passes(2 * e * own * h, 0, 3 * e * own * h)), weights=weights
    )
    found = [look_up]
    if config.dropout:
        found.append(dropout("embedding dropout", setting, own, h))
    reduced = gather_and_scatter("embedding", setting, h)[:1]
    once = tuple(
        replace(each, bytes=each.bytes.times(0.5)._replace(weight_gradient=0), messages=Passes(1, 1))
        for each in reduced
    )
    return LayerOperations("embedding", tuple(found), once, message=e * own * h)


def _output(config: ModelConfig, setting: Setting) -> LayerOperations:
    """Final norm, logits, and the loss in fp32: once, and once more for each multi-token prediction."""
    h, e, own, tokens = config.hidden, setting.value_bytes, setting.own_tokens, setting.tokens
    part = config.vocabulary / setting.tensor_parallel
    found: list[Operation] = []
    for number in range(1 + config.mtp_layers):
        which = f" of prediction {number + 1}" if number else ""
        saved = (Saved(f"input of the logits{which}", e * own * h, for_weight=True),)
        product = matmul(f"logits{which}", setting, tokens, h, part, saved=saved)
        loss = pointwise(
            *(f"softmax and loss{which}", (e + 3 * 4) * tokens * part),
            backward=(e + 4) * tokens * part,
            saved=(Saved(f"softmax{which}", 4 * tokens * part),),
            repeated_at="full",
        )
        if number:  # the weights are those of the first
            product = replace(product, weights=0.0)
        else:
            found.append(norm("final norm", config, setting, own, h))
        found += [product, loss]
    collectives = gather_and_scatter("logits", setting, h)[:1]
    once = tuple(replace(each, bytes=each.bytes.times(0.5), messages=Passes(1, 1, 1)) for each in collectives)
    return LayerOperations("output", tuple(found), once)
