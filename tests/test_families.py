"""From a file's metadata to the ModelConfig: values, defaults, and refusals by name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from larql.config import LayerConfig, ModelConfig, RopeConfig
from larql.errors import ModelError
from larql.families import FAMILIES, read_model
from larql.families.keys import TensorInfo
from larql.gguf_file import GgufFile
from tiny_models import write_tiny_model

LLAMA_LAYER = (
    "attn_norm.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
    "ffn_norm.weight",
    "ffn_gate.weight",
    "ffn_up.weight",
    "ffn_down.weight",
)
QK_NORM = ("attn_q_norm.weight", "attn_k_norm.weight")
QKV_BIAS = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
POST_NORMS = ("post_attention_norm.weight", "post_ffw_norm.weight")
LAYER_TENSORS = {
    "llama": LLAMA_LAYER,
    "qwen2": LLAMA_LAYER + QKV_BIAS,
    "qwen3": LLAMA_LAYER + QK_NORM,
    "gemma3": LLAMA_LAYER + QK_NORM + POST_NORMS,
}


@dataclass
class FakeFile:
    """A model file in memory."""

    metadata: Mapping[str, Any]
    tensors: dict[str, TensorInfo]
    values: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def read_f32(self, name: str) -> NDArray[np.float32]:
        return self.values[name]


def make_file(family: str, n_layers: int = 2, tied: bool = True, **changes: Any) -> FakeFile:
    """A file with the keys that `family` needs and no more; `changes` replace keys (`__` for a dot; None removes)."""
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": 64,
        "block_count": n_layers,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    if family == "gemma3":
        keys["attention.sliding_window"] = 8
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    metadata = {f"{family}.{name}": value for name, value in keys.items() if value is not None}
    names = ["token_embd.weight", "output_norm.weight"] + ([] if tied else ["output.weight"])
    names += [f"blk.{i}.{name}" for i in range(n_layers) for name in LAYER_TENSORS[family]]
    tensors = {name: TensorInfo("F32", (64,), 256) for name in names}
    tensors["token_embd.weight"] = TensorInfo("F32", (300, 64), 4 * 300 * 64)
    return FakeFile({"general.architecture": family} | metadata, tensors)


def read_config(file: FakeFile) -> ModelConfig:
    return read_model(file)[0]


def test_families_do_not_share_an_architecture() -> None:
    names = [name for family in FAMILIES for name in family.ARCHITECTURES]
    assert len(names) == len(set(names)) == 4


def test_llama_defaults() -> None:
    config = read_config(make_file("llama"))
    rope = RopeConfig(base=10_000.0, dims=16, pairing="adjacent")
    assert config == ModelConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        n_heads=4,
        n_kv_heads=4,
        head_dim=16,
        context_length=256,
        norm_eps=1e-6,
        query_scale=0.25,
        activation="silu",
        tied_head=True,
        layers=(LayerConfig(rope), LayerConfig(rope)),
    )


def test_llama_keys() -> None:
    file = make_file(
        "llama",
        tied=False,
        attention__head_count_kv=2,
        attention__key_length=32,
        attention__value_length=32,
        rope__dimension_count=24,
        rope__freq_base=500_000.0,
        rope__scaling__type="linear",
        rope__scaling__factor=4.0,
    )
    config = read_config(file)
    assert (config.n_kv_heads, config.head_dim, config.tied_head) == (2, 32, False)
    assert config.query_scale == pytest.approx(1 / math.sqrt(32))
    assert config.layers[0].rope == RopeConfig(500_000.0, 24, "adjacent", 4.0)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 1.0),
        ({"rope__scaling__factor": 4.0}, 4.0),  # the type is linear unless the file says otherwise
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, 1.0),
        ({"rope__scale_linear": 2.0}, 2.0),
        ({"rope__scale_linear": 2.0, "rope__scaling__factor": 4.0}, 4.0),
        ({"rope__scaling__factor": 0.0}, 1.0),
    ],
)
def test_linear_rope_scaling(changes: dict[str, Any], factor: float) -> None:
    assert read_config(make_file("qwen2", **changes)).layers[0].rope.scaling_factor == factor


@pytest.mark.parametrize("kind", ["yarn", "longrope", "su"])
def test_other_rope_scalings_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ModelError, match=rf"llama\.rope\.scaling\.type is '{kind}'"):
        read_config(make_file("llama", rope__scaling__type=kind))


def test_llama_frequency_factors() -> None:
    file = make_file("llama")
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    file.tensors["rope_freqs.weight"] = TensorInfo("F32", (8,), 32)
    file.values["rope_freqs.weight"] = factors
    config, names = read_model(file)
    assert config.layers[0].rope.frequency_factors == tuple(factors.tolist())
    assert "rope_freqs.weight" not in names.values()

    file.tensors["rope_freqs.weight"] = TensorInfo("F32", (16,), 64)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight has shape \(16,\), expected \(8,\)"):
        read_config(file)


def test_qwen2_has_biases_and_half_pairs() -> None:
    config = read_config(make_file("qwen2", rope__freq_base=1e6))
    assert config.qkv_bias
    assert not config.qk_norm
    assert config.layers == (LayerConfig(RopeConfig(1e6, 16, "half")),) * 2


def test_qwen3_normalises_q_and_k() -> None:
    config = read_config(make_file("qwen3", attention__key_length=32, attention__value_length=32))
    assert config.qk_norm
    assert not config.qkv_bias
    assert config.head_dim == 32
    assert config.layers[0].rope.pairing == "half"


def test_gemma3() -> None:
    config = read_config(make_file("gemma3", n_layers=13, rope__scaling__type="linear", rope__scaling__factor=8.0))
    assert config.embedding_scale == 8.0
    assert config.query_scale == 0.25
    assert config.activation == "gelu_tanh"
    assert config.qk_norm
    assert config.post_norms
    assert config.attention_softcap is None
    assert config.logit_softcap is None
    local = LayerConfig(RopeConfig(10_000.0, 16, "half"), window=8)
    full = LayerConfig(RopeConfig(1_000_000.0, 16, "half", scaling_factor=8.0))
    assert config.layers == ((local,) * 5 + (full,)) * 2 + (local,)


@pytest.mark.parametrize(
    ("pattern", "full"),
    [(3, [2, 5]), (1, [0, 1, 2, 3, 4, 5]), (np.array([True, False, True, True, True, False]), [1, 5])],
)
def test_gemma3_window_pattern(pattern: Any, full: list[int]) -> None:
    config = read_config(make_file("gemma3", n_layers=6, attention__sliding_window_pattern=pattern))
    assert [i for i, layer in enumerate(config.layers) if layer.window is None] == full


def test_gemma3_options() -> None:
    file = make_file("gemma3", rope__freq_base_swa=5_000.0, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    config = read_config(file)
    assert config.layers[0].rope.base == 5_000.0
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)


def test_gemma3_27b_scales_queries_by_its_share_of_the_width() -> None:
    assert read_config(make_file("gemma3", n_layers=61, attention__key_length=64)).query_scale == 64**-0.5
    assert read_config(make_file("gemma3", n_layers=62, attention__key_length=64)).query_scale == 16**-0.5


def test_gemma3_pattern_of_wrong_length() -> None:
    file = make_file("gemma3", attention__sliding_window_pattern=np.array([True, False, True]))
    with pytest.raises(ModelError, match=r"gemma3\.attention\.sliding_window_pattern has 3 entries for 2 layers"):
        read_config(file)


@pytest.mark.parametrize("family", LAYER_TENSORS)
@pytest.mark.parametrize(
    "key",
    [
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_required_key_that_is_missing_is_named(family: str, key: str) -> None:
    with pytest.raises(ModelError, match=rf"lacks the metadata key {family}\.{key}$"):
        read_config(make_file(family, **{key.replace(".", "__"): None}))


def test_gemma3_needs_its_window() -> None:
    with pytest.raises(ModelError, match=r"lacks the metadata key gemma3\.attention\.sliding_window$"):
        read_config(make_file("gemma3", attention__sliding_window=None))


def test_head_size_must_be_known() -> None:
    with pytest.raises(ModelError, match=r"lacks the metadata key llama\.attention\.key_length$"):
        read_config(make_file("llama", attention__head_count=5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": "2"}, r"llama\.block_count: expected an integer, found '2'"),
        ({"block_count": True}, r"llama\.block_count: expected an integer, found True"),
        ({"block_count": np.array([1, 2])}, r"llama\.block_count: expected an integer, found a value of type ndarray"),
        ({"block_count": 0}, r"llama\.block_count is 0; it must be at least 1"),
        ({"block_count": 2**32 - 1}, r"llama\.block_count is 4294967295, but the file has 20 tensors"),
        ({"attention__head_count": 0}, r"llama\.attention\.head_count is 0"),
        ({"attention__layer_norm_rms_epsilon": "x"}, r"layer_norm_rms_epsilon: expected a number, found 'x'"),
        ({"rope__freq_base": math.nan}, r"llama\.rope\.freq_base is nan; it must be finite"),
        ({"rope__scaling__type": 1}, r"llama\.rope\.scaling\.type: expected a string, found 1"),
        ({"attention__value_length": 32}, r"llama\.attention\.value_length is 32; .* than keys \(16\)"),
        ({"expert_count": 8}, r"llama\.expert_count is 8; mixture-of-experts"),
        ({"attention__causal": False}, r"llama\.attention\.causal is false"),
        ({"attention__sliding_window": 128}, r"llama\.attention\.sliding_window is 128"),
        ({"rope__scaling__attn_factor": 1.5}, r"llama\.rope\.scaling\.attn_factor is 1\.5"),
        ({"embedding_length": 60}, r"token_embd\.weight has shape \(300, 64\), expected \(vocabulary, 60\)"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(make_file("llama", **changes))


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert read_config(make_file("qwen2", attention__sliding_window=256)).layers[0].window is None


def test_unknown_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(ModelError, match=r"'mamba' are not supported; supported are gemma3, llama, qwen2, qwen3"):
        read_model(FakeFile({"general.architecture": "mamba"}, {}))
    with pytest.raises(ModelError, match=r"lacks the metadata key general\.architecture"):
        read_model(FakeFile({}, {}))
    with pytest.raises(ModelError, match=r"general\.architecture: expected a string"):
        read_model(FakeFile({"general.architecture": 3}, {}))


@pytest.mark.parametrize("family", LAYER_TENSORS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_has_one_name(family: str, tied: bool) -> None:
    file = make_file(family, tied=tied)
    _, names = read_model(file)
    assert sorted(names.values()) == sorted(file.tensors)
    assert ("lm_head" in names) is not tied
    assert names["layers.1.mlp.down_proj"] == "blk.1.ffn_down.weight"
    assert names["layers.0.self_attn.o_proj"] == "blk.0.attn_output.weight"


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("llama", "blk.1.attn_q.bias"),
        ("llama", "blk.0.ffn_gate_exps.weight"),
        ("llama", "blk.2.attn_norm.weight"),  # more layers than block_count
        ("qwen2", "rope_freqs.weight"),
        ("qwen3", "blk.0.attn_qkv.weight"),
        ("gemma3", "v.blk.0.attn_q.weight"),
    ],
)
def test_a_tensor_that_would_be_ignored_is_refused_by_name(family: str, extra: str) -> None:
    file = make_file(family)
    file.tensors[extra] = TensorInfo("F32", (64,), 256)
    with pytest.raises(ModelError, match=rf"tensors that {family} models do not use in LARQL: {extra}$"):
        read_model(file)


@pytest.mark.parametrize("family", LAYER_TENSORS)
def test_a_tensor_that_is_missing_is_named(family: str) -> None:
    for name in LAYER_TENSORS[family]:
        file = make_file(family)
        del file.tensors[f"blk.1.{name}"]
        with pytest.raises(ModelError, match=rf"lacks the tensor blk\.1\.{name}$"):
            read_model(file)


def test_a_missing_embedding_is_named() -> None:
    file = make_file("llama")
    del file.tensors["token_embd.weight"]
    with pytest.raises(ModelError, match=r"lacks the tensor token_embd\.weight"):
        read_model(file)


def test_long_lists_of_tensors_are_cut() -> None:
    file = make_file("llama")
    file.tensors |= {f"extra.{i}": TensorInfo("F32", (1,), 4) for i in range(100)}
    with pytest.raises(ModelError, match=r"extra\.4 and 95 more$"):
        read_model(file)


@pytest.mark.parametrize("family", LAYER_TENSORS)
def test_files_of_every_family(tmp_path: Path, family: str) -> None:
    file = GgufFile(write_tiny_model(tmp_path / "tiny.gguf", family, "Q8_0"))
    config, names = read_model(file)
    assert set(names.values()) == set(file.tensors)
    assert config.vocab_size == file.tensors["token_embd.weight"].shape[0]


def test_gemma_270m(gemma_path: Path) -> None:
    config, names = read_model(GgufFile(gemma_path))
    local = LayerConfig(RopeConfig(10_000.0, 256, "half"), window=512)
    full = LayerConfig(RopeConfig(1_000_000.0, 256, "half"))
    assert config == ModelConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        n_heads=4,
        n_kv_heads=1,
        head_dim=256,
        context_length=32_768,
        norm_eps=float(np.float32(1e-6)),
        query_scale=1 / 16,
        activation="gelu_tanh",
        tied_head=True,
        layers=((local,) * 5 + (full,)) * 3,
        embedding_scale=math.sqrt(640),
        qk_norm=True,
        post_norms=True,
    )
    assert len(names) == 236


def test_smollm_135m(smollm_path: Path) -> None:
    config, _ = read_model(GgufFile(smollm_path))
    assert config == ModelConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        context_length=8192,
        norm_eps=float(np.float32(1e-5)),
        query_scale=1 / 8,
        activation="silu",
        tied_head=True,
        layers=(LayerConfig(RopeConfig(100_000.0, 64, "adjacent")),) * 30,
    )


@pytest.mark.parametrize(
    ("fixture", "width", "feed_forward", "n_heads", "head_dim", "n_layers"),
    [("qwen05_path", 896, 4864, 14, 64, 24), ("qwen15_path", 1536, 8960, 12, 128, 28)],
)
def test_qwen_coder(
    request: pytest.FixtureRequest,
    fixture: str,
    width: int,
    feed_forward: int,
    n_heads: int,
    head_dim: int,
    n_layers: int,
) -> None:
    config, _ = read_model(GgufFile(request.getfixturevalue(fixture)))
    assert config == ModelConfig(
        vocab_size=151_936,
        hidden_size=width,
        intermediate_size=feed_forward,
        n_heads=n_heads,
        n_kv_heads=2,
        head_dim=head_dim,
        context_length=32_768,
        norm_eps=float(np.float32(1e-6)),
        query_scale=head_dim**-0.5,
        activation="silu",
        tied_head=False,
        layers=(LayerConfig(RopeConfig(1_000_000.0, head_dim, "half")),) * n_layers,
        qkv_bias=True,
    )
