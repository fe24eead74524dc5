"""The command line, in this process with a fake model, and as a program with a real one."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import larql.model
from fake_core import FakeEngine, FakeSampler, FakeTokenizer
from larql.cli import app
from larql.errors import LarqlError, ModelError
from tiny_models import write_tiny_model

WORDS = ["<s>", "one", "two", "three", "four", "five", "</s>"]
PROGRAM = [sys.executable, "-c", "from larql.cli import main; main()"]

Run = Callable[..., Any]


@pytest.fixture
def run() -> Run:
    """Runs a command line in this process."""

    def run(*arguments: str, stdin: bytes | None = None) -> Any:
        result = CliRunner().invoke(app, arguments, input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine of the model that every MODEL argument gets; it counts."""
    fake = FakeEngine(lambda ids: ids[-1] + 1, vocab=len(WORDS))
    fake.loaded_with = []

    def load(name: str, **options: Any) -> Any:
        assert options.pop("progress") is True
        fake.loaded_with.append((name, options))
        model = larql.model.Model.__new__(larql.model.Model)
        model.engine = fake
        model.tokenizer = FakeTokenizer(WORDS, end_ids=[6])
        model.config = SimpleNamespace(vocab_size=len(WORDS))
        model.load_s = 0.5
        return model

    monkeypatch.setattr(larql.model, "load", load)
    monkeypatch.setattr(larql.model, "Sampler", FakeSampler)
    return fake


def test_text_goes_to_stdout_and_nothing_else(run: Run, engine: FakeEngine) -> None:
    result = run("generate", "m", "one")
    assert result.exit_code == 0
    assert result.stdout == "twothreefourfive\n"
    assert result.stderr == ""
    assert engine.loaded_with == [("m", {"threads": None, "context": None, "precision": "fast", "cache": True})]


def test_options_arrive(run: Run, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    samplers: list[FakeSampler] = []

    def make_sampler(**options: Any) -> FakeSampler:
        samplers.append(FakeSampler(**options))
        return samplers[-1]

    monkeypatch.setattr(larql.model, "Sampler", make_sampler)
    result = run(
        *("generate", "m", "one", "-n", "3", "--threads", "2", "--ctx", "64", "--precision", "reference", "--no-cache"),
        *("--temperature", "0.5", "--top-k", "9", "--top-p", "0.8", "--min-p", "0.1", "--repeat-penalty", "1.1"),
        *("--seed", "7", "--stop", "nine", "--stop", "four"),
    )
    assert result.stdout == "twothree\n"
    assert engine.loaded_with == [("m", {"threads": 2, "context": 64, "precision": "reference", "cache": False})]
    assert samplers[0].options == {
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "seed": 7,
        "logprobs": False,
    }
    assert samplers[0].observed == [0, 1]


def test_json(run: Run, engine: FakeEngine) -> None:
    data = json.loads(run("generate", "m", "two", "-n", "2", "--json").stdout)
    timings = data.pop("timings")
    assert data == {
        "prompt_ids": [0, 2],
        "ids": [3, 4],
        "text": "threefour",
        "finish_reason": "length",
        "threads": engine.threads,
        "isa": engine.isa,
    }
    assert list(timings) == ["load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"]
    assert timings["load_s"] == 0.5
    assert timings["decode_tok_s"] > 0


def test_logprobs(run: Run, engine: FakeEngine) -> None:
    assert json.loads(run("generate", "m", "four", "--json", "--logprobs").stdout)["logprobs"] == [-0.5]
    result = run("generate", "m", "four", "--logprobs")
    assert result.exit_code == 2
    assert "--logprobs needs --json" in result.stderr
    assert engine.sizes


def test_verbose(run: Run, engine: FakeEngine) -> None:
    result = run("generate", "m", "one", "-n", "2", "-v")
    assert result.stdout == "twothree\n"
    assert "2 prompt tokens at" in result.stderr
    assert f"3 threads, {engine.isa}, fast" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("text", [b"one two", b"one two\n", b"one two\r\n"])
def test_a_prompt_from_stdin_or_a_file(run: Run, engine: FakeEngine, tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(text)
    for result in (
        run("generate", "m", "-", stdin=text),
        run("generate", "m", stdin=text),
        run("generate", "m", "--file", str(path)),
    ):
        assert result.stdout == "threefourfive\n"
    assert len(engine.loaded_with) == 3


def test_a_prompt_that_is_no_text(run: Run, engine: FakeEngine) -> None:
    result = run("generate", "m", "-", stdin=b"caf\xe9")
    assert (result.exit_code, result.stderr) == (2, "larql: stdin is not UTF-8 text (byte 3)\n")
    assert not engine.loaded_with


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "m"], "larql: there is no prompt; give PROMPT or --file, or write it to stdin"),
        (["generate", "m", "one", "--file", __file__], "give either PROMPT or --file"),
        (["generate", "m", "--file", "no/such/file"], "does not exist"),
        (["generate", "m", "one", "-n", "0"], "larql: max_tokens is 0; it must be an integer of at least 1"),
        (["generate", "m", "one", "-n", "many"], "valid integer"),
        (["generate"], "larql: missing argument 'MODEL'; see larql generate --help"),
        (["generate", "m", "--nonsense"], "larql: no such option: --nonsense"),
        (["--nonsense"], "larql: no such option: --nonsense"),
        (["generate", "m", "one", "--top-p", "2"], "larql: top_p is 2.0; it must be a number above 0 and up to 1"),
        (["generate", "m", "one", "--stop", ""], "larql: stop is "),
        (["generate", "m", "one", "--precision", "f64"], "'f64'"),
        (["generate", "m", "one", "--system", "x"], "--system needs --chat"),
        (["nonsense"], "larql: no such command 'nonsense'; see larql --help"),
    ],
)
def test_usage_errors(run: Run, engine: FakeEngine, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("larql: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert not engine.loaded_with


def test_a_prompt_that_is_too_long(run: Run, engine: FakeEngine) -> None:
    engine.context = 3
    result = run("generate", "m", "one two three")
    assert result.exit_code == 2
    assert result.stderr == "larql: the prompt and one token to generate need 5 tokens; the context holds 3\n"


@pytest.mark.parametrize("error", [ModelError("the file is broken"), LarqlError("a worker failed")])
def test_other_errors_are_one_line(run: Run, engine: FakeEngine, error: LarqlError) -> None:
    engine.fail[0] = error
    result = run("generate", "m", "one", "--json")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"larql: {error}\n")


def test_an_interrupt_ends_the_line(run: Run, engine: FakeEngine) -> None:
    engine.fail[2] = KeyboardInterrupt()
    result = run("generate", "m", "one")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "twothree\n", "larql: interrupted\n")


