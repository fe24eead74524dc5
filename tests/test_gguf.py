"""The GGUF reader against files of the public `gguf` package, damaged files, and 10,000 random kinds of damage."""

import os
import random
import re
import resource
import struct
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFEndian, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from larql._core import Gguf
from larql.errors import ModelError

WEIGHT_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

SCALARS = {
    "u8": (GGUFValueType.UINT8, 255),
    "i8": (GGUFValueType.INT8, -128),
    "u16": (GGUFValueType.UINT16, 65_535),
    "i16": (GGUFValueType.INT16, -32_768),
    "u32": (GGUFValueType.UINT32, 2**32 - 1),
    "i32": (GGUFValueType.INT32, -(2**31)),
    "u64": (GGUFValueType.UINT64, 2**64 - 1),
    "i64": (GGUFValueType.INT64, -(2**63)),
    "f32": (GGUFValueType.FLOAT32, 0.625),
    "f64": (GGUFValueType.FLOAT64, 0.1),
    "true": (GGUFValueType.BOOL, True),
    "false": (GGUFValueType.BOOL, False),
    "string": (GGUFValueType.STRING, "naïve \n\0 ▁日本 🙂"),
}
NUMBER_ARRAYS = {
    "u8s": (GGUFValueType.UINT8, np.uint8, [0, 255]),
    "i8s": (GGUFValueType.INT8, np.int8, [-128, 127]),
    "u16s": (GGUFValueType.UINT16, np.uint16, [0, 65_535]),
    "i16s": (GGUFValueType.INT16, np.int16, [-32_768, 32_767]),
    "u32s": (GGUFValueType.UINT32, np.uint32, [0, 2**32 - 1]),
    "i32s": (GGUFValueType.INT32, np.int32, [-(2**31), 2**31 - 1]),
    "u64s": (GGUFValueType.UINT64, np.uint64, [0, 2**64 - 1]),
    "i64s": (GGUFValueType.INT64, np.int64, [-(2**63), 2**63 - 1]),
    "f32s": (GGUFValueType.FLOAT32, np.float32, [0.625, -1e30]),
    "f64s": (GGUFValueType.FLOAT64, np.float64, [0.1, -1e300]),
}


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_every_value_type(path: Path) -> None:
    writer = GGUFWriter(path, "test")
    for key, (value_type, value) in SCALARS.items():
        writer.add_key_value(key, value, value_type)
    for key, (value_type, _, values) in NUMBER_ARRAYS.items():
        writer.add_key_value(key, values, GGUFValueType.ARRAY, value_type)
    writer.add_array("bools", [True, False, True])
    writer.add_array("strings", ["", "a", "▁日本"])
    writer.add_array("nested", [["a", "b"], [["c"]], [1, 2]])
    writer.add_tensor("x", np.arange(6, dtype=np.float32).reshape(2, 3))
    finish(writer)


def random_tensor(rng: np.random.Generator, weight_type: str, rows: int) -> npt.NDArray[np.uint8]:
    """Bytes of two blocks a row; small ones, so that every float in them is finite."""
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[weight_type]][1]
    return rng.integers(0, 64, (rows, 2 * block_bytes), dtype=np.uint8)


