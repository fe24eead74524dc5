"""A Model as a Python program uses it: closing, threads, processes, asyncio, batches, interrupts."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import larql
from larql.errors import InputError

PROMPTS = ["Once upon a time", "The capital of France is", "def fibonacci(n):", "1, 2, 3,", "Water"]


@pytest.fixture(scope="module")
def model(smollm_path: Path) -> larql.Model:
    return larql.load(smollm_path, threads=2)


def resident() -> int:
    """Bytes of this process in memory that belong to no file."""
    fields = Path("/proc/self/status").read_text().split("RssAnon:")[1]
    return int(fields.split()[0]) * 1024


def test_a_closed_model_says_so(smollm_path: Path) -> None:
    with larql.load(smollm_path, threads=1) as model:
        session = model.session()
        session.feed([1, 2, 3])
    model.close()
    for use in (lambda: model.generate("Hi"), lambda: session.feed([4]), lambda: model.logits("Hi")):
        with pytest.raises(InputError, match="the model was closed"):
            use()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_closing_frees_the_weights(smollm_path: Path) -> None:
    model = larql.load(smollm_path, threads=1, cache=False)  # so that they are in this process's own memory
    session = model.session()
    before = resident()
    model.close()
    assert before - resident() > 50e6
    assert len(session) == 0


def test_a_batch_gives_what_each_prompt_gives_alone(model: larql.Model) -> None:
    together = model.generate_batch(PROMPTS, max_tokens=12, logprobs=True)
    alone = [model.generate(prompt, max_tokens=12, logprobs=True) for prompt in PROMPTS]
    for a, b in zip(together, alone, strict=True):
        assert (a.text, a.ids, a.finish_reason, a.logprobs) == (b.text, b.ids, b.finish_reason, b.logprobs)
    assert model.generate_batch([]) == []


def test_members_of_a_batch_end_by_themselves(model: larql.Model) -> None:
    options = {"max_tokens": 30, "temperature": 1.0, "seed": 5, "stop": [" the", "\n"]}
    together = model.generate_batch(PROMPTS, **options)
    alone = [model.generate(prompt, **options) for prompt in PROMPTS]
    assert [(g.text, g.ids, g.finish_reason) for g in together] == [(g.text, g.ids, g.finish_reason) for g in alone]
    assert len({len(g.ids) for g in together}) > 1


def test_threads_share_a_model(model: larql.Model) -> None:
    want = [model.generate(prompt, max_tokens=16).ids for prompt in PROMPTS]
    with ThreadPoolExecutor(5) as pool:
        got = list(pool.map(lambda prompt: model.generate(prompt, max_tokens=16).ids, PROMPTS * 3))
    assert got == want * 3


def test_other_threads_run_meanwhile(model: larql.Model) -> None:
    beats, done = [], threading.Event()

    def beat() -> None:
        while not done.is_set():
            beats.append(time.perf_counter())
            time.sleep(0.01)

    thread = threading.Thread(target=beat)
    thread.start()
    model.session().feed([7] * 600)
    model.generate("Hi", max_tokens=30)
    done.set()
    thread.join()
    # How long a gap may be depends on the machine; that there are beats while forwards run does not.
    assert len(beats) > 10


def test_pieces_come_to_asyncio_while_other_tasks_run(model: larql.Model) -> None:
    async def read(prompt: str) -> str:
        return "".join([piece async for piece in model.stream(prompt, max_tokens=16)])

    async def both() -> list[str]:
        return await asyncio.gather(*map(read, PROMPTS))

    assert asyncio.run(both()) == [model.generate(prompt, max_tokens=16).text for prompt in PROMPTS]


def test_a_cancelled_task_leaves_the_model_usable(model: larql.Model) -> None:
    async def cancelled() -> larql.TextStream:
        stream = model.stream("Once upon a time", max_tokens=2000, session=model.session())
        started = asyncio.Event()

        async def read() -> None:
            async for _ in stream:
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return stream

    assert asyncio.run(cancelled()).finish_reason == "cancelled"
    assert model.generate("Hi", max_tokens=3).ids


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_process_that_is_forked_meanwhile_says_so_at_once(model: larql.Model) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: model.generate([7] * 1000, max_tokens=200))
        while not other.running():
            time.sleep(0.01)
        time.sleep(0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a process with threads forks is what this is about
            child = os.fork()
        if child == 0:
            signal.alarm(30)  # a child that hangs ends with this signal
            try:
                model.generate("Hi", max_tokens=1)
                os._exit(0)
            except InputError as error:
                os._exit(0 if "forked while the model was computing" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert other.result().ids


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_ends(smollm_path: Path) -> None:
    program = (
        "import os, sys, warnings, larql; warnings.simplefilter('ignore');"
        "model = larql.load(sys.argv[1]); model.generate('Hi', max_tokens=1); child = os.fork();"
        "model.generate('Hi', max_tokens=1); sys.exit(0 if child == 0 else os.waitpid(child, 0)[1])"
    )
    subprocess.run([sys.executable, "-c", program, str(smollm_path)], timeout=60, check=True)


def test_a_model_is_not_pickled(model: larql.Model) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(model)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to another thread")
@pytest.mark.parametrize("prompt", [[7] * 1500, [7]], ids=["prefill", "decode"])
def test_an_interrupt_leaves_the_model_usable(model: larql.Model, prompt: list[int]) -> None:
    timer = threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT))
    start = time.perf_counter()

    def work() -> None:
        while True:
            model.generate(prompt, max_tokens=500)

    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert time.perf_counter() - start < 30  # not for ever; how soon depends on the machine
    assert model.generate("Hi", max_tokens=3).ids


def test_nothing_is_printed(smollm_path: Path) -> None:
    program = "import larql, sys; larql.load(sys.argv[1], cache=False).generate('Hi', max_tokens=3)"
    done = subprocess.run(
        [sys.executable, "-c", program, str(smollm_path)], capture_output=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == (b"", b"")


def test_what_is_no_prompt_is_refused(model: larql.Model) -> None:
    for prompt, message in ((5, "not a int"), (b"abc", "bytes are no token ids"), (["a"], "whole numbers")):
        with pytest.raises(InputError, match=message):
            model.generate(prompt)  # type: ignore[arg-type]


def test_numbers_beyond_all_bounds_are_refused(smollm_path: Path) -> None:
    for options in ({"threads": 10**30}, {"context": 10**30}, {"threads": 0}):
        with pytest.raises(InputError, match="it must be from 1"):
            larql.load(smollm_path, **options)  # type: ignore[arg-type]
