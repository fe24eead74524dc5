"""The engine's edges: batches that make no sense, interruptions, threads, processes, tensors that do not fit."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import gguf
import numpy as np
import pytest

from engines import feed, logits_at, open_engine
from larql._core import Engine, Matrix, Sampler, dequantize
from larql.errors import ContextError, InputError, ModelError
from larql.families import read_model
from larql.gguf_file import GgufFile
from tiny_models import WEIGHT_TYPES, random_blocks, write_tiny_model

IDS = [(5 * i) % 301 for i in range(30)]


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return write_tiny_model(path, "gemma3", "Q8_0", metadata={"context_length": 64})


@pytest.fixture(scope="module")
def engine(tiny_path: Path) -> Engine:
    return open_engine(tiny_path, "fast", threads=2)


def test_batches_that_make_no_sense_change_nothing(engine: Engine, tiny_path: Path) -> None:
    sequence, fresh = engine.new_sequence(), engine.new_sequence()
    want = feed(engine, sequence, IDS)
    stranger = open_engine(tiny_path, "fast").new_sequence()
    cases: list[tuple[list[Any], str]] = [
        ([], "the batch is empty"),
        ([(sequence, 31, 1, True)], "position 31 does not continue a sequence of 30 tokens"),
        ([(sequence, 29, 1, True)], "position 29 does not continue a sequence of 30 tokens"),
        ([(sequence, 30, 1, True), (sequence, 30, 2, True)], "position 30 does not continue a sequence of 31"),
        ([(sequence, 30, 301, True)], "token id 301 is out of range; the vocabulary has 301"),
        ([(fresh, 0, 1, True), (stranger, 0, 1, True)], "belongs to another model"),
    ]
    for batch, message in cases:
        with pytest.raises(InputError, match=message):
            engine.forward(batch)
    with pytest.raises(ContextError, match="the context holds 64 tokens, and 65 are needed") as error:
        engine.forward([(sequence, 30 + i, 1, False) for i in range(35)])
    assert (error.value.needed, error.value.limit) == (65, 64)
    with pytest.raises(InputError, match="1 samplers for 2 rows"):
        engine.forward_sample([(sequence, 30, 1, True), (sequence, 31, 1, True)], [Sampler()])
    with pytest.raises(InputError, match="cannot truncate a sequence of 30 tokens to 31"):
        sequence.truncate(31)
    assert (len(sequence), len(fresh), len(stranger)) == (30, 0, 0)
    again = engine.new_sequence()
    feed(engine, again, IDS[:-1])
    assert np.array_equal(feed(engine, again, IDS[-1:]), want[-1:])


def test_a_sampler_that_fails_undoes_the_forward(engine: Engine) -> None:
    sequence = engine.new_sequence()
    banned = Sampler(bias={token: float("-inf") for token in range(301)})
    with pytest.raises(InputError):
        engine.forward_sample([(sequence, 0, 1, True)], [banned])
    assert len(sequence) == 0
    best = engine.forward_sample([(sequence, 0, 1, True)], [Sampler()])
    other = engine.new_sequence()
    assert best == [int(engine.forward([(other, 0, 1, True)])[0].argmax())]


def test_logits_come_for_the_rows_that_want_them(engine: Engine) -> None:
    want = feed(engine, engine.new_sequence(), IDS)
    assert np.array_equal(logits_at(engine, IDS, [3, 4, 29]), want[[3, 4, 29]])
    assert logits_at(engine, IDS, []).shape == (0, 301)


def test_options_out_of_range(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        ({"threads": 0}, "threads is 0; it must be from 1 to 1024"),
        ({"context": 65}, "context is 65; this model holds from 1 to 64 tokens"),
        ({"precision": "exact"}, 'precision is "exact"; it must be fast or reference'),
    ):
        with pytest.raises(InputError, match=message):
            open_engine(tiny_path, **{"precision": "fast", **options})
    monkeypatch.setenv("LARQL_NUM_THREADS", "many")
    with pytest.raises(InputError, match='LARQL_NUM_THREADS is "many"; it must be a whole number'):
        open_engine(tiny_path, "fast")
    monkeypatch.setenv("LARQL_NUM_THREADS", "")
    assert open_engine(tiny_path, "fast").threads >= 1
    monkeypatch.setenv("LARQL_NUM_THREADS", "3")
    assert open_engine(tiny_path, "fast").threads == 3
    assert open_engine(tiny_path, "fast", threads=1).threads == 1
    monkeypatch.setenv("LARQL_ISA", "mmx")
    with pytest.raises(InputError, match=r'LARQL_ISA is "mmx"; this CPU can run: scalar'):
        open_engine(tiny_path, "fast")


def test_tensors_that_do_not_fit(tiny_path: Path) -> None:
    file = GgufFile(tiny_path)
    config, names = read_model(file)
    wrong_shape = r"tensor token_embd\.weight \(embed_tokens\) has shape .* is expected"
    with pytest.raises(ModelError, match=wrong_shape):
        Engine((file.gguf, names), replace(config, vocab_size=300).to_json())
    with pytest.raises(ModelError, match="the model has no tensor for norm"):
        Engine((file.gguf, {k: v for k, v in names.items() if k != "norm"}), config.to_json())
    with pytest.raises(ModelError, match=r"the file has no tensor output_norm\.wait \(norm\)"):
        Engine((file.gguf, {**names, "norm": "output_norm.wait"}), config.to_json())
    with pytest.raises(ModelError, match=r"tensor token_embd\.weight \(lm_head\) is not part of this model"):
        Engine((file.gguf, {**names, "lm_head": "token_embd.weight"}), config.to_json())
    with pytest.raises(ModelError, match="model config: head_dim is 0"):
        Engine((file.gguf, names), replace(config, head_dim=0).to_json())


class StopNow(Exception):
    """What the signal handler of the next test raises."""


def test_a_signal_stops_a_forward_and_leaves_the_sequence(smollm_path: Path) -> None:
    engine = open_engine(smollm_path, "reference", threads=1)
    sequence = engine.new_sequence()
    feed(engine, sequence, IDS)

    def stop(_signum: int, _frame: FrameType | None) -> None:
        raise StopNow

    def run_until_stopped() -> None:
        while True:  # each forward takes seconds
            engine.forward([(sequence, 30 + i, 7, False) for i in range(1500)])
            sequence.truncate(30)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(StopNow):
            run_until_stopped()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(sequence) == 30
    other = engine.new_sequence()
    assert np.array_equal(feed(engine, sequence, [9]), feed(engine, other, [*IDS, 9])[-1:])


def test_threads_share_an_engine(engine: Engine) -> None:
    want = feed(engine, engine.new_sequence(), IDS)
    shared = engine.new_sequence()
    feed(engine, shared, IDS)

    def work(piece: int) -> bool:
        fork = shared.fork()
        fork.truncate(10)
        again = feed(engine, fork, IDS[10:], piece)
        return np.array_equal(feed(engine, engine.new_sequence(), IDS, piece), want) and np.array_equal(
            again, want[10:]
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, [1, 2, 3, 5, 7, 11, 30, 4]))


def test_a_heartbeat_goes_on_during_a_forward(smollm_path: Path) -> None:
    engine = open_engine(smollm_path, "reference", threads=1)
    beats, done = 0, threading.Event()

    def beat() -> None:
        nonlocal beats
        while not done.wait(0.001):
            beats += 1

    thread = threading.Thread(target=beat)
    thread.start()
    feed(engine, engine.new_sequence(), IDS[:8])
    done.set()
    thread.join()
    assert beats > 0, "the GIL is released"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_can_use_the_engine(engine: Engine) -> None:
    sequence = engine.new_sequence()
    want = feed(engine, sequence, IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks with threads
        child = os.fork()
    if child == 0:
        same = np.array_equal(feed(engine, engine.new_sequence(), IDS), want)
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(feed(engine, engine.new_sequence(), IDS), want)


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_products_are_near_numpy(weight_type: str) -> None:
    rng = np.random.default_rng(4)
    kind = gguf.GGMLQuantizationType[weight_type]
    if weight_type in ("F32", "F16", "BF16"):
        blocks = gguf.quants.quantize(rng.standard_normal((37, 512), dtype=np.float32), kind)
        blocks = np.ascontiguousarray(blocks).view(np.uint8).reshape(37, -1)
    else:
        blocks = random_blocks(rng, kind, 37, 512, 0.1)
    weights = gguf.quants.dequantize(blocks, kind).reshape(37, 512)
    assert np.array_equal(dequantize(weight_type, blocks.reshape(-1)).reshape(37, 512), weights)
    x = rng.standard_normal((3, 512), dtype=np.float32)
    want = x @ weights.T
    for precision, limit in (("reference", 1e-6), ("fast", 0.01)):
        matrix = Matrix(weight_type, blocks, 512, precision=precision, threads=2)
        assert matrix.n_bytes == 48 * blocks.shape[1]
        got = matrix.multiply(x)
        assert np.linalg.norm(got - want) < limit * np.linalg.norm(want)
        assert np.array_equal(matrix.multiply(x[1]), got[1])


def test_matrices_refuse_what_does_not_fit() -> None:
    with pytest.raises(InputError, match=r"66 bytes cannot hold \[1, 64\] weights of type Q8_0"):
        Matrix("Q8_0", np.zeros((1, 66), np.uint8), 64)
    with pytest.raises(InputError, match="weight type Q9_0 is not supported; supported are F32 F16"):
        Matrix("Q9_0", np.zeros((1, 66), np.uint8), 64)
    with pytest.raises(InputError, match=r"x has shape \[1, 1, 64\]; it must be \[64\] or \[n, 64\]"):
        Matrix("Q8_0", np.zeros((1, 68), np.uint8), 64).multiply(np.zeros((1, 1, 64), np.float32))