def write_every_weight_type(path: Path) -> dict[str, npt.NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    tensors = {weight_type: random_tensor(rng, weight_type, rows=3) for weight_type in WEIGHT_TYPES}
    writer = GGUFWriter(path, "test")
    writer.add_custom_alignment(64)
    for weight_type, data in tensors.items():
        writer.add_tensor(f"{weight_type}.weight", data, raw_dtype=GGMLQuantizationType[weight_type])
    finish(writer)
    return tensors


def write_shards(folder: Path, n_shards: int, *, small_first_shard: bool = False) -> list[Path]:
    """A model of one tensor a shard, named t0, t1, ..., with the number of the tensor in each of its weights."""
    writer = GGUFWriter(folder / "x", "test", split_max_tensors=1, small_first_shard=small_first_shard)
    for tensor in range(n_shards - small_first_shard):
        writer.add_tensor(f"t{tensor}", np.full((2, 4), tensor, dtype=np.float32))
    finish(writer)
    return [folder / f"x-{number:05}-of-{n_shards:05}.gguf" for number in range(1, n_shards + 1)]


@pytest.mark.parametrize("version", [2, 3])
def test_reads_every_value_type(tmp_path: Path, version: int) -> None:
    path = tmp_path / "x.gguf"
    write_every_value_type(path)
    with path.open("r+b") as file:
        file.seek(4)
        file.write(struct.pack("<I", version))
    gguf = Gguf(path)
    assert gguf.version == version
    assert gguf.paths == [str(path)]
    metadata = gguf.metadata()
    assert list(metadata)[: 1 + len(SCALARS)] == ["general.architecture", *SCALARS]
    for key, (_, value) in SCALARS.items():
        assert metadata[key] == value
        assert type(metadata[key]) is type(value)
    for key, (_, dtype, values) in NUMBER_ARRAYS.items():
        assert metadata[key].dtype == dtype
        np.testing.assert_array_equal(metadata[key], np.array(values, dtype=dtype))
    assert [bool(value) for value in metadata["bools"]] == [True, False, True]
    assert metadata["strings"] == ["", "a", "▁日本"]
    strings, deeper, numbers = metadata["nested"]
    assert (strings, deeper, list(numbers)) == (["a", "b"], [["c"]], [1, 2])


def test_reads_every_weight_type(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    written = write_every_weight_type(path)
    gguf = Gguf(path)
    expected = []
    for weight_type, data in written.items():
        block_len = GGML_QUANT_SIZES[GGMLQuantizationType[weight_type]][0]
        expected.append((f"{weight_type}.weight", weight_type, (3, 2 * block_len), data.nbytes))
        read = gguf.read_f32(f"{weight_type}.weight")
        np.testing.assert_array_equal(read, dequantize(data, GGMLQuantizationType[weight_type]))
    assert gguf.tensors() == expected


def test_keeps_the_shape(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "test")
    tensors = [np.random.default_rng(0).normal(size=(5, 4, 3, 2)[:n]).astype(np.float32) for n in range(1, 5)]
    for number, tensor in enumerate(tensors):
        writer.add_tensor(f"t{number}", tensor)
    finish(writer)
    gguf = Gguf(path)
    assert [shape for _, _, shape, _ in gguf.tensors()] == [tensor.shape for tensor in tensors]
    for number, tensor in enumerate(tensors):
        np.testing.assert_array_equal(gguf.read_f32(f"t{number}"), tensor)


@pytest.mark.parametrize("small_first_shard", [False, True])
def test_opens_a_split_model_by_any_shard(tmp_path: Path, small_first_shard: bool) -> None:
    shards = write_shards(tmp_path, 3, small_first_shard=small_first_shard)
    for shard in shards:
        gguf = Gguf(shard)
        assert gguf.paths == [str(path) for path in shards]
        assert gguf.metadata()["general.architecture"] == "test"
        names = [name for name, _, _, _ in gguf.tensors()]
        assert names == [f"t{tensor}" for tensor in range(3 - small_first_shard)]
        for tensor, name in enumerate(names):
            np.testing.assert_array_equal(gguf.read_f32(name), np.full((2, 4), tensor))


def test_names_the_missing_shard(tmp_path: Path) -> None:
    first, second, third = write_shards(tmp_path, 3)
    second.unlink()
    for opened in (first, third):
        with pytest.raises(ModelError, match=f"^{re.escape(str(opened))}: of its 3 shards .*x-00002-of-00003.gguf is"):
            Gguf(opened)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"model\.gguf: is one of 3 shards, but its name does not end in -00001-of-"):
        Gguf(renamed)


def test_opens_a_large_vocabulary_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    n_tokens = 262_144
    tokens = [f"token{number}" for number in range(n_tokens)]
    key = b"tokenizer.ggml.tokens"
    encoded = b"".join(struct.pack("<Q", len(token)) + token.encode() for token in tokens)
    path.write_bytes(
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key + struct.pack("<IIQ", 9, 8, n_tokens) + encoded
    )
    started = time.perf_counter()
    metadata = Gguf(path).metadata()
    assert time.perf_counter() - started < 0.5
    assert metadata["tokenizer.ggml.tokens"] == tokens


def test_refuses_what_is_no_file(tmp_path: Path) -> None:
    empty = tmp_path / "empty.gguf"
    empty.touch()
    fifo = tmp_path / "fifo.gguf"
    os.mkfifo(fifo)
    locked = tmp_path / "locked.gguf"
    locked.write_bytes(b"GGUF")
    locked.chmod(0)
    cases = {
        tmp_path: "is a directory where a file is needed",
        empty: "the file is empty",
        fifo: "is not a regular file",
        tmp_path / "absent.gguf": "there is no such file",
        empty / "below.gguf": "cannot be read: Not a directory",
    }
    if os.geteuid() != 0:  # root may read everything
        cases[locked] = "cannot be read: Permission denied"
    for path, text in cases.items():
        with pytest.raises(ModelError, match=f"^{re.escape(f'{path}: {text}')}"):
            Gguf(path)


def test_refuses_a_big_endian_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "test", endianess=GGUFEndian.BIG)
    writer.add_tensor("x", np.ones(4, dtype=np.float32))
    finish(writer)
    with pytest.raises(ModelError, match=r"x\.gguf: is a big-endian GGUF file: only little-endian"):
        Gguf(path)


