"""The writer of the headline shapes: the published mix at full size, and small files through the same code."""

from __future__ import annotations

import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

import larql
from engines import feed, open_engine
from larql.gguf_file import GgufFile
from reference import Reference

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from headline_shapes import Q4_K, Q5_0, Q6_K, Q8_0, SHAPES, mix, random_blocks, tensors, write_model

# Tensors of each format, MiB and bits per weight as llama.cpp prints them for the published files; the counts of the 1B
# models are what its rule gives.
PUBLISHED = {
    "gemma3-4b": ({"F32": 205, "Q4_K": 204, "Q6_K": 35}, 2.31 * 1024, 5.12),
    "gemma3-1b": ({"F32": 157, "Q5_0": 117, "Q8_0": 14, "Q4_K": 39, "Q6_K": 13}, 762.49, 6.40),
    "llama3.2-1b": ({"F32": 34, "Q4_K": 96, "Q6_K": 17}, 762.81, 5.18),
}
# Widths of 512 take the formats of the 4B, those of 288 the fallbacks of the 1B; prompts are longer than the window.
SHALLOW = {name: replace(shape, n_layers=7, vocab_size=1024, head_size=64) for name, shape in SHAPES.items()}
SMALL = {
    "gemma3-4b": replace(SHALLOW["gemma3-4b"], width=512, feed_forward=1024, window=16),
    "gemma3-1b": replace(SHALLOW["gemma3-1b"], width=288, feed_forward=768, window=16),
    "llama3.2-1b": replace(SHALLOW["llama3.2-1b"], width=512, feed_forward=1024, n_heads=8, n_kv_heads=2),
}
IDS = np.random.default_rng(5).integers(0, 1024, 40).tolist()


@pytest.fixture(scope="module", params=SMALL)
def small_file(request: pytest.FixtureRequest, gemma_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert gemma_path.is_file()  # the vocabulary is taken from it
    path: Path = tmp_path_factory.mktemp(request.param) / "small.gguf"
    write_model(path, SMALL[request.param])
    return path


@pytest.mark.parametrize("name", SHAPES)
def test_the_mix_is_the_published_one(name: str) -> None:
    counts, mebibytes, bits_per_weight = PUBLISHED[name]
    found = mix(SHAPES[name])
    assert {kind.name: count for kind, (count, _) in found.items()} == counts
    n_bytes = sum(n_bytes for _, n_bytes in found.values())
    n_weights = sum(int(np.prod(tensor.shape)) for tensor in tensors(SHAPES[name]))
    assert n_bytes / 2**20 == pytest.approx(mebibytes, rel=0.002 if mebibytes > 1024 else 1e-5)
    assert n_bytes * 8 / n_weights == pytest.approx(bits_per_weight, abs=0.005)


def test_the_rule_gives_the_tensors_of_a_real_file(gemma_path: Path) -> None:
    of_270m = replace(SHAPES["gemma3-1b"], width=640, feed_forward=2048, n_layers=18)
    expected = [(name, info.type, info.shape) for name, info in GgufFile(gemma_path).tensors.items()]
    assert [(tensor.name, tensor.kind.name, tensor.shape) for tensor in tensors(of_270m)] == expected


def test_both_precisions_agree_with_the_numpy_forward_pass(small_file: Path) -> None:
    want = Reference(small_file).logits(IDS)
    assert 1 < want.std() < 5
    for precision, limit in (("reference", 2e-4), ("fast", 0.05)):
        engine = open_engine(small_file, precision)
        got = feed(engine, engine.new_sequence(), IDS)
        assert np.sqrt(np.mean((got - want) ** 2)) < limit * want.std()


def test_the_vocabulary_works(small_file: Path) -> None:
    model = larql.load(small_file, threads=1)
    assert model.tokenizer.vocab_size == model.config.vocab_size
    ids = model.encode("Hi-12")
    assert ids[0] == model.tokenizer.bos_id
    assert model.decode(ids[1:]) == "Hi-12"
    assert len(model.generate(ids, max_tokens=4, temperature=0).ids) == 4


@pytest.mark.parametrize("kind", [Q4_K, Q5_0, Q6_K, Q8_0])
def test_blocks_are_centred_have_their_deviation_and_do_not_compress(kind: GGMLQuantizationType) -> None:
    blocks = random_blocks(np.random.default_rng(1), kind, 20_000, 0.02)
    values = dequantize(blocks, kind)
    assert values.std() == pytest.approx(0.02, rel=0.02)
    assert abs(values.mean()) < 0.06 * values.std()  # the quants of Q5_0 are -16 to 15
    assert len(zlib.compress(blocks.tobytes(), 1)) > 0.9 * blocks.nbytes


def test_a_seed_gives_one_file(tmp_path: Path) -> None:
    for file, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_model(tmp_path / file, SMALL["llama3.2-1b"], seed)
    a, b, c = ((tmp_path / file).read_bytes() for file in "abc")
    assert a == b != c
    assert len(list(tmp_path.iterdir())) == 3


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "out.gguf").mkdir()
    with pytest.raises(OSError, match=r"out\.gguf"):
        write_model(tmp_path / "out.gguf", SMALL["llama3.2-1b"])
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