def test_a_bug_is_not_hidden(engine: FakeEngine) -> None:
    engine.fail[0] = ZeroDivisionError()
    assert isinstance(CliRunner().invoke(app, ["generate", "m", "one"]).exception, ZeroDivisionError)


def test_no_such_model(run: Run) -> None:
    for command in (["generate", "gemma3", "hi"], ["inspect", "gemma3"], ["tokenize", "gemma3", "hi"]):
        result = run(*command)
        assert result.exit_code == 1
        assert result.stderr.startswith("larql: there is no model")


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"larql {larql.__version__}\n"


@pytest.mark.parametrize("command", [[], ["generate"], ["inspect"], ["tokenize"], ["convert"], ["verify"]])
def test_help(run: Run, command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage:")


def test_no_command_is_answered_with_the_help(run: Run) -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == run("--help").stdout


def test_the_command_line_starts_without_numpy() -> None:
    check = "import sys, larql.cli; sys.exit('numpy' in sys.modules or 'larql._core' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


# Real files


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", "gemma3", "Q8_0", vocab_size=301)


def test_inspect(run: Run, tiny_path: Path) -> None:
    facts = json.loads(run("inspect", str(tiny_path), "--json").stdout)
    assert facts["architecture"] == "gemma3"
    assert (facts["layers"], facts["windowed_layers"], facts["window"]) == (7, 6, 8)
    assert facts["vocab_size"] == 301
    assert facts["threads"] >= 1
    assert {entry["type"] for entry in facts["tensors"]} == {"Q8_0", "F32"}
    q8 = next(entry for entry in facts["tensors"] if entry["type"] == "Q8_0")
    assert q8["count"] == 1 + 7 * 7
    assert facts["tokenizer"]["vocab_size"] == 301

    table = run("inspect", str(tiny_path)).stdout
    assert "7, 6 of them see 8 tokens" in table
    assert "Q8_0" in table
    assert facts["isa"] in table


def test_tokenize(run: Run, tiny_path: Path) -> None:
    data = json.loads(run("tokenize", str(tiny_path), "a <bos>", "--json").stdout)
    plain = json.loads(run("tokenize", str(tiny_path), "a <bos>", "--json", "--no-bos", "--no-special").stdout)
    bos = data["ids"][0]
    assert (data["pieces"][0], data["pieces"][-1], data["ids"][-1]) == ("<bos>", "<bos>", bos)
    assert bos not in plain["ids"]
    assert "".join(plain["pieces"]).startswith("a")

    lines = run("tokenize", str(tiny_path), "-", stdin=b"a\n").stdout.splitlines()
    assert lines[0].split() == [str(bos), '"<bos>"']
    assert len(lines) == 2


def test_a_file_that_is_no_model(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(np.arange(100).tobytes())
    result = run("inspect", str(path))
    assert result.exit_code == 1
    assert result.stderr.startswith("larql: ")
    assert result.stderr.count("\n") == 1


def test_gemma_as_a_program(gemma_path: Path) -> None:
    command = [*PROGRAM, "generate", str(gemma_path), "The capital of France is", "-n", "8", "--temperature", "0"]
    text = subprocess.run(command, check=True, capture_output=True)
    data = json.loads(subprocess.run([*command, "--json"], check=True, capture_output=True).stdout)
    assert data["prompt_ids"] == [2, 818, 5279, 529, 7001, 563]
    assert text.stdout.decode() == data["text"] + "\n"
    assert text.stderr == b""
    assert len(data["ids"]) == 8
    assert data["finish_reason"] == "length"


@pytest.mark.skipif(sys.platform == "win32", reason="signals and pipes of POSIX")
def test_an_interrupted_program(gemma_path: Path) -> None:
    command = [*PROGRAM, "generate", str(gemma_path), "Once upon a time", "-n", "10000", "--temperature", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(5)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert time.monotonic() - start < 5
        assert process.stderr.read() == b"larql: interrupted\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals and pipes of POSIX")
def test_a_reader_that_leaves(gemma_path: Path) -> None:
    command = [*PROGRAM, "generate", str(gemma_path), "Once upon a time", "-n", "10000", "--temperature", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        process.wait(timeout=20)
        assert process.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_output_that_cannot_be_written_is_one_line(tiny_path: Path) -> None:
    command = [*PROGRAM, "tokenize", str(tiny_path), "hi"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.stderr == "larql: cannot write the output: No space left on device\n"
    assert result.returncode == 1
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False
    )
    assert closed.stderr == "larql: standard output is closed\n"
    assert closed.returncode == 1