# What a small file becomes, and the message. `after` is a text in the file, `skip` the bytes between its end and the
# field that is overwritten.
DAMAGES = {
    "magic": (b"", 0, b"PK\x03\x04", r'is not a GGUF file: it starts with "PK\\x03\\x04" instead of "GGUF"'),
    "version 1": (b"GGUF", 0, b"\1", "GGUF version 1 is not supported: fetch a newer file"),
    "new version": (b"GGUF", 0, b"\4", "GGUF version 4 is not supported"),
    "tensor count": (b"GGUF", 4, b"\xff" * 8, "has 18446744073709551615 tensors where the file has room for"),
    "entry count": (b"GGUF", 12, b"\xff" * 8, "has 18446744073709551615 metadata entries where the file has"),
    "fewer entries": (b"GGUF", 12, b"\2", r'tensor "list": has 9 dimensions .*; the file is broken: fetch another'),
    "value type": (b"flag", 0, b"\x0d", 'metadata key "flag": value type 13 is unknown'),
    "bool": (b"flag", 4, b"\2", 'metadata key "flag": a bool is 2 instead of 0 or 1'),
    "utf-8": (b"general.architecture", 12, b"\xff", 'metadata key "general.architecture": a string is not UTF-8'),
    "string length": (b"general.architecture", 4, b"\xff" * 8, "has 18446744073709551615 string bytes where the file"),
    "element type": (b"list", 4, b"\x0d", 'metadata key "list": array element type 13 is unknown'),
    "array length": (b"list", 8, b"\0" * 7 + b"\x80", 'key "list": has 9223372036854775808 array elements where'),
    "same key": (b"flag", -4, b"list", 'metadata key "list" appears twice'),
    "dimensions": (b"first", 0, b"\5", 'tensor "first": has 5 dimensions where 1 to 4 are allowed'),
    "no dimension": (b"first", 0, b"\0", 'tensor "first": has 0 dimensions where 1 to 4 are allowed'),
    "empty": (b"first", 4, b"\0", r'tensor "first": has an empty dimension: its shape is \[2, 0\]'),
    "columns": (b"first", 4, b"\x21", 'tensor "first": has rows of 33 weights, not a multiple of the 32 in a Q8_0'),
    "overflow": (b"first", 11, b"\x80", 'tensor "first": is too large for any file'),
    "rows": (b"first", 12, b"\xff", r'tensor "first": its data ends at byte \d{4}, the file at byte \d{3};'),
    "weight type": (b"first", 20, b"\x17", r'tensor "first": weight type 23 \(IQ4_XS\) is not supported; .* Q4_K Q5_K'),
    "no weight type": (b"first", 20, b"\x63", r'"first": weight type 99 \(unknown\) is not supported; supported'),
    "alignment": (b"other", 16, b"\x61", 'tensor "other": its data offset 97 is not a multiple of the alignment 32'),
    "offset": (b"other", 16, b"\0\0\1", r'tensor "other": its data ends at byte \d{5}, the file at byte \d{3}'),
    "overlap": (b"other", 16, b"\x20", r'"first" and "other" overlap: one ends at byte \d+, the other starts at \d+;'),
    "same name": (b"other", -5, b"first", 'tensor "first" appears twice'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_says_what_is_wrong(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "test")
    writer.add_bool("flag", True)
    writer.add_array("list", [1, 2, 3])
    writer.add_tensor("first", np.zeros((2, 34), dtype=np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("other", np.ones(4, dtype=np.float32))
    finish(writer)
    Gguf(path)
    after, skip, new, message = DAMAGES[damage]
    data = bytearray(path.read_bytes())
    start = data.index(after) + len(after) + skip
    data[start : start + len(new)] = new
    path.write_bytes(data)
    with pytest.raises(ModelError, match=f"^{re.escape(str(path))}: .*{message}"):
        Gguf(path)


def test_refuses_every_truncation(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_every_value_type(whole)
    data = whole.read_bytes()
    for length in range(1, len(data) - 8):  # the last 8 bytes pad the tensor
        path = tmp_path / f"{length}.gguf"
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"\d\.gguf: .*(is broken: fetch another copy|is not a GGUF file)"):
            Gguf(path)


N_FUZZ_CASES = 10_000
EXTREMES = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """One to three random damages of a file."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(damaged)) if damaged else 0
        match rng.choice(("flip", "u32", "u64", "small", "truncate", "splice", "repeat")):
            case "flip" if damaged:
                damaged[start] ^= 1 << rng.randrange(8)
            case "u32":
                damaged[start : start + 4] = struct.pack("<I", rng.choice(EXTREMES) % 2**32)
            case "u64":
                damaged[start : start + 8] = struct.pack("<Q", rng.choice(EXTREMES))
            case "small":  # types, dimensions, small counts
                damaged[start : start + 4] = struct.pack("<I", rng.randrange(48))
            case "truncate":
                del damaged[start:]
            case "splice":
                other = rng.randrange(len(data))
                damaged[start : start + rng.randrange(64)] = data[other : other + rng.randrange(64)]
            case "repeat":
                damaged[start:start] = damaged[start : start + rng.randrange(64)]
    return bytes(damaged)


def use(path: Path) -> str:
    """Opens a file and reads all that it offers; returns the error or an empty string."""
    try:
        gguf = Gguf(path)
    except ModelError as error:
        return str(error)
    gguf.metadata()
    tensors = gguf.tensors()
    for name, _, shape, _ in tensors[:1] + tensors[-1:]:
        assert gguf.read_f32(name).shape == shape
    return ""


def peak_memory() -> int:
    """The most memory this process has had resident, in bytes."""
    if sys.platform == "linux":  # there getrusage starts with the parent's peak
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return 1024 * int(status["VmHWM"].removesuffix("kB"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def fuzz(folder: Path) -> tuple[Counter[str], float, int]:
    """Opens every damaged file; returns how many opened or not, the slowest case in seconds, and memory growth."""
    write_every_value_type(folder / "values.gguf")
    write_every_weight_type(folder / "weights.gguf")
    (folder / "split").mkdir()
    first_shard, _ = write_shards(folder / "split", 2)
    paths = [folder / "values.gguf", folder / "weights.gguf", first_shard]
    originals = {path: path.read_bytes() for path in paths}
    rng = random.Random(2024)
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    for path in paths:
        assert use(path) == ""
    before = peak_memory()
    for case in range(N_FUZZ_CASES):
        path = paths[case % len(paths)]
        path.unlink()  # a new file instead of the old one truncated, which some file systems write to disk at once
        path.write_bytes(damaged(rng, originals[path]))
        started = time.process_time()
        error = use(path)
        slowest = max(slowest, time.process_time() - started)
        assert not error or re.fullmatch(re.escape(str(folder)) + r"/[a-z0-9/-]+\.gguf: .{10,700}", error), error
        outcomes["refused" if error else "opened"] += 1
    return outcomes, slowest, peak_memory() - before


def test_survives_random_damage(tmp_path: Path) -> None:
    # In a process of its own, whose peak memory is not hidden by earlier tests and whose crash fails only this test.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        outcomes, slowest, growth = pool.submit(fuzz, tmp_path).result()
    assert outcomes.total() == N_FUZZ_CASES
    assert min(outcomes["opened"], outcomes["refused"]) > N_FUZZ_CASES / 10, outcomes
    assert slowest < 1
    assert growth < 64 * 2**20
