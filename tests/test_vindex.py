"""The .vindex: it holds what the GGUF file does, is written whole or not at all, and says so when it is broken."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import larql
from engines import feed
from larql import cache, convert, progress, source
from larql.cli import app
from larql.errors import ModelError
from larql.gguf_file import GgufFile
from larql.model import Model
from larql.model_file import make_engine
from larql.source import open_model
from larql.verify import verify
from larql.vindex import VERSION, VindexFolder
from tiny_models import FAMILIES, write_tiny_model

IDS = random.Random(7).choices(range(301), k=30)
TEXT = "It is the tenth inning, <end_of_turn> caf\u00e9"
ODD_NAME = "model \u00fc \u6a21\u578b.vindex"
FILES = ["index.json", "weights.bin", "tokenizer.json", "chat_template.jinja", "generation.json"]

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")


pytestmark = pytest.mark.usefixtures("cache_path")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rich_model(tmp_path_factory.mktemp("source") / "tiny.gguf")


@pytest.fixture
def vindex(gguf: Path, tmp_path: Path) -> Path:
    path = tmp_path / ODD_NAME
    convert.convert(GgufFile(gguf), path)
    return path


def write_rich_model(path: Path, **options: Any) -> Path:
    """A model with everything that a .vindex can take over."""
    extra = {
        "general.name": "Tiny",
        "tokenizer.chat_template": "{{ messages }} \u00fc\r\n",
        "general.sampling.temp": 1.5,
        "general.sampling.top_k": 64,
        "general.sampling.mirostat": 1,
    }
    return write_tiny_model(path, "gemma3", "Q8_0", **options, other_metadata=extra)


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def start(program: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("this was to be spared")


# What is written


@pytest.mark.parametrize("weight_type", ["Q4_1", "Q8_0", "Q4_K", "Q6_K", "BF16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_gguf_file(family: str, weight_type: str, tmp_path: Path) -> None:
    gguf = write_tiny_model(
        tmp_path / "tiny.gguf", family, weight_type, tied=family != "llama", rope_freqs=family == "llama"
    )
    file, path = GgufFile(gguf), tmp_path / "tiny.vindex"
    convert.convert(file, path)
    folder = VindexFolder(path)
    assert (folder.config, folder.architecture, folder.sha256) == (file.config, file.architecture, file.sha256)
    for precision in ("fast", "reference"):
        packed, expected = (make_engine(model, precision=precision) for model in (folder, file))
        got = feed(packed, packed.new_sequence(), IDS)
        np.testing.assert_array_equal(got, feed(expected, expected.new_sequence(), IDS))
    assert folder.tokenizer.facts == file.tokenizer.facts
    assert folder.tokenizer.encode(TEXT) == file.tokenizer.encode(TEXT)
    verify(folder, gguf)


def test_the_example_in_rust_reads_the_same_version() -> None:
    example = Path(__file__).parents[1] / "examples" / "ids.rs"
    assert f"const VERSION: u32 = {VERSION};\n" in example.read_text("utf-8")


def test_what_there_is(vindex: Path, gguf: Path) -> None:
    assert names_in(vindex) == set(FILES)
    assert names_in(vindex.parent) == {vindex.name, "cache"}
    index = json.loads((vindex / "index.json").read_text("utf-8"))
    assert (index["format"], index["version"], index["name"]) == ("larql-vindex", VERSION, "Tiny")
    assert index["source"]["name"] == gguf.name
    assert index["source"]["sha256"] == hashlib.sha256(gguf.read_bytes()).hexdigest()
    assert set(index["files"]) == set(FILES) - {"index.json"}
    assert (vindex / "chat_template.jinja").read_bytes().decode() == "{{ messages }} \u00fc\r\n"
    assert json.loads((vindex / "generation.json").read_text("utf-8")) == {"temperature": 1.5, "top_k": 64}


def test_gemma(gemma_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the cache of this test run, where it may be already
    prompt = "The capital of France is"
    packed, in_memory = larql.load(gemma_path), larql.load(gemma_path, cache=False)
    np.testing.assert_array_equal(packed.logits(prompt), in_memory.logits(prompt))
    assert packed.generate(prompt, max_tokens=8).ids == in_memory.generate(prompt, max_tokens=8).ids


def test_progress(gguf: Path) -> None:
    seen: list[tuple[int, int]] = []
    larql.load(gguf, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 100_000


def test_a_source_that_cannot_run_leaves_nothing(tmp_path: Path, cache_path: Path) -> None:
    gguf = write_tiny_model(tmp_path / "tiny.gguf", "qwen2", "Q8_0", metadata={"attention.head_count_kv": 1})
    with pytest.raises(ModelError, match=r"tensor layers\.0\.self_attn\.k_proj has shape"):
        convert.convert(GgufFile(gguf), tmp_path / "x.vindex")
    with pytest.raises(ModelError, match=r"tensor layers\.0\.self_attn\.k_proj has shape"):
        larql.load(gguf)
    assert names_in(tmp_path) == {"tiny.gguf", "cache"}
    assert names_in(cache_path / "vindex") == set()


# Whole or not at all

CONVERT = """
import os, signal, sys
from pathlib import Path
from larql.convert import convert
from larql.gguf_file import GgufFile
def progress(done, total):
    print("at work", flush=True)
    if sys.argv[3] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
