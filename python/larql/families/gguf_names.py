"""Tensor names in GGUF files: the same for all families so far."""

from __future__ import annotations

from collections.abc import Iterable

from larql.config import ModelConfig
from larql.errors import ModelError
from larql.families.keys import Source, architecture

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"

# Canonical name in a layer (as in Hugging Face models) to the name after `blk.N.`.
_LAYER = {
    "input_layernorm": "attn_norm.weight",
    "self_attn.q_proj": "attn_q.weight",
    "self_attn.k_proj": "attn_k.weight",
    "self_attn.v_proj": "attn_v.weight",
    "self_attn.o_proj": "attn_output.weight",
    "ffn_norm": "ffn_norm.weight",
    "mlp.gate_proj": "ffn_gate.weight",
    "mlp.up_proj": "ffn_up.weight",
    "mlp.down_proj": "ffn_down.weight",
}
_QKV_BIAS = {
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
}
_QK_NORM = {
    "self_attn.q_norm": "attn_q_norm.weight",
    "self_attn.k_norm": "attn_k_norm.weight",
}
_POST_NORMS = {
    "post_attention_norm": "post_attention_norm.weight",
    "post_ffn_norm": "post_ffw_norm.weight",
}


def tensor_names(config: ModelConfig, source: Source) -> dict[str, str]:
    """Canonical name to GGUF name of every tensor that `config` calls for.

    Raises ModelError when the file lacks one of them, or has one that would be left unused: that model computes
    something else than the config says.
    """
    names = {"embed_tokens": EMBEDDING, "norm": "output_norm.weight"}
    if not config.tied_head:
        names["lm_head"] = HEAD
    layer_names = _layer_names(config)
    for i in range(len(config.layers)):
        names |= {f"layers.{i}.{ours}": f"blk.{i}.{theirs}" for ours, theirs in layer_names.items()}
    _check_all_used(names, config, source)
    return names


def _layer_names(config: ModelConfig) -> dict[str, str]:
    names = dict(_LAYER)
    if config.qkv_bias:
        names |= _QKV_BIAS
    if config.qk_norm:
        names |= _QK_NORM
    if config.post_norms:
        names |= _POST_NORMS
    return names


def _check_all_used(names: dict[str, str], config: ModelConfig, source: Source) -> None:
    used = set(names.values())
    if any(layer.rope.frequency_factors is not None for layer in config.layers):
        used.add(ROPE_FACTORS)  # its values are in the config
    unused = [name for name in source.tensors if name not in used]
    if unused:
        raise ModelError(
            f"the model file has tensors that {architecture(source)} models do not use in LARQL: {_listing(unused)}"
        )
    missing = [name for name in names.values() if name not in source.tensors]
    if missing:
        raise ModelError(f"the model file lacks the tensor {_listing(missing)}")


def _listing(names: Iterable[str], limit: int = 5) -> str:
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
