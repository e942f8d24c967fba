"""The layers of a model on one rank: embedding, attention, feed-forward, blocks, output layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import ceil

from penstock.cost.estimate.model_config import Experts, ModelConfig
from penstock.cost.estimate.operations import Collective, LayerOperations, Operation, Passes, Saved
from penstock.cost.estimate.parallel_config import ParallelConfig


def layer_operations(config: ModelConfig, parallel: ParallelConfig) -> dict[str, LayerOperations]:
    """Return each kind of layer that the model has, in the order of the model."""
    parallel.check(config)
    layers = _Layers(config, parallel)
    return {kind: layers.layer(kind) for kind in dict.fromkeys(config.kinds)}


def parameters(config: ModelConfig, *, with_mtp: bool = False) -> float:
    """Return the weights of the model, without its multi-token-prediction blocks unless asked for.

    The weights of a tied output layer are those of the embedding.
    """
    by_kind = layer_operations(config, ParallelConfig(sequence=1))
    kinds = [kind for kind in config.kinds if with_mtp or kind != "mtp block"]
    tied = config.vocabulary * config.hidden if config.tied else 0
    return sum(by_kind[kind].weights(expert=each) for kind in kinds for each in (False, True)) - tied


def active_parameters(config: ModelConfig) -> float:
    """Return the weights that a token is multiplied with: of the experts only those it is sent to."""
    if config.experts is None:
        return parameters(config)
    idle = 1 - config.experts.top_k / config.experts.count
    experts = _Layers(config, ParallelConfig(sequence=1)).layer("expert block").weights(expert=True)
    return parameters(config) - idle * experts * config.kinds.count("expert block")


@cache
def model_flops(config: ModelConfig, sequence: int) -> float:
    """Return the FLOPs of a training step for one token, as model FLOPs utilization (MFU) counts them.

    Three times the forward's matrix products, with the whole square of attention scores, as Megatron and PaLM
    count: 6·(weights in products) + 12·layers·heads·head size·sequence for multi-head attention.
    """
    by_kind = layer_operations(config, ParallelConfig(sequence=sequence, attention="unfused"))
    return 3 * sum(by_kind[kind].model_flops.forward for kind in config.kinds) / sequence


class _Layers:
    """Lists the operations and collectives of each kind of layer."""

    def __init__(self, config: ModelConfig, parallel: ParallelConfig) -> None:
        self.config, self.parallel, self.hidden = config, parallel, config.hidden
        self.tokens, self.own_tokens = parallel.tokens, parallel.own_tokens
        self.hidden_states = parallel.value_bytes * self.own_tokens * self.hidden
        """Bytes of the hidden states of a microbatch on this rank."""

    def layer(self, kind: str) -> LayerOperations:
        if kind == "embedding":
            return self._embedding()
        if kind == "output":
            return self._output()
        experts = None if kind == "block" else self.config.experts
        block = LayerOperations(
            kind,
            (*self._attention(), *self._feed_forward(experts)),
            (*self._attention_collectives(), *self._feed_forward_collectives(experts)),
            input_bytes=self.hidden_states,
            message=self.hidden_states,
            recompute=self.parallel.recompute_granularity,
        )
        return self._with_prediction(block) if kind == "mtp block" else block

    # --- building blocks -----------------------------------------------------------------------------

    def _matmul(
        self,
        name: str,
        tokens: float,
        inner: float,
        outer: float,
        *,
        saved: Sequence[Saved] = (),
        output_gradient: float | None = None,
        bias: bool = False,
        experts: float = 0,
        repeated_at: str = "full",
    ) -> Operation:
        """Return tokens times a matrix of inner by outer, or one of each expert: 2·tokens·inner·outer FLOPs."""
        e, matrices, flops = self.parallel.value_bytes, experts or 1, 2.0 * tokens * inner * outer
        moved = e * (tokens * (inner + outer) + matrices * inner * outer)
        return Operation(
            name,
            "matmul",
            Passes(flops, flops, flops),
            Passes(moved, moved, moved),
            weights=matrices * (inner * outer + (outer if bias else 0)),
            saved=tuple(saved),
            output_gradient=e * tokens * outer if output_gradient is None else output_gradient,
            repeated_at=repeated_at,
            is_expert=bool(experts),
        )

    def _pointwise(
        self,
        name: str,
        values: float,
        *,
        backward: float | None = None,
        weights: float = 0.0,
        saved: Sequence[Saved] = (),
        kernels: int = 1,
        repeated_at: str = "pointwise",
    ) -> Operation:
        """Return an operation that moves so many values forward, and one and a half times as many backward."""
        e, back = self.parallel.value_bytes, 1.5 * values if backward is None else backward
        return Operation(
            *(name, "memory", Passes(), Passes(e * values, e * back, 0)),
            weights=weights,
            saved=tuple(saved),
            repeated_at=repeated_at,
            kernels=kernels,
        )

    def _norm(self, name: str, size: float) -> Operation:
        """Return a LayerNorm or RMSNorm: it saves its input; eager RMSNorm also saves the normalized values."""
        values, layer_norm = self.own_tokens * size, self.config.layer_norm
        kept = self.parallel.value_bytes * values
        saved = [Saved(f"input of {name}", kept)]
        eager = self.parallel.kernels == "eager" and not layer_norm
        if eager:
            saved.append(Saved(f"normalized values of {name}", kept, recomputed_at="pointwise"))
        moved, weights = 2 * values * (3 if eager else 1), size * (2 if layer_norm else 1)
        return self._pointwise(name, moved, weights=weights, saved=saved, kernels=5 if eager else 1)

    def _dropout(self, name: str) -> list[Operation]:
        """Return dropout if the model has it; it saves a mask of one byte per entry."""
        if not self.config.dropout:
            return []
        values = self.own_tokens * self.hidden
        moved = (2 + 1 / self.parallel.value_bytes) * values
        mask = Saved(f"mask of {name}", values)
        return [self._pointwise(name, moved, backward=moved, saved=[mask], repeated_at="full")]

    def _residual(self, name: str) -> Operation:
        return self._pointwise(name, 3 * self.own_tokens * self.hidden, backward=0.0, repeated_at="full")

    def _gather_and_scatter(self, name: str) -> list[Collective]:
        """Return what tensor parallel ranks exchange around a pair of matrix products that they share.

        With sequence parallelism: all-gather before, reduce-scatter after, both again for the input gradient,
        and one all-gather of the saved input for the weight gradient. Without it: one all-reduce in each pass.
        """
        t = self.parallel.tensor_parallel
        if t == 1:
            return []
        part = self.parallel.value_bytes * self.tokens * self.hidden * (t - 1) / t
        again = part if self.parallel.sequence_parallel else 0.0
        calls = Passes(2, 2, 1) if again else Passes(1, 1, 0)
        return [Collective(name, "tensor", Passes(2 * part, 2 * part, again), calls)]

    def _linear_input(self, what: str, tokens: float, size: float, level: str = "pointwise") -> list[Saved]:
        return [Saved(what, self.parallel.input_bytes * tokens * size, for_weight=True, recomputed_at=level)]

    # --- attention: multi-head, grouped or latent ----------------------------------------------------

    def _attention(self) -> list[Operation]:
        """Return all operations from the norm before attention to the residual after it."""
        shape = self.config.attention
        out = self._heads(shape.heads) * shape.value_size
        return [
            self._norm("attention norm", self.hidden),
            *(self._projections() if shape.kv_rank is None else self._latent_projections(shape.kv_rank)),
            self._scores(),
            self._matmul(
                *("attention output", self.tokens, out, self.hidden),
                saved=self._linear_input("input of attention output", self.tokens, out, "full"),
                output_gradient=self.hidden_states,
                bias=shape.output_bias,
            ),
            *self._dropout("attention dropout"),
            self._residual("attention residual"),
        ]

    def _attention_collectives(self) -> list[Collective]:
        """Return those of tensor parallelism, and the ring of keys and values of context parallelism."""
        found, c = self._gather_and_scatter("attention"), self.parallel.context_parallel
        if c > 1:
            shape = self.config.attention
            size = self._heads(shape.kv_heads) * (shape.head_size + shape.value_size)
            part = self.parallel.value_bytes * self.tokens * size * (c - 1)
            calls = Passes(c - 1, c - 1)
            found.append(Collective("keys and values", "context", Passes(part, 2 * part, 0), calls))
        return found

    def _heads(self, heads: int) -> int:
        """Return the heads per rank; fewer key and value heads than ranks are replicated."""
        return ceil(heads / self.parallel.tensor_parallel)

    def _projections(self) -> list[Operation]:
        shape, what = self.config.attention, "queries, keys, values"
        heads, kv_heads = self._heads(shape.heads), self._heads(shape.kv_heads)
        both, values = (heads + kv_heads) * shape.head_size, kv_heads * shape.value_size
        saved = self._linear_input(f"input of {what}", self.own_tokens, self.hidden)
        found = [self._matmul(what, self.tokens, self.hidden, both + values, saved=saved, bias=shape.biases)]
        moved = 2 * self.tokens * both
        if shape.head_norms:
            kept = [Saved("input of head norms", self.parallel.value_bytes * self.tokens * both)]
            found.append(self._pointwise("head norms", moved, weights=2 * shape.head_size, saved=kept))
        if not self.config.positions:
            found.append(self._pointwise("rotary embedding", moved, repeated_at="full"))
        return found

    def _latent_projections(self, kv_rank: int) -> list[Operation]:
        """Return the projections down to a low rank, on every tensor parallel rank, and up to its heads."""
        shape, own = self.config.attention, self.own_tokens
        heads, plain = self._heads(shape.heads), shape.head_size - shape.rotary_size
        queries, up = heads * shape.head_size, heads * (plain + shape.value_size)
        down = (shape.query_rank or 0) + kv_rank + shape.rotary_size
        saved = self._linear_input("input of the down-projection", own, self.hidden)
        found = [self._matmul("latent down-projection", own, self.hidden, down, saved=saved, bias=shape.biases)]
        for name, rank, size in (("query", shape.query_rank, queries), ("key-value", kv_rank, up)):
            if rank is None:  # queries straight from the hidden states, whose tensor is saved already
                found.append(self._matmul("queries", self.tokens, self.hidden, size))
                continue
            saved = self._linear_input(f"input of the {name} up-projection", own, rank)
            up_projection = (f"{name} up-projection", self.tokens, rank, size)
            found.append(self._norm(f"{name} norm", rank))
            found.append(self._matmul(*up_projection, saved=saved, repeated_at="latent"))
        rotated = 2 * self.tokens * (heads + 1) * shape.rotary_size
        return [*found, self._pointwise("rotary embedding", rotated, repeated_at="latent")]

    def _scores(self) -> Operation:
        """Return scores, softmax and the weighted values.

        Flash attention computes the lower triangle only, and the scores again for the gradient: 2.5 times the
        forward. Unfused attention computes and saves the whole square: as Megatron's formula counts it, softmax
        and dropout of a·s·s·b entries take 5 bytes each.
        """
        shape, e = self.config.attention, self.parallel.value_bytes
        tokens, s = self.tokens, self.parallel.sequence
        is_latent = shape.kv_rank is not None
        heads = self._heads(shape.heads)
        kv_heads = heads if is_latent else self._heads(shape.kv_heads)
        forward = 2.0 * tokens * s * heads * (shape.head_size + shape.value_size)
        inputs = tokens * (heads * shape.head_size + kv_heads * (shape.head_size + shape.value_size))
        level = "latent" if is_latent else "full"
        saved = [Saved("queries, keys, values", e * inputs, recomputed_at=level)]
        if self.parallel.attention == "flash":
            flops, square = Passes(forward / 2, 2.5 * forward / 2), 0.0
            saved.append(Saved("log of the softmax sums", 4 * tokens * heads))
        else:
            flops, square = Passes(forward, 2 * forward), tokens * s * heads
            saved.append(Saved("softmax", e * square, recomputed_at="selective"))
            if self.config.dropout:
                saved.append(Saved("dropout of softmax", (e + 1) * square, recomputed_at="selective"))
        moved = e * (inputs + tokens * heads * shape.value_size + 4 * square)
        return Operation(
            *("attention scores", "attention", flops, Passes(moved, 2 * moved)),
            saved=tuple(saved),
            repeated_at="selective" if square else "full",
        )

    # --- feed-forward: dense, gated or not, or a mixture of experts with its all-to-all --------------

    def _feed_forward(self, experts: Experts | None) -> list[Operation]:
        """Return all operations from the norm before the feed-forward to the residual after it."""
        width = self.config.width / self.parallel.tensor_parallel
        inner = self._mlp("feed-forward", self.tokens, width) if experts is None else self._experts(experts)
        return [
            self._norm("feed-forward norm", self.hidden),
            *inner,
            *self._dropout("feed-forward dropout"),
            self._residual("feed-forward residual"),
        ]

    def _feed_forward_collectives(self, experts: Experts | None) -> list[Collective]:
        """Return those of tensor parallelism, or dispatch and combine between expert parallel ranks."""
        if experts is None:
            return self._gather_and_scatter("feed-forward")
        found = self._gather_and_scatter("shared experts") if experts.shared_width else []
        ep = self.parallel.expert_parallel
        if ep > 1:
            sent = self.own_tokens * experts.top_k * self.hidden * (ep - 1) / ep
            both = (self.parallel.input_bytes + self.parallel.value_bytes) * sent
            share = min(1.0, (experts.node_limit or experts.top_k) / experts.top_k)
            calls = Passes(2, 2)
            found.append(Collective("dispatch and combine", "expert", Passes(both, both), calls, share))
        return found

    def _mlp(self, name: str, tokens: float, width: float, *, experts: float = 0) -> list[Operation]:
        """Return up to the width, the activation function, and down; for the number of experts on this rank."""
        e, ups = self.parallel.value_bytes, 2 if self.config.gated else 1
        own, level = (tokens, "full") if experts else (self.own_tokens, "pointwise")
        middle = [Saved(f"input of {name} activation", e * tokens * ups * width)]
        if self.config.gated and self.parallel.kernels == "eager":
            middle.append(Saved(f"activated gate of {name}", e * tokens * width, recomputed_at="pointwise"))
        bias, h = self.config.biases, self.hidden
        return [
            self._matmul(
                *(f"{name} up", tokens, h, ups * width),
                saved=self._linear_input(f"input of {name} up", own, h, level),
                bias=bias,
                experts=experts,
            ),
            self._pointwise(f"{name} activation", tokens * (ups + 1) * width, saved=middle),
            self._matmul(
                *(f"{name} down", tokens, width, h),
                saved=self._linear_input(f"input of {name} down", tokens, width),
                output_gradient=e * own * h,
                bias=bias,
                experts=experts,
            ),
        ]

    def _experts(self, experts: Experts) -> list[Operation]:
        """Return router, permutation, the experts on this rank with balanced loads, and the shared experts."""
        own, probabilities = self.own_tokens, 4 * self.own_tokens * experts.count
        routed = own * experts.top_k
        router = self._matmul(
            *("router", own, self.hidden, experts.count),
            saved=[Saved("router probabilities", probabilities)],
            output_gradient=probabilities,
            bias=experts.selection_bias,
        )
        weighted = [Saved("outputs of experts", self.parallel.value_bytes * routed * self.hidden)]
        permute = self._pointwise(
            *("permute and unpermute", 4 * routed * self.hidden),
            backward=4 * routed * self.hidden,
            saved=weighted if self.parallel.kernels == "eager" else [],
            repeated_at="full",
            kernels=4,
        )
        own_experts = experts.count / self.parallel.expert_parallel
        found = [router, permute, *self._mlp("experts", routed, experts.width, experts=own_experts)]
        if experts.shared_width:
            width = experts.shared_width / self.parallel.tensor_parallel
            found += self._mlp("shared experts", self.tokens, width)
            if experts.shared_gate:
                found.append(self._matmul("shared gate", own, self.hidden, 1))
        return found

    # --- the other layers ----------------------------------------------------------------------------

    def _with_prediction(self, block: LayerOperations) -> LayerOperations:
        """Return a block that also takes the next tokens' embeddings, and hands on both hidden states."""
        h, own = self.hidden, self.own_tokens
        both = self._linear_input("input of the prediction's projection", own, 2 * h, "full")
        first = (
            self._norm("norm of hidden states", h),
            self._norm("norm of embeddings", h),
            self._matmul("prediction's projection", own, 2 * h, h, saved=both),
            self._norm("norm of predictions", h),
        )
        return replace(block, operations=(*first, *block.operations), message=2 * self.hidden_states)

    def _embedding(self) -> LayerOperations:
        config, states = self.config, self.hidden_states
        weights = (config.vocabulary / self.parallel.tensor_parallel + config.positions) * self.hidden
        look_up = Operation("look-up", "memory", Passes(), Passes(2 * states, 0, 3 * states), weights=weights)
        once = tuple(
            replace(each, bytes=each.bytes.times(0.5)._replace(weight_gradient=0), messages=Passes(1, 1))
            for each in self._gather_and_scatter("embedding")
        )
        operations = (look_up, *self._dropout("embedding dropout"))
        return LayerOperations("embedding", operations, once, message=states)

    def _output(self) -> LayerOperations:
        """Return final norm, logits, and the loss in fp32: once, and again for each multi-token prediction."""
        e, part = self.parallel.value_bytes, self.config.vocabulary / self.parallel.tensor_parallel
        entries = self.tokens * part
        found = [self._norm("final norm", self.hidden)]
        for number in range(1 + self.config.mtp_layers):
            which = f" of prediction {number + 1}" if number else ""
            saved = [Saved(f"input of the logits{which}", self.hidden_states, for_weight=True)]
            logits = self._matmul(f"logits{which}", self.tokens, self.hidden, part, saved=saved)
            loss = self._pointwise(
                *(f"softmax and loss{which}", (1 + 3 * 4 / e) * entries),
                backward=(1 + 4 / e) * entries,
                saved=[Saved(f"softmax{which}", 4 * entries)],
                repeated_at="full",
            )
            found += [replace(logits, weights=0.0) if number else logits, loss]  # they share their weights
        once = tuple(
            replace(each, bytes=each.bytes.times(0.5), messages=Passes(1, 1, 1))
            for each in self._gather_and_scatter("logits")
        )
        return LayerOperations("output", tuple(found), once)