convert(GgufFile(Path(sys.argv[1])), Path(sys.argv[2]), progress)
"""


@posix
def test_a_process_that_is_killed(gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / ODD_NAME
    with start(CONVERT, gguf, target, "die") as process:
        assert process.wait() == -signal.SIGKILL
    assert names_in(tmp_path) == {f".{ODD_NAME}.lock", f".{ODD_NAME}.partial"}
    for path in tmp_path.iterdir():
        assert run("verify", path).exit_code == 1
    assert run("convert", gguf, target).exit_code == 0
    assert names_in(tmp_path) == {"cache", ODD_NAME}
    verify(VindexFolder(target), gguf)


@posix
def test_a_process_that_is_killed_at_the_very_end(gguf: Path, tmp_path: Path) -> None:
    program = "import larql.files, os; larql.files._sync = lambda _: os.kill(os.getpid(), 9)\n" + CONVERT
    with start(program.replace("    signal.pause()\n", ""), gguf, tmp_path / "x.vindex", "live") as process:
        assert process.wait() == -signal.SIGKILL
    (left,) = tmp_path.glob(".*.partial")
    assert "index.json" in names_in(left)
    result = run("generate", left, "one")
    assert result.exit_code == 1
    assert "did not come to its end" in result.stderr


@posix
def test_who_waits_goes_on_when_the_other_is_killed(gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.vindex"
    with start(CONVERT, gguf, target, "wait") as process, ThreadPoolExecutor() as pool:
        assert process.stdout is not None
        process.stdout.readline()
        done = pool.submit(convert.convert, GgufFile(gguf), target)
        time.sleep(0.2)
        assert not done.done()
        process.kill()
        done.result(timeout=60)
    verify(VindexFolder(target), gguf)
    assert names_in(tmp_path) == {"cache", "x.vindex"}


@posix
def test_an_interrupt(gguf: Path, tmp_path: Path) -> None:
    program = """
import time
from larql.cli import main
from larql.progress import ProgressBar
ProgressBar.__call__ = lambda *_: (print(flush=True), time.sleep(60))
main()
"""
    with start(program, "convert", gguf, tmp_path / "x.vindex") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    assert names_in(tmp_path) == set()


@posix
@pytest.mark.parametrize("limit", [1000, 200_000, 1_000_000])
def test_a_file_that_may_not_grow(gguf: Path, tmp_path: Path, cache_path: Path, limit: int) -> None:
    program = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from larql.cli import main
main()
"""
    for command in (["convert", gguf, tmp_path / "x.vindex"], ["generate", gguf, "one"]):
        with start(program, *command) as process:
            assert process.wait() == 1
            assert process.stderr is not None
            message = process.stderr.read().decode()
        assert message.startswith("larql: ")
        assert message.count("\n") == 1
        assert "File too large" in message
    assert names_in(tmp_path) == {"cache"}
    assert names_in(cache_path / "vindex") == set()


def test_a_folder_that_is_not_there(gguf: Path, tmp_path: Path) -> None:
    result = run("convert", gguf, tmp_path / "no" / "x.vindex")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"larql: cannot write {tmp_path / 'no' / 'x.vindex'}: ")


