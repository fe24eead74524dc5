"""What surrounds the program is not as it should be: each such day ends in one line and the right exit code."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from larql import source, store
from larql.cli import app
from terminal import Terminal
from tiny_models import write_tiny_model

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals, pipes, terminals and file modes of POSIX")

NOT_ASCII = "caf\u00e9"
NOT_UTF8 = b"caf\xe9"


pytestmark = pytest.mark.usefixtures("cache_path")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return write_tiny_model(path, "gemma3", "Q8_0", other_metadata={"tokenizer.chat_template": template})


@pytest.fixture(scope="module")
def vindex(gguf: Path) -> Path:
    path = gguf.with_name("tiny.vindex")
    assert run("convert", gguf, path).returncode == 0
    return path


def program(before: str = "") -> list[str]:
    return [sys.executable, "-c", f"{before}\nfrom larql.cli import main\nmain()"]


def run(
    *arguments: object, before: str = "", by: list[str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs the program, after some lines of Python of its own and started by another."""
    words = [word if isinstance(word, bytes) else str(word) for word in arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8", "timeout": 120} | options
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run([*(by or []), *program(before), *words], check=False, **options)


def run_here(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def assert_one_line(stderr: str, text: str) -> None:
    assert stderr.startswith("larql: ")
    assert stderr.endswith("\n")
    assert stderr.count("\n") == 1
    assert text in stderr


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# Streams


@posix
@pytest.mark.parametrize("command", [["chat"], ["generate", "-"], ["tokenize", "-"]])
def test_a_closed_stdin(vindex: Path, command: list[str]) -> None:
    done = run(command[0], vindex, *command[1:], by=["sh", "-c", 'exec "$@" <&-', "sh"])
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "larql: standard input is closed\n")


@posix
def test_a_stdin_that_cannot_be_read(vindex: Path) -> None:
    with open(os.devnull, "wb") as write_only:
        done = run("generate", vindex, "-", stdin=write_only)
    assert done.returncode == 2
    assert_one_line(done.stderr, "stdin cannot be read: ")


@posix
def test_generate_does_not_wait_for_a_prompt_from_a_terminal(vindex: Path) -> None:
    terminal = Terminal([*program(), "generate", str(vindex)])
    terminal.expect("there is no prompt; give PROMPT or --file")
    assert terminal.exit_code() == 2


@posix
@pytest.mark.parametrize("command", ["models", "inspect M --json", "generate M a", "chat M", "--help"])
def test_a_reader_that_has_left_is_no_error_to_tell(vindex: Path, command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run(*(vindex if word == "M" else word for word in command.split()), stdout=writer, input="a\n")
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@posix
def test_without_stderr_errors_have_their_exit_codes_and_work_goes_on(gguf: Path) -> None:
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh"]
    assert run("inspect", "nothing", by=closed).returncode == 1
    done = run("generate", gguf, "a", "-n", "2", "--no-cache", by=closed)
    assert done.returncode == 0
    assert done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_stderr_that_is_full_changes_no_exit_code(vindex: Path) -> None:
    with open("/dev/full", "w") as full:
        assert run("inspect", "nothing", stderr=full).returncode == 1
        assert run("generate", vindex, "a", "-n", "2", "-v", stderr=full).returncode == 0


# Terminals and locales


def convert_in_terminal(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    """What a terminal gets to see of a conversion."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal([*program(), "convert", str(gguf), str(tmp_path / "x.vindex")])
    assert terminal.exit_code() == 0
    return terminal.seen


@posix
def test_a_terminal_that_draws_nothing_gets_no_bar(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert convert_in_terminal(gguf, tmp_path, monkeypatch, TERM="dumb") == ""


@posix
def test_a_bar_without_colours(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd_name = gguf.with_name("tiny [red].gguf")
    shutil.copy(gguf, odd_name)
    seen = convert_in_terminal(odd_name, tmp_path, monkeypatch, TERM="xterm", NO_COLOR="1", COLUMNS="1000")
    assert f"converting {odd_name}" in seen
    assert not re.search(r"\x1b\[[\d;]*m", seen)


ONLY_ASCII = [
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "C"},
    {"PYTHONIOENCODING": "ascii:strict"},
]


@posix
@pytest.mark.parametrize("environment", ONLY_ASCII)
def test_texts_are_utf8_where_the_locale_is_ascii(vindex: Path, environment: dict[str, str]) -> None:
    surroundings = {**os.environ, **environment}
    text = NOT_ASCII.encode()
    expected = json.loads(run_here("tokenize", vindex, NOT_ASCII, "--json").stdout)["ids"]

    done = run("tokenize", vindex, text, "--json", env=surroundings)
    assert json.loads(done.stdout)["ids"] == expected
    done = run("generate", vindex, "-n", "2", "--json", "--stop", text, env=surroundings, input=NOT_ASCII)
    assert json.loads(done.stdout)["prompt_ids"] == expected
    done = run("chat", vindex, "-n", "9", "--system", text, env=surroundings, input=NOT_ASCII, errors="replace")
    assert (done.returncode, done.stderr) == (0, "")

    done = run("inspect", text + b".gguf", env=surroundings)
    assert done.returncode == 1
    assert_one_line(done.stderr, "there is no model file")
    done = run("generate", vindex, "--file", text, env=surroundings)
    assert done.returncode == 2
    assert_one_line(done.stderr, "does not exist")


@posix
def test_names_that_are_not_utf8(gguf: Path, tmp_path: Path) -> None:
    model, target = tmp_path / os.fsdecode(NOT_UTF8 + b".gguf"), tmp_path / os.fsdecode(NOT_UTF8 + b".vindex")
    try:
        shutil.copy(gguf, model)
    except OSError as error:
        if error.errno != errno.EILSEQ:
            raise
        pytest.skip("this file system has no such names")
    for command in (["generate", model, "a", "-n", "2"], ["convert", model, target], ["verify", target]):
        assert run(*command, errors="replace").returncode == 0
    assert json.loads(run("inspect", target, "--json").stdout)["path"] == str(target)
    done = run("convert", gguf, tmp_path / os.fsdecode(NOT_UTF8) / "x.vindex")
    assert done.returncode == 1
    assert_one_line(done.stderr, "cannot write ")


@posix
def test_a_text_that_is_not_utf8(vindex: Path) -> None:
    done = run("tokenize", vindex, NOT_UTF8)
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_line(done.stderr, r"'caf\udce9' is not UTF-8 text; see larql tokenize --help")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux can pin a process")
def test_one_cpu(vindex: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LARQL_NUM_THREADS", raising=False)
    pin = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    assert json.loads(run("inspect", vindex, "--json", before=pin).stdout)["threads"] == 1
    command = ["generate", vindex, "a", "-n", "4", "--json"]
    one, three = (json.loads(run(*command, *more, before=pin).stdout) for more in ([], ["--threads", "3"]))
    assert (one["threads"], three["threads"]) == (1, 3)
    assert one["ids"] == three["ids"]


# Signals

SIGNAL_AT_WORK = """
import os, signal
signal.signal(signal.{name}, signal.{before})
from larql.progress import ProgressBar
ProgressBar.__call__ = lambda *_: os.kill(os.getpid(), signal.{name})
"""


@posix
@pytest.mark.parametrize(("name", "exit_code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_conversion_that_is_ended_leaves_nothing(
    gguf: Path, tmp_path: Path, cache_path: Path, name: str, exit_code: int
) -> None:
    for command in (["convert", gguf, tmp_path / "x.vindex"], ["generate", gguf, "a"]):
        done = run(*command, before=SIGNAL_AT_WORK.format(name=name, before="SIG_DFL"))
        assert (done.returncode, done.stdout, done.stderr) == (exit_code, "", f"larql: ended by {name}\n")
    assert names_in(tmp_path) == {"cache"}
    assert names_in(cache_path / "vindex") == set()


@posix
def test_what_nohup_starts_goes_on(gguf: Path, tmp_path: Path) -> None:
    at_work = SIGNAL_AT_WORK.format(name="SIGHUP", before="SIG_IGN")
    done = run("convert", gguf, tmp_path / "x.vindex", before=at_work)
    assert (done.returncode, done.stderr) == (0, "")


SIGNAL_INSTEAD_OF_AN_ANSWER = """
import os, signal
from larql.chat import Chat
Chat.stream = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
"""


@posix
def test_a_chat_that_is_ended_keeps_its_history(vindex: Path, cache_path: Path) -> None:
    pytest.importorskip("readline")
    terminal = Terminal([*program(SIGNAL_INSTEAD_OF_AN_ANSWER), "chat", str(vindex)])
    terminal.expect("> ")
    terminal.type("something\n")
    assert terminal.exit_code() == 143
    assert terminal.seen.endswith("larql: ended by SIGTERM\r\n")
    assert "something" in (cache_path / "chat_history").read_text()


# Files


@posix
def test_what_is_no_model_file_is_said(tmp_path: Path, gguf: Path) -> None:
    fifo, empty, short, folder = (tmp_path / name for name in ("fifo.gguf", "empty.gguf", "short.gguf", "folder"))
    os.mkfifo(fifo)
    empty.touch()
    short.write_bytes(gguf.read_bytes()[:-1])
    (folder / "index.json").mkdir(parents=True)
    cases = {
        fifo: f"{fifo} is no regular file; a model is ",
        Path(os.devnull): f"{os.devnull} is no regular file; a model is ",
        empty: f"{empty}: the file is empty",
        short: f"{short}: ",
        folder: f"{folder / 'index.json'} is no regular file",
        tmp_path / ("x" * 300): "cannot be read: File name too long",
        tmp_path / "no" / "x.gguf": "there is no model file",
        Path("~nobody in particular/x.gguf"): "there is no model file",
    }
    for model, text in cases.items():
        for command in (["generate", model, "a"], ["convert", model, tmp_path / "x.vindex"]):
            result = run_here(*command)
            assert (result.exit_code, result.stdout) == (1, "")
            assert_one_line(result.stderr, text)
    assert names_in(tmp_path) == {"fifo.gguf", "empty.gguf", "short.gguf", "folder"}


def test_a_file_that_goes_when_it_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "resolve", lambda *_, **__: tmp_path / "gone.gguf")
    result = run_here("generate", "gone.gguf", "a")
    assert result.exit_code == 1
    assert_one_line(result.stderr, "gone.gguf: there is no such file")


def test_what_goes_while_models_are_listed_is_left_out(
    vindex: Path, cache_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays, goes = (cache_path / "vindex" / name for name in ("a.vindex", "b.vindex"))
    for folder in (stays, goes):
        shutil.copytree(vindex, folder)
    look_at = store._state

    def look_late(folder: Path) -> tuple[str, bool]:
        state = look_at(folder)
        if folder == goes:
            shutil.rmtree(goes)
        return state

    monkeypatch.setattr(store, "_state", look_late)
    assert [item.model for item in store.stored() if item.kind == "cache"] == [str(stays)]


# Becomes another program, without root's right to files that are closed to everybody.
GIVE_UP_RIGHTS = """
import ctypes, os, sys
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def plainly(tmp_path: Path) -> list[str]:
    """What starts a program that file modes hold for, even where root runs the tests."""
    starter = []
    if sys.platform == "linux" and os.geteuid() == 0:
        starter = [sys.executable, "-c", GIVE_UP_RIGHTS]
    closed = tmp_path / "closed"
    closed.touch(mode=0)
    read = subprocess.run([*starter, sys.executable, "-c", "open(__import__('sys').argv[1])", closed], check=False)
    closed.unlink()
    if read.returncode == 0:
        pytest.skip("this user may read every file, and cannot give up that right")
    return starter


@posix
def test_what_may_not_be_read(gguf: Path, vindex: Path, tmp_path: Path, plainly: list[str]) -> None:
    model, folder = tmp_path / "x.gguf", tmp_path / "folder"
    shutil.copy(gguf, model)
    shutil.copytree(vindex, folder / "x.vindex")
    model.chmod(0)
    folder.chmod(0)
    for path in (model, folder / "x.vindex"):
        done = run("inspect", path, by=plainly)
        assert done.returncode == 1
        assert_one_line(done.stderr, "cannot be read: Permission denied")
    done = run("generate", vindex, "--file", model, by=plainly)
    assert done.returncode == 2
    assert_one_line(done.stderr, "not readable")
    folder.chmod(0o755)


@posix
def test_a_cache_that_may_not_be_written(gguf: Path, cache_path: Path, plainly: list[str]) -> None:
    command = ["generate", gguf, "a", "-n", "2"]
    cache_path.mkdir(mode=0o555)
    done = run(*command, by=plainly)
    assert done.returncode == 1
    assert_one_line(done.stderr, "Permission denied; LARQL_CACHE chooses another folder, and with --no-cache")
    assert run(*command, "--no-cache", by=plainly).returncode == 0

    cache_path.chmod(0o755)
    first = run(*command)
    for folder in [cache_path, *cache_path.iterdir()]:
        folder.chmod(0o555)
    again = run(*command, by=plainly)
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")
    for folder in [cache_path, *cache_path.iterdir()]:
        folder.chmod(0o755)


@posix
def test_a_cache_that_may_not_be_read(gguf: Path, cache_path: Path, plainly: list[str]) -> None:
    (cache_path / "vindex").mkdir(parents=True)
    (cache_path / "vindex").chmod(0)
    for command in (["models"], ["models", "--prune"], ["generate", gguf, "a"]):
        done = run(*command, by=plainly)
        assert (done.returncode, done.stdout) == (1, "")
        assert_one_line(done.stderr, "Permission denied")
        assert str(cache_path / "vindex") in done.stderr
    (cache_path / "vindex").chmod(0o755)


# Homes


@pytest.fixture
def no_cache_chosen(cache_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cache_path.exists()
    for name in ("LARQL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@posix
@pytest.mark.usefixtures("no_cache_chosen")
def test_a_home_that_is_not_there(gguf: Path, vindex: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    result = run_here("generate", gguf, "a")
    assert result.exit_code == 1
    assert_one_line(result.stderr, "Not a directory; LARQL_CACHE chooses another folder, and with --no-cache")
    for model, option in ((vindex, "--verbose"), (gguf, "--no-cache")):
        assert run_here("generate", model, "a", "-n", "2", option).exit_code == 0


@posix
@pytest.mark.usefixtures("no_cache_chosen")
def test_a_user_without_a_home(gguf: Path, vindex: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    for command in (["generate", gguf, "a"], ["models"]):
        result = run_here(*command)
        assert result.exit_code == 1
        assert_one_line(result.stderr, "that home folder is unknown; LARQL_CACHE chooses another folder, and with --no")
    for model, option in ((vindex, "--verbose"), (gguf, "--no-cache")):
        assert run_here("generate", model, "a", "-n", "2", option).exit_code == 0
    assert names_in(tmp_path) == set()


FILES_MAY_NOT_GROW = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
"""


@posix
@pytest.mark.parametrize("before", ["", FILES_MAY_NOT_GROW])
def test_a_chat_whose_history_cannot_be_kept(vindex: Path, cache_path: Path, before: str) -> None:
    if not before:
        (cache_path / "chat_history").mkdir(parents=True)
    terminal = Terminal([*program(before), "chat", str(vindex), "-n", "2"])
    terminal.expect("> ")
    terminal.type("something\n")
    terminal.expect("\n> ")
    terminal.type("/exit\n")
    assert terminal.exit_code() == 0
    comments = [line for line in terminal.seen.splitlines() if line.startswith("larql: ")]
    assert comments == ["larql: /help lists commands, /exit leaves", "larql: cut off after 2 tokens"]
    assert "Traceback" not in terminal.seen
