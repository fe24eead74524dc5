"""The talk of `larql chat`: reads messages and commands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from larql.cache import cache_folder
from larql.chat import Chat
from larql.errors import ContextError, InputError, LarqlError, ModelError
from larql.generate import GenerationConfig, TextStream

_HELP = """\
commands:
/exit           leave (also the end of input: Ctrl-D)
/reset          forget the conversation
/system TEXT    put another message before it; without TEXT, none
/help           this
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer; at the prompt it leaves.
A message that begins with / needs a space before it."""


def talk(
    chat: Chat,
    config: GenerationConfig,
    *,
    show: Callable[[TextStream], None],
    say: Callable[[str], None],
) -> None:
    """Reads messages from stdin until the end of input or /exit; answers go to `show`, everything else to `say`.

    In a terminal, lines can be edited, and earlier ones are kept in the cache folder. There an error is told and the
    talk goes on; where messages come from a file or a pipe, it is raised. So is a KeyboardInterrupt between answers.
    """
    in_terminal = sys.stdin.isatty()
    comment = say if in_terminal else _nothing
    comment("/help lists commands, /exit leaves")
    turn = 0
    with _editing() if in_terminal else contextlib.nullcontext():
        for message in _messages(in_terminal):
            try:
                if message.startswith("/"):
                    if not _obey(message, chat, say, comment):
                        return
                elif message.strip():
                    stream = chat.stream(message.strip(), _of_turn(config, turn))
                    turn += 1
                    try:
                        show(stream)
                    except KeyboardInterrupt:
                        say("stopped; once more leaves")
                    if stream.finish_reason == "length":
                        comment(f"cut off after {len(stream.ids)} tokens")
            except ContextError as error:
                if not in_terminal:
                    raise
                say(f"{error}; /reset begins a new conversation")
            except LarqlError as error:
                if not in_terminal:
                    raise
                say(str(error))


def _of_turn(config: GenerationConfig, turn: int) -> GenerationConfig:
    """With a seed, each turn draws by one of its own: the same answer again and again would be no talk."""
    return config if config.seed is None else replace(config, seed=(config.seed + turn) % 2**64)


def _nothing(_text: str) -> None:
    pass


def _obey(command: str, chat: Chat, say: Callable[[str], None], comment: Callable[[str], None]) -> bool:
    """Runs a command; whether the talk goes on. `comment` is for what only a person wants to hear."""
    name, _, argument = command.partition(" ")
    if name == "/exit":
        return False
    if name == "/reset":
        chat.reset()
        comment("a new conversation begins")
    elif name == "/system":
        chat.system = argument.strip() or None
        comment("the system message is set" if chat.system else "there is no system message now")
    elif name == "/help":
        say(_HELP)
    else:
        raise InputError(f"there is no command {name}; /help lists them")
    return True


def _messages(in_terminal: bool) -> Iterator[str]:
    """Messages until the input ends, lines that go on joined."""
    lines: list[str] = []
    while True:
        try:
            line = _line(("... " if lines else "> ") if in_terminal else None)
        except EOFError:
            if in_terminal:
                sys.stdout.write("\n")
            if lines:
                yield "\n".join(lines)
            return
        except KeyboardInterrupt:
            if in_terminal:
                sys.stdout.write("\n")
            raise
        except UnicodeDecodeError as error:
            raise InputError(f"stdin is not UTF-8 text (byte {error.start} of a line)") from error
        if line.endswith("\\"):
            lines.append(line[:-1])
            continue
        yield "\n".join([*lines, line])
        lines = []


def _line(prompt: str | None) -> str:
    if prompt is not None:
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


@contextlib.contextmanager
def _editing() -> Iterator[None]:
    """Line editing with a history, where Python has it; a history that cannot be kept is not worth an error."""
    try:
        import readline
    except ImportError:  # Windows: its console edits lines itself
        yield
        return
    with contextlib.suppress(OSError, ModelError):
        readline.read_history_file(cache_folder() / "chat_history")
    try:
        yield
    finally:
        readline.set_history_length(1000)
        with contextlib.suppress(OSError, ModelError):
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(folder / "chat_history")