@pytest.mark.parametrize("name", [".", "file", "folder", "other.vindex"])
def test_what_is_there_stays(gguf: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("folder").mkdir()
    other = write_rich_model(tmp_path / "other.gguf", seed=9)
    convert.convert(GgufFile(other), Path("other.vindex"))
    monkeypatch.setattr(convert, "write_weights", refuse)
    result = run("convert", gguf, name)
    assert (result.exit_code, result.stderr) == (2, f"larql: {name} exists; remove it, or choose another name\n")
    assert names_in(tmp_path) == {"file", "folder", "other.vindex", "other.gguf", "cache"}
    assert Path("file").read_text() == "mine"


def test_the_same_again_is_no_error(gguf: Path, vindex: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "write_weights", refuse)
    result = run("convert", gguf, vindex)
    assert (result.exit_code, result.stdout) == (0, "")
    assert (
        result.stderr
        == f"larql: {vindex} is there already, made from the same file; `larql verify` checks its content\n"
    )


def test_a_vindex_is_not_converted(vindex: Path, tmp_path: Path) -> None:
    result = run("convert", vindex, tmp_path / "again.vindex")
    assert (result.exit_code, result.stderr) == (
        2,
        f"larql: {vindex} is a .vindex; this needs the .gguf file that it was made from\n",
    )


# The cache


def test_a_gguf_file_is_converted_once(gguf: Path, cache_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_model(gguf)
    assert isinstance(first, VindexFolder)
    assert (first.path, first.gguf_path) == (gguf, gguf)
    assert first.folder == cache_path / "vindex" / f"{first.sha256[:32]}-v{VERSION}.vindex"
    monkeypatch.setattr(source, "convert", refuse)
    monkeypatch.setattr(cache, "hash_file", refuse)
    again = open_model(gguf)
    assert isinstance(again, VindexFolder)
    assert again.folder == first.folder
    for command in (["generate", gguf, "one"], ["inspect", gguf], ["tokenize", gguf, "one"], ["verify", gguf]):
        assert run(*command).exit_code == 0
    assert names_in(cache_path) == {"vindex", "checksums"}
    assert len(names_in(cache_path / "vindex")) == 1


def test_a_copy_uses_the_same_entry(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_model(gguf)
    monkeypatch.setattr(source, "convert", refuse)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(gguf.read_bytes())
    assert open_model(copy).path == copy


def test_a_file_that_changed_is_converted_again(tmp_path: Path, cache_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    logits = []
    for seed in (1, 2):
        write_tiny_model(path, "llama", "Q8_0", seed=seed)
        logits.append(larql.load(path).logits([1, 2]))
    assert not np.array_equal(*logits)
    assert len(names_in(cache_path / "vindex")) == 2


def test_without_the_cache(gguf: Path, cache_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "convert", refuse)
    assert isinstance(open_model(gguf, cache=False), GgufFile)
    for command in (["generate", gguf, "one"], ["inspect", gguf], ["tokenize", gguf, "one"]):
        assert run(*command, "--no-cache").exit_code == 0
    assert not (cache_path / "vindex").exists()


def test_a_cache_that_cannot_be_written(gguf: Path, cache_path: Path) -> None:
    cache_path.write_text("a file, not a folder")
    result = run("generate", gguf, "one")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"larql: {gguf} cannot be converted into the cache {cache_path / 'vindex'}: ")
    assert "LARQL_CACHE" in result.stderr
    assert "--no-cache" in result.stderr
    assert run("generate", gguf, "one", "--no-cache").exit_code == 0


def test_a_broken_entry_says_where_it_is(gguf: Path) -> None:
    entry = open_model(gguf)
    assert isinstance(entry, VindexFolder)
    (entry.folder / "weights.bin").write_bytes(b"")
    with pytest.raises(
        ModelError,
        match=r"has 0 bytes.*; remove the folder and convert the model again \(it is in the cache: remove .*\)$",
    ):
        open_model(gguf)


def test_threads_convert_once(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    write = convert.write_weights

    def slow_write(*arguments: Any) -> str:
        calls.append(1)
        time.sleep(0.1)
        return write(*arguments)

    monkeypatch.setattr(convert, "write_weights", slow_write)
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(open_model, [gguf] * 4))
    assert len(calls) == 1
    assert len({file.sha256 for file in opened}) == 1


def test_processes_convert_once(gguf: Path, cache_path: Path) -> None:
    program = """
import sys, time
import larql, larql.convert
write = larql.convert.write_weights
def slow_write(*arguments):
    print("converting")
    time.sleep(0.5)
    return write(*arguments)
larql.convert.write_weights = slow_write
print(larql.load(sys.argv[1]).generate([2, 5], max_tokens=3).ids)
"""
    processes = [start(program, gguf) for _ in range(3)]
    outputs = [process.communicate()[0].decode().split("\n") for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum(lines.count("converting") for lines in outputs) == 1
    assert len({lines[-2] for lines in outputs}) == 1
    assert len(names_in(cache_path / "vindex")) == 1


# Verifying


def test_verify(vindex: Path, gguf: Path) -> None:
    result = run("verify", vindex)
    assert result.exit_code == 0
    assert "weights.bin" in result.stdout
    assert "not compared; --source" in result.stdout
    assert f"the same weights as {gguf}" in run("verify", vindex, "--source", gguf).stdout
    facts = json.loads(run("verify", gguf, "--json").stdout)
    assert facts["compared_with"] == str(gguf)
    assert {file["name"] for file in facts["files"]} == set(FILES) - {"index.json"}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_a_flipped_bit_is_found(vindex: Path, name: str, at: float) -> None:
    data = bytearray((vindex / name).read_bytes())
    data[int(at * (len(data) - 2))] ^= 1
    (vindex / name).write_bytes(data)
    result = run("verify", vindex)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"larql: {vindex / name}: ")
    assert result.stderr.endswith("convert the model again\n")


def test_another_source_is_found(vindex: Path, tmp_path: Path) -> None:
    other = write_rich_model(tmp_path / "other.gguf", seed=9)
    result = run("verify", vindex, "--source", other)
    assert result.exit_code == 1
    assert f"was not made from {other}" in result.stderr


def test_weights_that_are_not_the_sources_are_found(vindex: Path, gguf: Path) -> None:
    weights = vindex / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    change(vindex, lambda index: index["files"]["weights.bin"].update(sha256=hashlib.sha256(data).hexdigest()))
    verify(VindexFolder(vindex))
    with pytest.raises(ModelError, match="is not what the source has as"):
        verify(VindexFolder(vindex), gguf)
    change(vindex, lambda index: index["config"].update(norm_eps=1e-5))
    with pytest.raises(ModelError, match="in another way"):
        verify(VindexFolder(vindex), gguf)


# Broken ones


def change(vindex: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edits the index and makes it look untouched."""
    path = vindex / "index.json"
    index = json.loads(path.read_text("utf-8"))
    del index["sha256"]
    edit(index)
    index["sha256"] = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(index), "utf-8")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value of an index; of lists, to the first and last items."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        for i in {0, len(value) - 1}:
            yield from places(value[i], (*path, i))


JUNK = [None, True, -1, 0, 2**70, 10**400, 1.5, 1e300, float("nan"), "x", "", "\ud800", [], {}, [[0]], {"a": 1}]


def test_every_key_of_the_index(vindex: Path) -> None:
    original = (vindex / "index.json").read_bytes()
    index = json.loads(original)
    del index["sha256"]
    n_refused = 0

    def attempt(path: tuple[Any, ...], edit: Callable[[Any], object]) -> bool:
        def edit_there(index: Any) -> None:
            for key in path[:-1]:
                index = index[key]
            edit(index)

        (vindex / "index.json").write_bytes(original)
        change(vindex, edit_there)
        try:
            Model(VindexFolder(vindex), threads=1, context=8)
        except ModelError:
            return False
        return True

    for path in places(index):
        key = path[-1]
        if path[:1] != ("tokenizer",) or path[1:2] != ("end_ids",):  # which may be fewer
            is_file = path in {("files", "chat_template.jinja"), ("files", "generation.json")}
            assert attempt(path, lambda there, key=key: there.pop(key)) == is_file, path
        for junk in JUNK:
            n_refused += not attempt(path, lambda there, key=key, junk=junk: there.__setitem__(key, junk))
    assert n_refused > 500
    assert not attempt(("x",), lambda there: there.update(x=1))
    assert not attempt(("config", "x"), lambda there: there.update(x=1))
    assert not attempt(("files", "x"), lambda there: there.update({"../x": there["weights.bin"]}))


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b'"larql-vindex"', b"\xff\xfe", b"[" * 100_000, b'{"format": "larql-vindex"}', b"{}"],
)
def test_an_index_that_is_none(vindex: Path, text: bytes) -> None:
    (vindex / "index.json").write_bytes(text)
    with pytest.raises(ModelError, match=r"index\.json: "):
        open_model(vindex)


def test_an_index_that_is_nested_deeply(vindex: Path) -> None:
    for depth in range(100, 20_000, 500):
        (vindex / "index.json").write_text(
            f'{{"format": "larql-vindex", "version": {VERSION}, "x": ' + "[" * depth + "]" * depth + "}"
        )
        with pytest.raises(ModelError):
            open_model(vindex)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda index: index.update(version=99), f"is of version 99, and this LARQL reads version {VERSION}; remove"),
        (lambda index: index.update(format="zip"), 'does not have "format": "larql-vindex"'),
        (lambda index: index["config"].update(n_heads=0), "n_heads is 0"),
        (lambda index: index["config"].update(activation="relu"), "config.activation is 'relu', which it cannot be"),
        (lambda index: index["config"]["layers"].pop(), "is not part of this model"),
        (lambda index: index["tokenizer"].update(bos_id=301), "a token id is not in the vocabulary"),
        (lambda index: index["tokenizer"].update(vocab_size=300), "has 301 tokens where 300 are expected"),
        (lambda index: index["config"].update(vocab_size=300), "301 tokens, but the embedding has 300"),
        (lambda index: index["tensors"][3].update(offset=2**40), "ends past the file's"),
        (lambda index: index["tensors"][3].update(offset=1), "makes no sense"),
        (lambda index: index["tensors"].pop(), "the file has no tensor"),
    ],
)
def test_what_is_wrong_is_said(vindex: Path, edit: Callable[[Any], object], message: str) -> None:
    change(vindex, edit)
    result = run("inspect", vindex)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_missing_or_of_another_length(vindex: Path, name: str) -> None:
    path = vindex / name
    data = path.read_bytes()
    path.unlink()
    assert run("generate", vindex, "one").exit_code == 1
    path.mkdir()
    assert run("generate", vindex, "one").exit_code == 1
    path.rmdir()
    for content in (b"", data[:-2], data + data):
        path.write_bytes(content)
        result = run("generate", vindex, "one")
        assert result.exit_code == 1
        assert str(path) in result.stderr
    path.write_bytes(data)
    assert run("generate", vindex, "one").exit_code == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"model": {}}',
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}',
        '{"version": "1.0", "normalizer": {"type": "Precompiled", "precompiled_charsmap": "////"}}',  # a panic
    ],
)
def test_a_tokenizer_that_is_none(vindex: Path, text: str) -> None:
    (vindex / "tokenizer.json").write_text(text)
    facts = {"length": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    change(vindex, lambda index: index["files"].update({"tokenizer.json": facts}))
    with pytest.raises(ModelError, match=r"tokenizer\.json: the tokenizer "):
        larql.load(vindex)


# The command line


def test_inspect(vindex: Path, gguf: Path) -> None:
    facts = json.loads(run("inspect", vindex, "--json").stdout)
    assert (facts["path"], facts["vindex"]["path"]) == (str(vindex), str(vindex))
    assert facts["vindex"]["source"]["name"] == gguf.name
    assert (facts["name"], facts["architecture"]) == ("Tiny", "gemma3")
    in_memory = json.loads(run("inspect", gguf, "--no-cache", "--json").stdout)
    assert in_memory["vindex"] is None
    same = [key for key in facts if key not in ("path", "vindex", "tensors")]
    assert [facts[key] for key in same] == [in_memory[key] for key in same]
    assert [(row["type"], row["count"]) for row in facts["tensors"]] == [("Q8_0", 50), ("F32", 43)]
    assert str(vindex) in run("inspect", vindex).stdout


def test_every_command_opens_a_vindex(vindex: Path, gguf: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, "utf-8")
    for command in (["generate", "-n", "4", "--", "one"], ["tokenize", TEXT], ["eval", text]):
        first, second = (json.loads(run(command[0], "--json", path, *command[1:]).stdout) for path in (vindex, gguf))
        for facts in (first, second):
            facts.pop("timings", None)
            facts.pop("peer", None)  # of eval; it needs the GGUF file
            facts.get("paths", {}).pop("llama.cpp", None)
        assert first == second


def test_the_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def convert(report: Callable[[int, int], object]) -> None:
        for done in (0, 30, 60, 60):
            report(done, 60)

    with progress.ProgressBar("converting x") as bar:
        convert(bar)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with progress.ProgressBar("converting x") as bar:
        convert(bar)
        convert(bar)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "converting x" in shown.err
