"""A position's logits have the same bits however the work is cut: threads, pieces, batches, forks, instruction sets."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engines import Array, feed, open_engine
from larql._core import Engine
from tiny_models import write_tiny_model

N_TOKENS = 700  # past Gemma's window of 512, and no multiple of a page
SHOWN = 97  # every so many positions are compared on the real models: all 700 rows of 262,144 would take 730 MB


@pytest.fixture(scope="module", params=["reference", "fast"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["gemma3", "llama"])
def tiny_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return write_tiny_model(path, request.param, "Q4_K", metadata={"context_length": 1024})


@pytest.fixture(scope="module")
def engine(tiny_path: Path, precision: str) -> Engine:
    return open_engine(tiny_path, precision, threads=2)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return random.Random(11).choices(range(301), k=N_TOKENS)


@pytest.fixture(scope="module")
def want(engine: Engine, ids: list[int]) -> Array:
    return feed(engine, engine.new_sequence(), ids)


def same(got: Array, want: Array) -> bool:
    return np.array_equal(got.view(np.uint32), want.view(np.uint32))


def test_from_run_to_run(engine: Engine, ids: list[int], want: Array) -> None:
    assert same(feed(engine, engine.new_sequence(), ids), want)
    assert not same(feed(engine, engine.new_sequence(), ids[1:]), want[1:]), "the comparison can fail"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(tiny_path: Path, precision: str, threads: int, ids: list[int], want: Array) -> None:
    other = open_engine(tiny_path, precision, threads=threads)
    assert other.threads == threads
    assert same(feed(other, other.new_sequence(), ids), want)


@pytest.mark.parametrize("piece", [1, 7, 64, 512])
def test_fed_in_pieces(engine: Engine, piece: int, ids: list[int], want: Array) -> None:
    assert same(feed(engine, engine.new_sequence(), ids, piece), want)


def test_interleaved_with_other_sequences(engine: Engine, ids: list[int], want: Array) -> None:
    first, second, third = (engine.new_sequence() for _ in range(3))
    feed(engine, second, ids[:100])
    rng = random.Random(2)
    rows, position = [], 0
    while position < 300:
        n = rng.randint(1, 9)
        batch = [(first, position + i, ids[position + i], True) for i in range(n)]
        batch += [(second, len(second) + i, ids[100 + len(second) % 7 + i], False) for i in range(rng.randint(0, 5))]
        batch += [(third, len(third) + i, ids[i], False) for i in range(rng.randint(0, 3))]
        # Each sequence keeps its own order; between them any order will do.
        order = sorted(range(len(batch)), key=lambda _: rng.random())
        queues = {id(s): iter([item for item in batch if item[0] is s]) for s in (first, second, third)}
        mixed = [next(queues[id(batch[i][0])]) for i in order]
        rows.append(engine.forward(mixed))
        position += n
    got = np.concatenate(rows)
    assert same(got, want[: len(got)])


def test_after_truncating(engine: Engine, ids: list[int], want: Array) -> None:
    sequence = engine.new_sequence()
    feed(engine, sequence, ids[:200])
    sequence.snapshot()
    feed(engine, sequence, random.Random(1).choices(ids, k=450))
    for length in (640, 200, 190, 63, 0):
        kept = sequence.truncate(length)
        assert kept <= length
        if length in (200, 0):
            assert kept == length, "snapshots and the start need no recomputation"
        if kept <= 200:
            got = feed(engine, sequence, ids[kept:260], 37)
            assert same(got, want[kept:260])
            sequence.truncate(kept)


def test_in_a_fork_and_its_parent(engine: Engine, ids: list[int], want: Array) -> None:
    parent = engine.new_sequence()
    feed(engine, parent, ids[:130])
    child = parent.fork()
    feed(engine, parent, ids[300:340])  # another continuation
    assert same(feed(engine, child, ids[130:]), want[130:])
    grandchild = child.fork()
    assert len(grandchild) == len(ids)
    del parent, child
    assert grandchild.truncate(690) == 690
    assert same(feed(engine, grandchild, ids[690:]), want[690:])


@pytest.fixture(scope="module")
def gemma(gemma_path: Path, precision: str) -> tuple[Engine, list[int], Array]:
    engine = open_engine(gemma_path, precision, threads=2)
    ids = random.Random(3).choices(range(1000, 200_000), k=560)
    sequence = engine.new_sequence()
    return engine, ids, engine.forward([(sequence, i, token, i % SHOWN == 0) for i, token in enumerate(ids)])


def test_a_real_model_past_its_window(gemma: tuple[Engine, list[int], Array], gemma_path: Path, precision: str) -> None:
    engine, ids, want = gemma
    other = open_engine(gemma_path, precision, threads=3)
    for runner, pieces in ((engine, [1, 7, 64, 488]), (other, [512, 48])):
        sequence, rows = runner.new_sequence(), []
        for piece in pieces:
            first = len(sequence)
            batch = [(sequence, i, ids[i], i % SHOWN == 0) for i in range(first, first + piece)]
            rows.append(runner.forward(batch))
        assert len(sequence) == len(ids)
        assert same(np.concatenate(rows), want)


PROGRAM = """
import sys, numpy as np
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from engines import feed, open_engine
engine = open_engine(Path(sys.argv[2]), sys.argv[3], threads=2)
print(engine.isa)
np.save(sys.argv[4], feed(engine, engine.new_sequence(), [(7 * i) % 301 for i in range(90)]))
"""


def test_every_instruction_set(tiny_path: Path, precision: str, tmp_path: Path) -> None:
    here = Path(__file__).parent
    names, results = [], []
    for isa in ("scalar", ""):  # the slowest that every CPU has, and the default
        out = tmp_path / f"{isa or 'default'}.npy"
        environment = {**os.environ, "LARQL_ISA": isa} if isa else os.environ
        command = [sys.executable, "-c", PROGRAM, str(here), str(tiny_path), precision, str(out)]
        names.append(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
        results.append(np.load(out))
    assert names[0] == "scalar\n"
    assert same(results[0], results[1]), names
