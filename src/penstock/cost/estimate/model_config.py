"""The sizes of a decoder transformer: everything that its operations, weights and messages follow from."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Attention", "Experts", "ModelConfig"]


@dataclass(frozen=True)
class Attention:
    """Sizes of attention: multi-head, grouped-query, or multi-head latent attention (with `kv_rank`)."""

    heads: int
    kv_heads: int
    head_size: int
    """Of queries and keys."""
    value_size: int
    """Of values."""
    biases: bool = False
    """Of the projections of queries, keys and values."""
    output_bias: bool = False
    head_norms: bool = False
    """Norms of each head's queries and keys, with one weight per entry."""
    query_rank: int | None = None
    """Of latent attention: queries are projected down to this rank first; None if they are not."""
    kv_rank: int | None = None
    """Of latent attention: keys and values are projected down to this rank."""
    rotary_size: int = 0
    """Of latent attention: the part of `head_size` that is rotated, and the same for all heads in keys."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward."""

    count: int
    top_k: int
    width: int
    shared_width: int = 0
    """Of all shared experts together; 0 without."""
    shared_gate: bool = False
    """Whether a weight vector gates the shared experts."""
    node_limit: int | None = None
    """Nodes that the experts of a token are on at most: what leaves a node is sent once to each."""
    selection_bias: bool = False
    """Whether each expert has a bias that balances their loads."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder transformer: embedding, blocks, multi-token-prediction blocks, output layer."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    width: int
    """Of the feed-forward."""
    attention: Attention
    gated: bool = True
    """Whether the feed-forward has a gate: three matrices instead of two."""
    experts: Experts | None = None
    dense_layers: tuple[bool, ...] = ()
    """Per layer, with experts: whether it has a dense feed-forward instead."""
    mtp_layers: int = 0
    """Multi-token-prediction blocks after the last layer."""
    tied: bool = False
    """Whether the output layer uses the embedding's weights."""
    positions: int = 0
    """Learned position embeddings; 0 for rotary ones."""
    layer_norm: bool = False
    """Norms with mean and bias (LayerNorm) instead of RMSNorm."""
    biases: bool = False
    """Of the feed-forward."""
    dropout: bool = False
    architecture: str = ""
    """The `model_type` of its config; empty if it has none."""

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has a dense feed-forward."""
        return self.experts is None or bool(self.dense_layers and self.dense_layers[layer])

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer in order, embedding and output layer included."""
        blocks = ["block" if self.is_dense(i) else "expert block" for i in range(self.layers)]
        return ["embedding", *blocks, *["mtp block"] * self.mtp_layers, "output"]
