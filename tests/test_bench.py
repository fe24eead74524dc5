"""`larql bench`: what is measured in which order, what the figures are made of, and the peer's process.

Fakes stand for engines where order and arithmetic are tested. No test looks at a speed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import larql._core
from fake_core import FakeEngine, FakeSampler
from larql import bench, contest, figures, peer, peer_worker
from larql.cli import app
from larql.config import LayerConfig, ModelConfig, RopeConfig
from larql.contest import Rules, Turns, decode_in_turns, prefill_in_turns
from larql.errors import LarqlError
from larql.peer import Peer, PeerError
from larql.session import Session
from test_roofline import assert_names_no_host
from tiny_models import write_tiny_model

PREFILL_KEYS = {"tokens", "tok_s", "tok_s_min", "tok_s_max", "prompt"}
DECODE_KEYS = {
    *("tokens", "depth", "tok_s", "tok_s_min", "tok_s_max", "ms_mean", "ms_p50", "ms_p99"),
    *("gb_per_token", "weights_gb_per_token", "kv_gb_per_token", "gb_s"),
    *("roofline_share", "roofline_share_min", "roofline_share_max", "ids_sha256"),
}
STAGES = ["embed", "norms", "projections", "attention", "ffn", "lm_head", "sampling", "waiting", "other", "outside"]


# What bytes and seconds become


def config(windows: Sequence[int | None]) -> ModelConfig:
    rope = RopeConfig(base=10_000, dims=4, pairing="half")
    return ModelConfig(
        vocab_size=10,
        hidden_size=16,
        intermediate_size=32,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        context_length=100,
        norm_eps=1e-6,
        query_scale=1,
        activation="silu",
        tied_head=True,
        layers=tuple(LayerConfig(rope, window) for window in windows),
    )


def test_windows_limit_what_is_read_of_the_cache() -> None:
    row = 2 * 2 * 8 * 2  # keys and values, heads, head size, bytes
    assert figures.kv_bytes_per_token(config([None, None]), "fast", 0, 1) == 2 * row
    assert figures.kv_bytes_per_token(config([None]), "fast", 9, 3) == row * (10 + 11 + 12) / 3
    assert figures.kv_bytes_per_token(config([4, None]), "fast", 2, 3) == row * ((3 + 4 + 4) + (3 + 4 + 5)) / 3
    assert figures.kv_bytes_per_token(config([4]), "reference", 50, 8) == 2 * row * 4


def test_decode_figures_count_timed_steps() -> None:
    made = figures.decode_figures(7, [[0.01, 0.03], [0.02, 0.08], [0.01, 0.01]])
    assert (made["tokens"], made["depth"]) == (2, 7)
    assert (made["tok_s"], made["tok_s_min"], made["tok_s_max"]) == (50, 20, 100)
    assert made["ms_mean"] == pytest.approx(160 / 6, rel=1e-4)
    assert made["ms_p50"] == 15
    assert 70 < made["ms_p99"] <= 80


def test_prefill_figures() -> None:
    assert figures.prefill_figures(100, [[1.0], [0.5], [2.0]]) == {
        "tokens": 100,
        "tok_s": 100,
        "tok_s_min": 50,
        "tok_s_max": 200,
    }


def test_the_roofline_share_is_formed_in_each_turn() -> None:
    model: Any = SimpleNamespace(engine=FakeEngine(lambda _: 0), config=config([]))
    model.engine.weight_bytes = 2_000_000_000
    made = figures.traffic(model, 5, Turns(ours=[[0.1, 0.1], [0.2, 0.2], [0.1, 0.3]], roofline=[40.0, 20.0, 10.0]))
    assert (made["gb_per_token"], made["weights_gb_per_token"], made["kv_gb_per_token"]) == (2, 2, 0)
    assert made["gb_s"] == 10
    assert [made["roofline_share" + end] for end in ("", "_min", "_max")] == [0.5, 0.5, 1.0]


def test_a_ratio_is_formed_in_each_turn() -> None:
    made = figures.ratio(Turns(ours=[[1.0, 1.0], [1.0], [4.0]], peer=[[3.0, 1.0], [3.0], [4.0]]))
    assert made == {"median": 2, "min": 1, "max": 3, "pairs": 3}


def test_stages_are_of_one_call_and_add_up() -> None:
    made = figures.stage_figures(Turns(profiled=[0.1, 0.3], stages={"ffn": 0.3, "waiting": 0.06}))
    assert made == {"stages": {"ffn": 150, "waiting": 30, "outside": 20}, "stages_total_ms": 200}
    assert figures.stage_figures(Turns()) == {}


# The order of the work


class ProfiledEngine(FakeEngine):
    """Spends half a second on each forward that is profiled."""

    profiled: int | None = None

    def set_profiling(self, on: bool) -> None:
        self.profiled = len(self.sizes) if on else None

    def profile(self) -> dict[str, float]:
        assert self.profiled is not None
        return {"ffn": 0.5 * (len(self.sizes) - self.profiled)}


class FakePeer:
    """Takes less time with flash attention, or fails with it."""

    def __init__(self, log: list[Any], *, with_flash: float | None = 0.5) -> None:
        self.log = log
        self.with_flash = with_flash

    def decode(self, fill: Sequence[int], ids: Sequence[int], *, flash: bool) -> list[float]:
        self.log.append(("peer", list(fill), list(ids), flash))
        return [self._seconds(flash)] * len(ids)

    def prefill(self, ids: Sequence[int], *, flash: bool) -> float:
        self.log.append(("peer", list(ids), flash))
        return self._seconds(flash)

    def drop(self, *, flash: bool) -> None:
        self.log.append(("drop", flash))

    def _seconds(self, flash: bool) -> float:
        if not flash:
            return 1.0
        if self.with_flash is None:
            raise PeerError("not with flash attention")
        return self.with_flash


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ProfiledEngine:
    """It counts: the next token is the last one plus one."""
    monkeypatch.setattr(contest, "Sampler", FakeSampler)
    monkeypatch.setattr(contest, "_SETTLE_S", 0)
    return ProfiledEngine(lambda ids: ids[-1] + 1)


@pytest.fixture
def model(engine: ProfiledEngine) -> Any:
    return SimpleNamespace(engine=engine, session=lambda: Session(engine))


def test_decoding_starts_from_the_fill_and_times_exactly_the_tokens(model: Any, engine: ProfiledEngine) -> None:
    turns, ids = decode_in_turns(model, [3, 1, 4, 10], 3, Rules(1, 2, False), lambda: 9.0, None)
    assert ids == [11, 12, 13]
    assert [len(steps) for steps in turns.ours] == [3, 3]
    assert (turns.peer, turns.roofline, turns.stages) == ([], [9.0, 9.0], None)
    assert engine.sizes == [3, *3 * [1, 1, 1, 1]]  # the fill once; in each run its last token and three more


def test_a_fill_of_one_token(model: Any, engine: ProfiledEngine) -> None:
    assert decode_in_turns(model, [5], 2, Rules(0, 1, False), lambda: 1.0, None)[1] == [6, 7]
    assert engine.sizes == [1, 1, 1]


def test_a_profiled_run_follows_and_only_its_timed_steps_count(model: Any, engine: ProfiledEngine) -> None:
    turns, _ = decode_in_turns(model, [3, 1], 4, Rules(0, 1, True), lambda: 1.0, None)
    assert turns.stages == {"ffn": 2.0}
    assert len(turns.profiled) == 4
    assert engine.profiled is None
    turns = prefill_in_turns(model, [3, 1], Rules(0, 1, True), None)
    assert turns.stages == {"ffn": 0.5}
    assert engine.profiled is None


def test_profiling_ends_with_an_error(model: Any, engine: ProfiledEngine) -> None:
    engine.fail[5] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        decode_in_turns(model, [3, 1], 2, Rules(0, 1, True), lambda: 1.0, None)
    assert engine.profiled is None


def test_runs_that_differ_are_a_bug(model: Any, engine: ProfiledEngine) -> None:
    engine.rule = lambda ids: (len(engine.sizes) + ids[-1]) % 50
    with pytest.raises(LarqlError, match="different tokens"):
        decode_in_turns(model, [3, 1], 2, Rules(0, 2, False), lambda: 1.0, None)


def test_the_engines_take_turns_and_do_the_same_work(
    model: Any, engine: ProfiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[Any] = []
    run = contest.Decoder.run

    def logged(self: contest.Decoder, *arguments: Any) -> list[float]:
        log.append("ours")
        return run(self, *arguments)

    monkeypatch.setattr(contest.Decoder, "run", logged)
    rival: Any = FakePeer(log)
    turns, ids = decode_in_turns(model, [3, 4], 2, Rules(0, 3, False), lambda: log.append("roofline") or 1.0, rival)
    assert ids == [5, 6]
    work = ([3, 4], [5, 6])
    tries = 3 * [("peer", *work, False), ("peer", *work, True)]
    assert log == ["ours", *tries, ("drop", False), *3 * ["roofline", "ours", ("peer", *work, True)]]
    assert turns.peer_flash is True
    assert turns.peer == 3 * [[0.5, 0.5]]
    assert engine.sizes


@pytest.mark.parametrize(("with_flash", "better"), [(0.5, True), (2.0, False), (None, False)])
def test_the_peer_gets_its_better_setting(model: Any, with_flash: float | None, better: bool) -> None:
    log: list[Any] = []
    rival: Any = FakePeer(log, with_flash=with_flash)
    turns = prefill_in_turns(model, [3, 4, 5], Rules(1, 2, False), rival)
    assert turns.peer_flash is better
    assert log[-3:] == [("drop", not better), *2 * [("peer", [3, 4, 5], better)]]
    assert len(turns.peer) == len(turns.ours) == 2


def test_a_peer_that_always_fails_is_given_up(model: Any) -> None:
    rival: Any = FakePeer([])
    rival._seconds = lambda _: (_ for _ in ()).throw(PeerError("no"))
    with pytest.raises(PeerError):
        prefill_in_turns(model, [3], Rules(0, 1, False), rival)


# The whole, on a small model


class FakeProbe:
    """Reads at 10 GB/s."""

    n_bytes = 1 << 30
    said: str | None = None

    def best_gb_s(self, threads: int) -> float:
        assert threads
        return 10.0

    def shortage(self) -> str | None:
        return self.said


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-0.5.gguf", "gemma3", "Q8_0")


@pytest.fixture
def run(tiny_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs `larql bench` on the small model; the machine's memory is not measured."""
    monkeypatch.setattr(larql._core, "build_profile", "release")
    monkeypatch.setenv("LARQL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bench, "ReadProbe", FakeProbe)
    monkeypatch.setattr(contest, "_SETTLE_S", 0)

    def run(*arguments: str, model: str = str(tiny_path)) -> Any:
        short = ("--tokens", "3", "--repeat", "2", "--prompt-tokens", "20")
        result = CliRunner().invoke(app, ["bench", model, *short, *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


def test_a_record_has_every_key(run: Callable[..., Any], tiny_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    result = run("--cpu", "--json", "--output-file", str(path), "--threads", "1", "--note", "a test")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert json.loads(path.read_text("utf-8")) == record
    what = ["kind", "format", "date", "note", "machine", "build", "model", "settings"]
    assert list(record) == [*what, "threads", "roofline", "prefill", "decode"]
    assert (record["kind"], record["note"], record["threads"]) == ("bench", "a test", 1)
    assert set(record["build"]) == {"version", "commit", "isa"}
    assert record["model"]["name"] == "tiny-0.5"
    assert len(record["model"]["sha256"]) == 64
    assert {entry["type"] for entry in record["model"]["quant_mix"]} == {"Q8_0", "F32"}
    assert record["roofline"] == {"buffer_bytes": 1 << 30, "gb_s": 10, "gb_s_min": 10, "gb_s_max": 10}
    assert set(record["prefill"]) == PREFILL_KEYS
    assert record["prefill"]["tokens"] == 20
    decode = record["decode"]
    assert set(decode) == DECODE_KEYS
    assert decode["tokens"] == 3
    assert decode["depth"] == record["prefill"]["prompt"]["tokens"]
    assert decode["gb_per_token"] == pytest.approx(decode["weights_gb_per_token"] + decode["kv_gb_per_token"], rel=1e-4)
    assert decode["roofline_share"] == pytest.approx(decode["gb_s"] / 10, rel=1e-3)
    settings = record["settings"]
    assert (settings["tokens"], settings["repeat"], settings["warmup"], settings["threads"]) == (3, 2, 1, [1])
    assert_names_no_host(json.dumps(record))
    assert str(tiny_path.parent) not in json.dumps(record)


def test_the_ids_are_those_that_generate_gives(run: Callable[..., Any], tiny_path: Path) -> None:
    loaded = larql.load(tiny_path)
    session, sampler = loaded.session(), larql._core.Sampler()
    ids = [session.sample(loaded.encode(bench.PROMPT), sampler)]
    ids += [session.sample(ids[-1:], sampler) for _ in range(2)]
    first = json.loads(run("--json", "--threads", "1,2").stdout)["sweep"]
    expected = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
    assert [result["decode"]["ids_sha256"] for result in first] == [expected, expected]


def test_a_sweep_is_a_list(run: Callable[..., Any]) -> None:
    record = json.loads(run("--json", "--threads", "1, 2").stdout)
    assert "decode" not in record
    assert [result["threads"] for result in record["sweep"]] == record["settings"]["threads"] == [1, 2]
    assert all(set(result["decode"]) == DECODE_KEYS for result in record["sweep"])


def test_stages_are_those_of_the_core_and_one_for_the_rest(run: Callable[..., Any]) -> None:
    record = json.loads(run("--json", "--profile").stdout)
    for part in ("decode", "prefill"):
        stages = record[part]["stages"]
        assert list(stages) == STAGES
        assert sum(stages.values()) == pytest.approx(record[part]["stages_total_ms"], rel=1e-3)
        # The core measures inside of what is measured here.
        assert stages["outside"] >= -0.02 * record[part]["stages_total_ms"]
        assert all(ms >= 0 for name, ms in stages.items() if name != "outside")


def test_depth(run: Callable[..., Any]) -> None:
    shallow = json.loads(run("--json", "--depth", "2").stdout)["decode"]
    deep = json.loads(run("--json", "--depth", "90", "--precision", "reference").stdout)["decode"]
    assert (shallow["depth"], deep["depth"]) == (2, 90)
    assert deep["kv_gb_per_token"] > 2 * shallow["kv_gb_per_token"]


def test_the_table(run: Callable[..., Any]) -> None:
    result = run("--profile", "--threads", "1,2")
    assert result.exit_code == 0
    for text in ("tiny-0.5, Q8_0", "from depth", "p50", "of the roofline, 10.0 GB/s", "sha256", "lm_head", "waiting"):
        assert text in result.stdout
    assert result.stdout.count("\nthreads ") == 2
    assert all(line.startswith("larql: ") for line in result.stderr.splitlines())


def test_a_small_buffer_is_said(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProbe, "said", "memory is short")
    assert "larql: memory is short\n" in run().stderr


def test_a_debug_build_is_refused(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(larql._core, "build_profile", "debug")
    result = run()
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "larql: this is a debug build, whose speed means nothing; build with --release\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "larql: tokens is 0; it must be at least 1"),
        (["--warmup", "-1"], "larql: warmup is -1; it must be at least 0"),
        (["--depth", "0"], "larql: depth is 0"),
        (["--threads", "1,x"], "'1,x' is no list of thread counts"),
        (["--threads", "0"], "'0' is no list of thread counts"),
        (["--threads", ""], "'' is no list of thread counts"),
        (["--compare", "another"], "'another'"),
        (["--output-file", "no/such/folder/record.json"], "there is no folder"),
        (["--prompt-tokens", "1000000"], "larql: 1000000 tokens do not fit in a context of"),
        (["--depth", "1000000"], "larql: 1000003 tokens do not fit in a context of"),
    ],
)
def test_usage_errors(run: Callable[..., Any], arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_prompt_without_tokens(run: Callable[..., Any], tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "qwen.gguf", "qwen2", "Q8_0")
    result = run("--prompt", "", model=str(path))
    assert (result.exit_code, result.stderr) == (2, "larql: the prompt has no tokens; give at least one\n")


# The peer


def test_a_peer_that_is_not_installed_is_a_line(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    result = run("--json", "--compare", "llama.cpp")
    assert result.exit_code == 0
    assert "larql: llama.cpp is not compared: llama-cpp-python is not installed: pip install" in result.stderr
    assert not {"peer", "ratio", "llama_bench"} & set(json.loads(result.stdout))


# A worker that speaks the protocol, and prints to stderr. Its ways to fail are chosen by its argument.
WORKER = """
import json, sys
print("a library says hello", file=sys.stderr, flush=True)
for line in sys.stdin:
    request = json.loads(line)
    do = request["do"]
    answer = {
        "open": {"version": "1.2", "system": "OPENMP = 1"},
        "decode": {"steps": [0.001 + 0.001 * request.get("flash", 0)] * len(request.get("ids", []))},
        "prefill": {"seconds": 0.5},
        "drop": {},
    }[do]
    if sys.argv[1] == f"refuse {do}":
        answer = {"error": "it will not"}
    if sys.argv[1] == f"die at {do}":
        sys.exit("the end")
    if sys.argv[1] == f"babble at {do}":
        print("not JSON", flush=True)
    print(json.dumps(answer | {"idle_s": 2.0, "idle_cpu_s": 0.5}), flush=True)
"""


def worker(behaviour: str) -> list[str]:
    return [sys.executable, "-c", WORKER, behaviour]


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the command run a worker of that behaviour."""

    def use(behaviour: str) -> None:
        monkeypatch.setattr(bench, "Peer", lambda path, **options: Peer(path, worker=worker(behaviour), **options))
        monkeypatch.setattr(bench, "llama_bench", lambda *_, **__: None)

    return use


def test_a_comparison(run: Callable[..., Any], fake_worker: Callable[[str], None]) -> None:
    fake_worker("well")
    record = json.loads(run("--json", "--compare", "llama.cpp").stdout)
    assert set(record["peer"]) == {"name", "version", "system", "prefill", "decode", "idle_cpu_share"}
    assert (record["peer"]["name"], record["peer"]["version"]) == ("llama.cpp", "llama-cpp-python 1.2")
    assert record["peer"]["prefill"]["tok_s"] == 40
    assert record["peer"]["decode"]["tok_s"] == pytest.approx(1000)
    assert record["peer"]["decode"]["flash_attention"] is False
    assert record["peer"]["idle_cpu_share"]["llama.cpp"] == 0.25
    assert {name: figures["pairs"] for name, figures in record["ratio"].items()} == {"prefill": 2, "decode": 2}
    assert set(record["ratio"]["decode"]) == {"median", "min", "max", "pairs"}

    result = run("--compare", "llama.cpp")
    assert "llama.cpp took 25 % of a CPU in the other's turns" in result.stderr
    assert "ratios of 2 pairs" in result.stderr
    assert "decode without flash attention" in result.stdout
    assert "in 2 pairs" in result.stdout


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("refuse open", "it will not (a library says hello)"),
        ("die at open", "its process ended (the end)"),
        ("die at prefill", "its process ended (the end)"),
        ("refuse decode", "it will not (a library says hello)"),
        ("babble at open", "its process ended (a library says hello)"),
    ],
)
def test_a_peer_that_fails_is_left_out(
    run: Callable[..., Any], fake_worker: Callable[[str], None], behaviour: str, message: str
) -> None:
    fake_worker(behaviour)
    result = run("--json", "--compare", "llama.cpp")
    assert result.exit_code == 0
    assert f"larql: llama.cpp is not compared: {message}\n" in result.stderr
    record = json.loads(result.stdout)
    assert "peer" not in record
    assert set(record["decode"]) == DECODE_KEYS


def test_a_peer_ends_with_its_block(tiny_path: Path) -> None:
    with Peer(tiny_path, threads=1, context=10, worker=worker("well")) as rival:
        process = rival._process
        assert process.poll() is None
        assert rival.decode([1], [2, 3], flash=False) == [0.001, 0.001]
    assert process.poll() is not None


class ArrayType:
    """Multiplied by a length it makes arrays, as types of ctypes do."""

    def __mul__(self, length: int) -> Callable[..., list[int]]:
        def make(*ids: int) -> list[int]:
            assert len(ids) == length
            return list(ids)

        return make


class FakeLlama:
    """What the worker uses of llama-cpp-python; `calls` gets every evaluation and every change of the cache."""

    __version__ = "9.9"
    llama_token = ArrayType()

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.status = 0
        self.can_rewind = True
        self.parameters: list[Any] = []

    def llama_backend_init(self) -> None: ...

    def llama_model_default_params(self) -> Any:
        return SimpleNamespace(n_gpu_layers=-1)

    def llama_context_default_params(self) -> Any:
        self.parameters.append(
            SimpleNamespace(n_ctx=0, n_threads=0, flash_attn_type=-1, swa_full=True, op_offload=True)
        )
        return self.parameters[-1]

    def llama_print_system_info(self) -> bytes:
        return b"CPU : AVX2 = 1 | "

    def llama_model_load_from_file(self, path: bytes, parameters: Any) -> Any:
        assert parameters.n_gpu_layers == 0
        return None if b"broken" in path else "model"

    def llama_init_from_model(self, model: Any, parameters: Any) -> Any:
        assert model == "model"
        return f"context {parameters.flash_attn_type}"

    def llama_get_memory(self, context: str) -> str:
        return context

    def llama_memory_clear(self, memory: str, data: bool) -> None:
        self.calls.append(("clear", memory, data))

    def llama_memory_seq_rm(self, memory: str, sequence: int, start: int, end: int) -> bool:
        assert (sequence, end) == (0, -1)
        self.calls.append(("rewind", memory, start))
        return self.can_rewind

    def llama_batch_get_one(self, tokens: list[int], n: int) -> list[int]:
        assert len(tokens) == n
        return tokens

    def llama_decode(self, context: str, batch: list[int]) -> int:
        assert context.startswith("context ")
        self.calls.append(batch)
        return self.status

    def llama_synchronize(self, context: str) -> None: ...

    def llama_free(self, context: str) -> None:
        self.calls.append(("free", context))


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    fake = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)  # type: ignore[arg-type]
    return fake


def test_the_worker_fills_once_and_then_goes_back(llama: FakeLlama) -> None:
    made = peer_worker.Worker()
    assert made.open("model.gguf", threads=2, context=300) == {"version": "9.9", "system": "CPU : AVX2 = 1"}
    assert len(made.decode(False, [1, 2, 3], [7, 8])["steps"]) == 2
    assert llama.calls == [("clear", "context 0", False), [1, 2], [3], [7], [8]]
    assert (llama.parameters[0].n_ctx, llama.parameters[0].n_threads) == (512, 2)
    assert (llama.parameters[0].swa_full, llama.parameters[0].op_offload) == (False, False)
    llama.calls.clear()
    made.decode(False, [1, 2, 3], [7, 8])
    assert llama.calls == [("rewind", "context 0", 2), [3], [7], [8]]
    llama.calls.clear()
    llama.can_rewind = False
    made.decode(False, [1, 2, 3], [7])
    assert llama.calls == [("rewind", "context 0", 2), ("clear", "context 0", False), [1, 2], [3], [7]]
    assert len(llama.parameters) == 1


def test_the_worker_prefills_an_empty_cache_in_batches(llama: FakeLlama) -> None:
    made = peer_worker.Worker()
    made.open("model.gguf", threads=1, context=2000)
    made.decode(True, [1, 2], [3])
    llama.calls.clear()
    assert made.prefill(True, list(range(1100)))["seconds"] >= 0
    assert llama.calls[0] == ("clear", "context 1", False)
    assert [len(batch) for batch in llama.calls[1:]] == [512, 512, 76]
    llama.calls.clear()
    made.decode(True, [1, 2], [3])
    assert llama.calls[0] == ("clear", "context 1", False)  # the prompt has replaced the fill
    made.drop(True)
    made.drop(True)
    assert llama.calls[-1] == ("free", "context 1")


def test_the_worker_answers_errors(llama: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    llama.status = 1
    requests = [
        {"do": "open", "path": "broken.gguf", "threads": 1, "context": 9},
        {"do": "open", "path": "model.gguf", "threads": 1, "context": 9},
        {"do": "prefill", "flash": False, "ids": [1]},
    ]
    monkeypatch.setattr(sys, "stdin", [json.dumps(request) + "\n" for request in requests])
    lines: list[str] = []
    peer_worker.serve(peer_worker.Worker(), lines.append, lambda: None)
    answers = [json.loads(line) for line in lines]
    assert [answer.get("error") for answer in answers] == [
        "it cannot load this file",
        None,
        "llama_decode returned 1",
    ]
    assert all(answer["idle_s"] >= 0 and answer["idle_cpu_s"] >= 0 for answer in answers)


def test_the_worker_as_a_program(tmp_path: Path) -> None:
    """What libraries print to stdout stays out of the answers."""
    (tmp_path / "llama_cpp.py").write_text("print('noise')\nraise ImportError('no library')\n")
    done = subprocess.run(
        [sys.executable, "-m", "larql.peer_worker"],
        input=json.dumps({"do": "open", "path": "x", "threads": 1, "context": 1}) + "\n",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["error"] == "no library"
    assert done.stderr == "noise\n"


def test_the_real_peer(smollm_path: Path) -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    with Peer(smollm_path, threads=1, context=64) as rival:
        for flash in (False, True):
            for _ in range(2):
                assert len(rival.decode([1, 2, 3], [4, 5], flash=flash)) == 2
            assert rival.prefill([1, 2, 3], flash=flash) > 0
            rival.drop(flash=flash)
        assert "=" in rival.system


# llama-bench


def test_llama_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        speed = 100 if command[command.index("-n") + 1] == "0" else 10
        results = [{"build_commit": "abc", "avg_ts": speed * factor, "flash_attn": factor > 1} for factor in (1, 2)]
        return SimpleNamespace(stdout=json.dumps(results))

    monkeypatch.setattr(peer.shutil, "which", lambda _: "/bin/llama-bench")
    monkeypatch.setattr(peer.subprocess, "run", run)
    made = peer.llama_bench(tmp_path, threads=2, prompt_tokens=512, tokens=16, depth=64)
    assert made == {
        "build": "abc",
        "prefill": {"tokens": 512, "tok_s": 200},
        "decode": {"tokens": 16, "depth": 64, "tok_s": 20},
    }
    assert [("-d" in command, command[command.index("-p") + 1]) for command in commands] == [
        (False, "512"),
        (True, "0"),
    ]


def test_llama_bench_that_is_missing_or_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = {"threads": 1, "prompt_tokens": 1, "tokens": 1, "depth": 0}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert peer.llama_bench(tmp_path, **options) is None
    monkeypatch.setattr(peer.shutil, "which", lambda _: str(tmp_path / "no-program"))
    with pytest.raises(PeerError, match="llama-bench failed"):
        peer.llama_bench(tmp_path, **options)


def test_llama_bench_is_shown(
    run: Callable[..., Any], fake_worker: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_worker("well")
    speeds = {"build": "abc", "prefill": {"tok_s": 123.45}, "decode": {"tok_s": 12.3}}
    monkeypatch.setattr(bench, "llama_bench", lambda *_, **__: speeds)
    assert "prefill 123.5 tok/s, decode 12.3 tok/s (build abc)" in run("--compare", "llama.cpp").stdout
    assert json.loads(run("--json", "--compare", "llama.cpp").stdout)["llama_bench"] == speeds

    def fail(*_: Any, **__: Any) -> Any:
        raise PeerError("llama-bench failed: why")

    monkeypatch.setattr(bench, "llama_bench", fail)
    assert "larql: llama-bench failed: why\n" in run("--compare", "llama.cpp").stderr
