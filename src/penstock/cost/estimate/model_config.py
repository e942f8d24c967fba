"""The sizes of a decoder transformer: from Hugging Face's `config.json`, or by the name of a known model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.arguments import did_you_mean, listed, plural, printable, whole_number
from penstock.errors import FormatError
from penstock.formats.files import read_keys


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
    """Of the projections of queries, keys and values; of latent attention, of those to low ranks."""
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


# Model configs as Hugging Face writes them (`config.json`); all errors are reported at once.


def read_config(path: str | PathLike[str]) -> ModelConfig:
    """Read a `config.json`, or take a well-known model by its name (`known_models`).

    A model is called as its file, or as its directory if the file has that name.
    """
    if is_model_name(str(path)):
        name, keys = keys_of_model(str(path))
        return config_of_keys(keys, name=name, source=name)
    path = Path(path)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return config_of_keys(read_keys(path), name=printable(name), source=str(path))


def is_config(document: object) -> bool:
    """Whether a file with these keys is a model config, rather than costs or a model file of Penstock."""
    return isinstance(document, dict) and ("model_type" in document or "architectures" in document)


def config_of_keys(document: object, name: str = "model", source: str = "<config>") -> ModelConfig:
    """The model that a file with these keys describes."""
    if not isinstance(document, dict):
        raise FormatError(source, ["a model config is an object with keys such as model_type, hidden_size"])
    if "text_config" in document and "hidden_size" not in document:
        raise FormatError(source, ["a multimodal config: estimate its decoder, the object text_config"])
    kind = document.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise FormatError(source, [_unknown(kind)])
    keys = _Keys(_DEFAULTS.get(kind, {}) | document)
    config = ARCHITECTURES[kind](keys, name)
    if keys.problems:
        raise FormatError(source, keys.problems)
    if config.attention.heads % config.attention.kv_heads:
        heads, shared = config.attention.heads, config.attention.kv_heads
        counts = f"{plural(heads, 'head')} and {plural(shared, 'key-value head')}"
        raise FormatError(source, [f"{counts}: the first must be a multiple of the second"])
    return replace(config, architecture=kind)


def _unknown(kind: object) -> str:
    known = ", ".join(ARCHITECTURES)
    if kind is None:
        return f"missing model_type; known are {known}"
    near = get_close_matches(str(kind), ARCHITECTURES, n=1, cutoff=0.8)
    meant = f"; did you mean {near[0]}?" if near else "."
    return (
        f"unknown architecture: model_type {printable(str(kind))!r}{meant} Known are {known}. For a model with "
        'the blocks of one of these, change the line: "model_type": "llama" has gated feed-forwards and '
        'grouped-query attention, "mixtral" experts too, "gpt2" neither'
    )


class _Keys:
    """The keys of a config, read one by one, with the problems found."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.problems: list[str] = []

    def size(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer, which is required unless there is a default; null is the default."""
        value = self.document.get(name)
        if value is None:
            if default is None:
                self._add(f"missing {name}: an integer of at least {least}")
            return least if default is None else default
        number = whole_number(value)
        if number is None or not least <= number <= 10**9:
            self._add(f"{name}: must be an integer from {least} to 1e9 (given {printable(repr(value))})")
            return max(least, 1)
        return number

    def _add(self, problem: str) -> None:
        """Add a problem once, also if its key is read several times."""
        if problem not in self.problems:
            self.problems.append(problem)

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean."""
        value = self.document.get(name, default)
        if not isinstance(value, bool):
            self.problems.append(f"{name}: must be true or false (given {printable(repr(value))})")
        return bool(value)

    def is_positive(self, name: str, default: float) -> bool:
        """Whether a number is above 0."""
        value = self.document.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.problems.append(f"{name}: must be a number (given {printable(repr(value))})")
            return False
        return value > 0


# --- architectures ----------------------------------------------------------------------------------


def _grouped(keys: _Keys, *, biases: bool = False, head_norms: bool = False, output_bias: bool = False) -> Any:  # noqa: ANN401 -- the constructor's arguments
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    size = keys.size("head_dim", max(1, hidden // heads))
    if "head_dim" not in keys.document and hidden % heads and not keys.problems:
        keys.problems.append(f"num_attention_heads: {heads} does not divide hidden_size {hidden}")
    kv_heads = keys.size("num_key_value_heads", heads)
    return Attention(heads, kv_heads, size, size, biases, output_bias, head_norms)


def _decoder(keys: _Keys, name: str, attention: Attention, **more: Any) -> ModelConfig:  # noqa: ANN401 -- the constructor's arguments
    return ModelConfig(
        name,
        keys.size("hidden_size"),
        keys.size("num_hidden_layers"),
        keys.size("vocab_size"),
        keys.size("intermediate_size"),
        attention,
        tied=keys.flag("tie_word_embeddings", default=False),
        **more,
    )


def _llama(keys: _Keys, name: str) -> ModelConfig:
    bias = keys.flag("attention_bias", default=False)
    attention = _grouped(keys, biases=bias, output_bias=bias)
    return _decoder(keys, name, attention, biases=keys.flag("mlp_bias", default=False))


def _mistral(keys: _Keys, name: str) -> ModelConfig:
    return _decoder(keys, name, _grouped(keys))


def _qwen2(keys: _Keys, name: str) -> ModelConfig:
    return _decoder(keys, name, _grouped(keys, biases=True))


def _qwen3(keys: _Keys, name: str) -> ModelConfig:
    bias = keys.flag("attention_bias", default=False)
    return _decoder(keys, name, _grouped(keys, biases=bias, output_bias=bias, head_norms=True))


def _mixtral(keys: _Keys, name: str) -> ModelConfig:
    experts = Experts(
        keys.size("num_local_experts"), keys.size("num_experts_per_tok"), keys.size("intermediate_size")
    )
    return _decoder(keys, name, _grouped(keys), experts=_checked(keys, experts))


def _qwen_experts(keys: _Keys) -> dict[str, Any]:
    shared = keys.size("shared_expert_intermediate_size", 0, least=0)
    experts = Experts(
        keys.size("num_local_experts" if "num_local_experts" in keys.document else "num_experts"),
        keys.size("num_experts_per_tok"),
        keys.size("moe_intermediate_size"),
        shared,
        shared_gate=shared > 0,
    )
    every, only = keys.size("decoder_sparse_step", 1), keys.document.get("mlp_only_layers") or []
    layers = range(keys.size("num_hidden_layers"))
    dense = tuple(i in only or (i + 1) % every > 0 for i in layers)
    return {"experts": _checked(keys, experts), "dense_layers": dense}


def _qwen2_moe(keys: _Keys, name: str) -> ModelConfig:
    attention = _grouped(keys, biases=keys.flag("qkv_bias", default=True))
    return _decoder(keys, name, attention, **_qwen_experts(keys))


def _qwen3_moe(keys: _Keys, name: str) -> ModelConfig:
    return replace(_qwen3(keys, name), **_qwen_experts(keys))


def _deepseek(keys: _Keys, name: str) -> ModelConfig:
    plain, rotary = keys.size("qk_nope_head_dim"), keys.size("qk_rope_head_dim")
    heads = keys.size("num_attention_heads")
    attention = Attention(
        *(heads, heads, plain + rotary, keys.size("v_head_dim")),
        biases=(bias := keys.flag("attention_bias", default=False)),
        output_bias=bias,
        query_rank=keys.size("q_lora_rank", 0, least=0) or None,
        kv_rank=keys.size("kv_lora_rank"),
        rotary_size=rotary,
    )
    width, shared = keys.size("moe_intermediate_size"), keys.size("n_shared_experts", 0, least=0)
    experts = Experts(
        *(keys.size("n_routed_experts"), keys.size("num_experts_per_tok"), width, shared * width),
        node_limit=keys.size("topk_group", 0, least=0) or None,
        selection_bias=keys.document["model_type"] == "deepseek_v3",
    )
    first, every = keys.size("first_k_dense_replace", 0, least=0), keys.size("moe_layer_freq", 1)
    dense = tuple(i < first or i % every > 0 for i in range(keys.size("num_hidden_layers")))
    predictions = keys.size("num_nextn_predict_layers", 0, least=0)
    return _decoder(
        *(keys, name, attention), experts=_checked(keys, experts), dense_layers=dense, mtp_layers=predictions
    )


def _checked(keys: _Keys, experts: Experts) -> Experts:
    if experts.top_k > experts.count:
        keys.problems.append(
            f"num_experts_per_tok: {experts.top_k}, but the model has {plural(experts.count, 'expert')}"
        )
    return experts


def _gpt2(keys: _Keys, name: str) -> ModelConfig:
    hidden, heads = keys.size("n_embd"), keys.size("n_head")
    if hidden % heads:
        keys.problems.append(f"n_head: {heads} does not divide n_embd {hidden}")
    size = max(1, hidden // heads)
    dropout = [keys.is_positive(key, 0.1) for key in ("resid_pdrop", "attn_pdrop", "embd_pdrop")]
    return ModelConfig(
        *(name, hidden, keys.size("n_layer"), keys.size("vocab_size"), keys.size("n_inner", 4 * hidden)),
        Attention(heads, heads, size, size, biases=True, output_bias=True),
        gated=False,
        tied=keys.flag("tie_word_embeddings", default=True),
        positions=keys.size("n_positions"),
        layer_norm=True,
        biases=True,
        dropout=any(dropout),
    )


ARCHITECTURES: dict[str, Callable[[_Keys, str], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
"""The builder of each `model_type`."""

_DEFAULTS: dict[str, dict[str, int]] = {
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2_moe": {"num_key_value_heads": 16, "shared_expert_intermediate_size": 5632},
    "qwen3_moe": {"num_key_value_heads": 4},
    "deepseek_v2": {"n_shared_experts": 2, "q_lora_rank": 1536},
    "deepseek_v3": {"n_shared_experts": 1, "q_lora_rank": 1536, "first_k_dense_replace": 3, "topk_group": 4},
}
"""What transformers takes for keys that a config leaves out, where that does not follow from other keys."""


# Well-known models by name: the configs in `models/`, with the sizes that their authors published.


@cache
def known_models() -> tuple[str, ...]:
    """The names."""
    return tuple(sorted(Path(each.name).stem for each in files(__package__).joinpath("models").iterdir()))


def is_model_name(source: str) -> bool:
    """Whether a text names a model, not a file: it has no directory and no ending, and no file is called so."""
    path = Path(source)
    return path.name == source and path.suffix.lower() not in (".json", ".toml") and not path.exists()


def keys_of_model(name: str) -> tuple[str, object]:
    """The name and the config of a well-known model; hyphens, underscores and capitals do not matter."""
    by_letters = {_letters(known): known for known in known_models()}
    found = by_letters.get(_letters(name))
    if found is None:
        near = did_you_mean(name, known_models())
        known = f"no such file, and no known model; give a config.json, or one of {listed(known_models())}"
        raise FormatError(printable(name), [known + near])
    text = files(__package__).joinpath("models", f"{found}.json").read_text(encoding="utf-8")
    return found, json.loads(text)


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
