"""Sessions that are saved and loaded."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import larql
from larql.errors import ContextError, InputError
from tiny_models import write_tiny_model

IDS = [(7 * i) % 50 + 3 for i in range(150)]


def load(path: Path, **options: Any) -> larql.Model:
    return larql.load(path, threads=1, cache=False, **options)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("session") / "tiny.gguf", "gemma3", "Q8_0")


@pytest.fixture(scope="module")
def model(path: Path) -> larql.Model:
    return load(path)


@pytest.fixture
def saved(model: larql.Model, tmp_path: Path) -> Path:
    session = model.session()
    session.feed(IDS)
    model.save_session(session, tmp_path / "talk.npz")
    return tmp_path / "talk.npz"


@pytest.mark.parametrize("precision", ["fast", "reference"])
@pytest.mark.parametrize("n", [0, 1, 64, 150])
def test_a_loaded_session_goes_on_with_the_same_bits(path: Path, tmp_path: Path, precision: str, n: int) -> None:
    model = load(path, precision=precision)
    session = model.session()
    session.feed(IDS[:n])
    model.save_session(session, tmp_path / "größe 1.npz")
    again = load(path, precision=precision).load_session(tmp_path / "größe 1.npz")
    assert again.ids == session.ids
    for one in (session, again):
        one.feed([5, 6])
    assert again.logits.tobytes() == session.logits.tobytes()
    for one in (session, again):
        one.truncate(n // 2 + 1)
    assert again.logits.tobytes() == session.logits.tobytes()


def test_a_real_conversation_goes_on(smollm_path: Path, tmp_path: Path) -> None:
    prompt = "Once upon a time there was a fox who"
    with larql.load(smollm_path, threads=2) as model:
        session = model.session()
        first = model.generate(prompt, session=session, max_tokens=8)
        model.save_session(session, tmp_path / "fox.npz")
        want = model.generate(prompt + first.text + " and", session=session, max_tokens=8)
    with larql.load(smollm_path, threads=2) as model:
        session = model.load_session(tmp_path / "fox.npz")
        got = model.generate(prompt + first.text + " and", session=session, max_tokens=8)
    assert (got.text, got.ids, got.reused) == (want.text, want.ids, want.reused)
    assert got.reused > 8


def test_an_existing_file_is_replaced_whole(model: larql.Model, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(file: io.BufferedWriter, **_: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(OSError, match="No space left"):
            model.save_session(model.session(), saved)
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]
    model.save_session(model.session(), saved)
    assert len(model.load_session(saved)) == 0


def test_another_model_precision_or_context_is_refused(
    path: Path, model: larql.Model, saved: Path, tmp_path: Path
) -> None:
    other = load(write_tiny_model(tmp_path / "other.gguf", "gemma3", "Q4_0"))
    with pytest.raises(InputError, match="a session with another model"):
        other.load_session(saved)
    with pytest.raises(InputError, match="in fast precision; the model was loaded as reference"):
        load(path, precision="reference").load_session(saved)
    with pytest.raises(ContextError, match="holds 150 tokens; the context holds 100"):
        load(path, context=100).load_session(saved)
    with pytest.raises(InputError, match="belongs to another model"):
        model.save_session(other.session(), saved)


def rewrite(path: Path, **changes: Any) -> None:
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    arrays.update(changes)
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


BROKEN: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"a text, and no archive"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "a flipped bit": lambda path: path.write_bytes(flipped(path.read_bytes())),
    "one array": lambda path: path.write_bytes(npy(np.zeros(3))),
    "objects": lambda path: path.write_bytes(npy(np.array([{}]))),
    "no ids": lambda path: rewrite(path, ids=None),
    "other ids": lambda path: rewrite(path, ids=np.zeros(150)),
    "nothing about it": lambda path: rewrite(path, about=np.array("[]")),
    "a short cache": lambda path: rewrite(path, cache=np.zeros(100, np.uint8)),
    "more ids": lambda path: rewrite(path, ids=np.zeros(151, np.uint32)),
    "large ids": lambda path: rewrite(path, ids=np.full(150, 10**6, np.uint32)),
    "another version": lambda path: rewrite(path, about=np.array('{"format": "x", "model": "", "precision": ""}')),
}


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_file_is_refused(model: larql.Model, saved: Path, broken: str) -> None:
    BROKEN[broken](saved)
    with pytest.raises(InputError) as raised:
        model.load_session(saved)
    assert "\n" not in str(raised.value)


def test_a_place_where_no_file_can_be(model: larql.Model, tmp_path: Path) -> None:
    places = {".": "is no regular file", tmp_path: "is no regular file", tmp_path / "a" / "b.npz": "there is no folder"}
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        places[tmp_path / "pipe"] = "is no regular file"
    for place, message in places.items():
        with pytest.raises(InputError, match=message):
            model.save_session(model.session(), place)


@pytest.mark.skipif(sys.platform == "win32", reason="links and modes of POSIX")
def test_links_and_modes_stay(model: larql.Model, saved: Path) -> None:
    link = saved.with_name("link.npz")
    link.symlink_to(saved)
    saved.chmod(0o600)
    model.save_session(model.session(), link)
    assert link.is_symlink()
    assert saved.stat().st_mode & 0o777 == 0o600
    assert len(model.load_session(saved)) == 0


def test_a_file_that_is_not_there_or_not_readable(model: larql.Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        model.load_session(tmp_path / "absent.npz")
    with pytest.raises(InputError, match="cannot be read"):
        model.load_session(tmp_path)
