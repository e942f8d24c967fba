"""Model configs as Hugging Face writes them (`config.json`); all errors are reported at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.arguments import plural, printable, whole_number
from penstock.cost.estimate.known_models import is_model_name, keys_of_model
from penstock.cost.estimate.model_config import Attention, Experts, ModelConfig
from penstock.errors import FormatError
from penstock.formats.files import read_keys

__all__ = ["ARCHITECTURES", "config_of_keys", "is_config", "read_config"]


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
    keys = _Keys(document)
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
        keys.size("num_experts"),
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
    return _decoder(keys, name, _grouped(keys, biases=True), **_qwen_experts(keys))


def _qwen3_moe(keys: _Keys, name: str) -> ModelConfig:
    return _decoder(keys, name, _grouped(keys, head_norms=True), **_qwen_experts(keys))


def _deepseek(keys: _Keys, name: str) -> ModelConfig:
    plain, rotary = keys.size("qk_nope_head_dim"), keys.size("qk_rope_head_dim")
    heads = keys.size("num_attention_heads")
    attention = Attention(
        *(heads, heads, plain + rotary, keys.size("v_head_dim")),
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
        *(keys, name, attention),
        experts=_checked(keys, experts),
        dense_layers=dense,
        mtp_layers=predictions,
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
