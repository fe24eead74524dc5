"""The ladder: what its rungs say, and how a climb is told."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

import larql.ladder
from larql import _core
from larql.errors import InputError
from larql.gguf_file import GgufFile
from larql.ladder import WHY, as_table, climb, save_plot
from larql.model import Model
from tiny_models import FAMILIES, write_tiny_model

PROMPT = [(7 * i) % 40 + 3 for i in range(12)]
FLOAT_RUNGS = ["naive", "cache", "stored-bytes", "simd", "quantised-head", "accumulators"]


def open_ladder(file: GgufFile) -> _core.Ladder:
    return _core.Ladder(file.gguf, file.tensor_names, file.config.to_json())


@pytest.mark.parametrize("weight_type", ["F32", "Q4_K", "Q6_K", "Q8_0", "Q5_1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rung_says_what_the_reference_says(family: str, weight_type: str, tmp_path: Path) -> None:
    file = GgufFile(write_tiny_model(tmp_path / "tiny.gguf", family, weight_type))
    reference, ladder = Model(file, precision="reference", threads=1), open_ladder(file)
    for rung in ladder.rungs():
        ids, prompt_s, step_s = ladder.climb(rung, PROMPT, 8, math.inf, 2)
        agreeing, lowest = larql.ladder._compare(reference, PROMPT, ids)
        assert (len(ids), len(step_s)) == (8, 7)
        assert prompt_s > 0
        assert agreeing >= 6, rung
        # Of logits that spread over 13 and more.
        assert lowest > (-1e-3 if rung in FLOAT_RUNGS else -0.5), rung


def test_a_slow_rung_ends_early_but_not_before_its_second_token(tmp_path: Path) -> None:
    ladder = open_ladder(GgufFile(write_tiny_model(tmp_path / "tiny.gguf", "llama", "Q8_0")))
    for rung in ladder.rungs():
        ids, _, step_s = ladder.climb(rung, PROMPT, 8, 0.0, 1)
        assert (len(ids), len(step_s)) == (2, 1)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    ladder = open_ladder(GgufFile(write_tiny_model(tmp_path / "tiny.gguf", "llama", "Q8_0")))
    with pytest.raises(InputError, match='there is no rung "x"; the rungs are naive cache '):
        ladder.climb("x", PROMPT, 2, 1.0, 1)
    for prompt, tokens in (([], 2), (PROMPT, 10**6), ([10**6], 2)):
        with pytest.raises(InputError):
            ladder.climb("naive", prompt, tokens, 1.0, 1)


def test_every_rung_is_explained() -> None:
    assert list(WHY) == _core.Ladder.rungs()
    assert len(WHY) >= 12


class Memory:
    """A memory of 10 GB/s."""

    def best_gb_s(self, _threads: int) -> float:
        return 10.0


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(larql.ladder, "ReadProbe", Memory)
    monkeypatch.setattr(larql.ladder, "refuse_debug_build", lambda: None)
    path = write_tiny_model(tmp_path / "tiny.gguf", "gemma3", "Q4_K")
    said: list[str] = []
    result = climb(path, tokens=4, say=said.append)
    assert said[0].startswith("this takes about")
    assert len(said) == 1 + len(WHY) + 2
    return result


def test_a_climb_is_a_record_a_table_and_a_picture(record: dict[str, Any], tmp_path: Path) -> None:
    assert json.loads(json.dumps(record)) == record
    with pytest.MonkeyPatch.context() as patch:  # a program that belongs to no package
        patch.syspath_prepend(Path(__file__).parents[1] / "bench")
        assert "| naive |" in importlib.import_module("records").ladder_text("here", "01-first", record)
    rungs = record["rungs"]
    assert [row["rung"] for row in rungs] == list(WHY)
    assert rungs[0]["gain"] is None
    for before, row in itertools.pairwise(rungs):
        assert row["gain"] == pytest.approx(row["tok_s"] / before["tok_s"], rel=0.01)
        assert row["share"] == pytest.approx(row["gb_s"] / 10, rel=0.01)
    table = as_table(record)
    assert all(f"\n{rung:<15}" in table and why in table for rung, why in WHY.items())
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the picture, is not installed")
    save_plot(record, tmp_path / "climb.png")
    assert (tmp_path / "climb.png").read_bytes().startswith(b"\x89PNG")


def test_an_unlikely_choice_is_marked(record: dict[str, Any]) -> None:
    assert " !" not in as_table(record).split("In all")[0]
    record["rungs"][6]["lowest"] = -3.0
    assert as_table(record).split("In all")[0].count(" !") == 1


def test_a_rate_needs_two_tokens(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", "llama", "Q8_0")
    with pytest.raises(InputError, match="a rate needs at least 2"):
        climb(path, tokens=1)
    with pytest.raises(InputError, match="do not fit in a context"):
        climb(path, tokens=10**6)
