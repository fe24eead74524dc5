"""The command line: stdout is data, everything else goes to stderr.

What a command needs is imported when it runs, so that help is there at once.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from larql.errors import InputError, LarqlError

if TYPE_CHECKING:
    from larql.generate import TextStream
    from larql.model import Model
    from larql.model_file import ModelFile

EXIT_MODEL, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
EXIT_SIGNAL = 128  # and the number of the signal

_UsageError: Any = typer.BadParameter.__base__  # of every wrong command line; typer has no name of its own for it


class Precision(str, Enum):
    """The arithmetic of a forward."""

    fast = "fast"
    reference = "reference"


class Competitor(str, Enum):
    """An engine to compare with."""

    llama_cpp = "llama.cpp"


class _Ended(SystemExit):
    """A signal has asked the program to end. As with a KeyboardInterrupt, everything cleans up on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(EXIT_SIGNAL + number)
        self.name = signal.Signals(number).name


class _Commands(TyperGroup):
    """Ends a command that fails with one line on stderr and the right exit code."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _one_line():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _one_line():
            return super().invoke(ctx)


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except LarqlError as error:
        _fail(str(error), EXIT_USAGE if isinstance(error, InputError) else EXIT_MODEL)
    except _UsageError as error:
        _fail(_usage_line(error), EXIT_USAGE)
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)
    except _Ended as end:
        _say(f"ended by {end.name}")
        raise
    except MemoryError:
        _fail("there is not enough memory for this; a smaller model, or a smaller --ctx, takes less", EXIT_MODEL)
    except BrokenPipeError:
        raise  # whoever reads has enough: typer ends quietly
    except OSError as error:
        reason = error.strerror or error
        if error.filename is not None:
            _fail(f"cannot use {error.filename}: {reason}", EXIT_MODEL)
        _discard(sys.stdout)
        _fail(f"cannot write the output: {reason}", EXIT_MODEL)


def _fail(text: str, exit_code: int) -> NoReturn:
    _say(text)
    raise typer.Exit(exit_code)


def _usage_line(error: Any) -> str:
    text = " ".join(error.format_message().split()).removesuffix(".")
    command = error.ctx.command_path if error.ctx else "larql"
    return f"{text[:1].lower()}{text[1:]}; see {command} --help"


def _utf8(argument: str | None) -> str | None:
    """The text of an argument, also where the locale knows only ASCII."""
    try:
        return None if argument is None else os.fsencode(argument).decode()
    except UnicodeError:
        raise typer.BadParameter(f"{argument!a} is not UTF-8 text") from None


def _each_utf8(arguments: list[str] | None) -> list[str | None]:
    return [_utf8(argument) for argument in arguments or ()]


app = typer.Typer(
    cls=_Commands,
    name="larql",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A .gguf file, a .vindex, hf://owner/repo[/file.gguf], or an installed model such as gemma3-270m.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to generate at most.")]
TemperatureOption = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopKOption = Annotated[int, typer.Option(help="Draw from the k most likely tokens; 0 is off.")]
TopPOption = Annotated[float, typer.Option(help="Draw from the most likely tokens of this total; 1 is off.")]
MinPOption = Annotated[float, typer.Option(help="Least probability, as a share of the highest; 0 is off.")]
RepeatPenaltyOption = Annotated[float, typer.Option(help="Above 1, recent tokens are less likely; 1 is off.")]
SeedOption = Annotated[int | None, typer.Option(help="Draw the same each time.")]
StopOption = Annotated[
    list[str] | None, typer.Option(callback=_each_utf8, help="End before this text; may be given several times.")
]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads; by default what suits the machine.")]
ContextOption = Annotated[int | None, typer.Option(help="Tokens of context; by default the model's own.")]
SystemOption = Annotated[
    str | None, typer.Option(metavar="TEXT", callback=_utf8, help="What the model is told before the talk.")
]
NoCacheOption = Annotated[bool, typer.Option("--no-cache", help="Pack a .gguf file in memory, not into the cache.")]


def main() -> None:
    """The `larql` program."""
    if sys.stdout is None:
        sys.exit("larql: standard output is closed")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? for what it lacks
    if hasattr(sys.stdin, "reconfigure"):
        is_ascii = codecs.lookup(sys.stdin.encoding).name == "ascii"  # which only means that no locale was chosen
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else sys.stdin.encoding, errors="strict")
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows lacks one
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, _end)
    app(prog_name="larql")


def _end(number: int, _: object) -> NoReturn:
    raise _Ended(number)


def _print_version(wanted: bool) -> None:
    if wanted:
        from larql._core import __version__

        typer.echo(f"larql {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _larql(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Runs quantised large language models fast on CPUs."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(EXIT_USAGE)


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", callback=_utf8, help="The text to continue; - is stdin, the default if no terminal."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Read the prompt from a file; its last line end is dropped."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Answer PROMPT as a message instead of continuing it.")] = False,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repeat_penalty: RepeatPenaltyOption = 1.0,
    seed: SeedOption = None,
    stop: StopOption = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Add each token's log-probability (--json).")] = False,
    threads: ThreadsOption = None,
    ctx: ContextOption = None,
    precision: Annotated[Precision, typer.Option(help="reference computes in f32, slowly.")] = Precision.fast,
    no_cache: NoCacheOption = False,
    as_json: JsonOption = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print timings to stderr.")] = False,
) -> None:
    """Continue a text, or answer a message."""
    text = _read_prompt(prompt, file)
    if logprobs and not as_json:
        raise InputError("--logprobs needs --json")
    if system is not None and not chat:
        raise InputError("--system needs --chat")

    from larql.generate import GenerationConfig

    config = GenerationConfig(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        seed=seed,
        stop=stop or (),
        logprobs=logprobs,
    )
    loaded = _load(model, threads=threads, ctx=ctx, precision=precision, no_cache=no_cache)
    if chat:
        _warn_of_base_model(loaded, model)
        messages = [] if system is None else [{"role": "system", "content": system}]
        stream = loaded.stream_chat([*messages, {"role": "user", "content": text}], config, progress=True)
    else:
        stream = loaded.stream(text, config, progress=True)
    if as_json:
        typer.echo(json.dumps(_as_data("".join(stream), stream, loaded)))
    else:
        _print_pieces(stream)
    if verbose:
        _tell(_timing_line(stream, loaded))


@app.command(name="chat")
def talk(
    model: ModelArgument,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = 1024,
    temperature: TemperatureOption = 0.7,
    top_k: TopKOption = 0,
    top_p: TopPOption = 0.95,
    min_p: MinPOption = 0.0,
    repeat_penalty: RepeatPenaltyOption = 1.0,
    seed: SeedOption = None,
    stop: StopOption = None,
    threads: ThreadsOption = None,
    ctx: ContextOption = None,
    precision: Annotated[Precision, typer.Option(help="reference computes in f32, slowly.")] = Precision.fast,
    no_cache: NoCacheOption = False,
) -> None:
    """Talk with a model: each line of the input is a message. /help lists commands."""
    _check_stdin()

    from larql.chat import Chat
    from larql.chat_console import talk as run
    from larql.generate import GenerationConfig

    config = GenerationConfig(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        seed=seed,
        stop=stop or (),
    )
    loaded = _load(model, threads=threads, ctx=ctx, precision=precision, no_cache=no_cache)
    _warn_of_base_model(loaded, model)
    run(Chat(loaded, system=system), config, show=_print_pieces, say=_say)


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A .gguf file, hf://owner/repo[/file.gguf], or an installed model.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make, such as model.vindex.")],
) -> None:
    """Pack a model into a .vindex, which opens at once."""
    from larql.convert import convert as write
    from larql.convert import is_from
    from larql.progress import ProgressBar
    from larql.source import open_gguf

    file = open_gguf(source)
    try:
        with ProgressBar(f"converting {source}") as progress:
            write(file, target, progress)
    except FileExistsError:
        if not is_from(target, file):
            raise InputError(f"{target} exists; remove it, or choose another name") from None
        _say(f"{target} is there already, made from the same file; `larql verify` checks its content")
    except OSError as error:
        raise LarqlError(f"cannot write {target}: {error.strerror or error}") from error


@app.command()
def verify(
    model: ModelArgument,
    source: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Compare it with this .gguf file, too.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read all of a .vindex and compare it with what it should be; that of a .gguf file is the one in the cache."""
    from larql.verify import as_table
    from larql.verify import verify as check
    from larql.vindex import VindexFolder

    opened = _open(model, cache=True)
    assert isinstance(opened, VindexFolder)
    facts = check(opened, source or opened.gguf_path)
    typer.echo(json.dumps(facts) if as_json else as_table(facts))


@app.command()
def models(
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove from the cache what nothing will use again, and list that.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the models at hand: installed packages, the cache of converted models, the Hub's cache."""
    from larql import store

    items = store.prune() if prune else store.stored()
    if as_json:
        typer.echo(json.dumps(store.as_data(items)))
    elif items:
        typer.echo(store.as_table(items))
    else:
        _say("there is nothing to remove")


@app.command()
def inspect(model: ModelArgument, no_cache: NoCacheOption = False, as_json: JsonOption = False) -> None:
    """Show what a model file holds and how it would run here."""
    from larql.inspect import as_table, describe
    from larql.model_file import make_engine

    file = _open(model, cache=not no_cache)
    facts = describe(file, make_engine(file))
    typer.echo(json.dumps(facts) if as_json else as_table(facts))


@app.command()
def tokenize(
    model: ModelArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", callback=_utf8, help="The text; - reads stdin.")],
    no_cache: NoCacheOption = False,
    as_json: JsonOption = False,
    bos: Annotated[bool, typer.Option("--bos/--no-bos", help="Put BOS in front where the model wants it.")] = True,
    special: Annotated[
        bool, typer.Option("--special/--no-special", help="Read the text of control tokens as these tokens.")
    ] = True,
) -> None:
    """Show the tokens of a text: ids, and as the vocabulary writes them."""
    text = _read_prompt(text, None)
    tokenizer = _open(model, cache=not no_cache).tokenizer
    ids = tokenizer.encode(text, bos=None if bos else False, special=special)
    pieces = [tokenizer.token_text(token) for token in ids]
    if as_json:
        typer.echo(json.dumps({"ids": ids, "pieces": pieces}))
    else:
        for token, piece in zip(ids, pieces, strict=True):
            typer.echo(f"{token:>8}  {json.dumps(piece, ensure_ascii=False)}")


@app.command()
def bench(
    model: ModelArgument,
    cpu: Annotated[  # noqa: ARG001
        bool, typer.Option("--cpu", help="Run on the CPU, the only backend there is.", show_default=False)
    ] = True,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens to decode in a run; none ends it.")] = 16,
    warmup: Annotated[int, typer.Option(help="Runs that do not count.")] = 1,
    repeat: Annotated[int, typer.Option(help="Runs that count; the medians are reported.")] = 5,
    prompt: Annotated[
        str | None, typer.Option(callback=_utf8, help="The text to begin with, repeated where it is too short.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the long prefill.")] = 512,
    depth: Annotated[int | None, typer.Option(help="Tokens in the cache when decoding begins.")] = None,
    threads: Annotated[str | None, typer.Option(help="Threads, or several numbers of them: 1,2.")] = None,
    precision: Annotated[Precision, typer.Option(help="reference computes in f32, slowly.")] = Precision.fast,
    profile: Annotated[bool, typer.Option("--profile", help="Show what the stages of a forward take.")] = False,
    compare: Annotated[Competitor | None, typer.Option(help="Measure this engine in turn with ours.")] = None,
    note: Annotated[str | None, typer.Option(help="What this measurement is of, for the record.")] = None,
    no_cache: NoCacheOption = False,
    as_json: JsonOption = False,
    output_file: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the JSON object there, too.")] = None,
) -> None:
    """Measure speed: prefill, decoding, share of what the memory allows."""
    if output_file and not output_file.absolute().parent.is_dir():
        raise InputError(f"--output-file: there is no folder {output_file.parent}")

    from larql.bench import PROMPT, BenchSettings
    from larql.bench import bench as measure
    from larql.bench_table import as_table
    from larql.progress import ProgressBar

    settings = BenchSettings(
        tokens=tokens,
        warmup=warmup,
        repeat=repeat,
        prompt=PROMPT if prompt is None else prompt,
        prompt_tokens=prompt_tokens,
        depth=depth,
        threads=_thread_counts(threads),
        precision=precision.value,
        profile=profile,
        compare=compare is not None,
    )
    with ProgressBar(f"converting {model}") as progress:
        record = measure(model, settings, note=note, say=_say, cache=not no_cache, progress=progress)
    typer.echo(json.dumps(record) if as_json else as_table(record))
    if output_file:
        _write(output_file, json.dumps(record, indent=1) + "\n")


@app.command()
def roofline(
    repeat: Annotated[int, typer.Option(help="Rounds; the medians are reported.")] = 5,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Draw the result into this file (.png).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what this machine's memory and arithmetic can do, by the number of threads."""
    from larql.plots import load_plotting
    from larql.roofline import as_table, measure, save_plot

    if plot:
        load_plotting()  # a missing package is found out before the minutes of measuring
    result = measure(repeat, say=_say)
    typer.echo(json.dumps(result) if as_json else as_table(result))
    if plot:
        save_plot(result, plot)


@app.command()
def ladder(
    model: ModelArgument,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens that a rung writes, if it is fast.")] = 32,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Draw the climb into this file (.png).")] = None,
    as_json: JsonOption = False,
    output_file: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the JSON object there, too.")] = None,
) -> None:
    """Climb from a naive decoder to LARQL, one measured step at a time."""
    from larql.ladder import as_table, climb, save_plot
    from larql.plots import load_plotting
    from larql.progress import ProgressBar

    if plot:
        load_plotting()  # a missing package is found out before the minutes of measuring
    with ProgressBar(f"converting {model}") as progress:
        record = climb(model, tokens=tokens, say=_say, progress=progress)
    typer.echo(json.dumps(record) if as_json else as_table(record))
    if plot:
        save_plot(record, plot)
    if output_file:
        _write(output_file, json.dumps(record, indent=1) + "\n")


@app.command(name="eval")
def evaluate(
    model: ModelArgument,
    text: Annotated[
        Path | None,
        typer.Argument(metavar="TEXT", exists=True, dir_okay=False, help="A file; by default a text of our own."),
    ] = None,
    threads: ThreadsOption = None,
    precision: Annotated[Precision, typer.Option(help="What to compare to reference.")] = Precision.fast,
    no_cache: NoCacheOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a precision's error on a text: perplexity, and distance from f32 arithmetic."""
    content = None if text is None else _read_text(text)

    from larql.evaluate import evaluate as measure
    from larql.progress import ProgressBar

    with ProgressBar(f"converting {model}") as progress:
        report = measure(
            model, content, precision=precision.value, threads=threads, cache=not no_cache, progress=progress
        )
    typer.echo(json.dumps(report.as_data()) if as_json else report.as_table())


def _open(model: str, *, cache: bool) -> ModelFile:
    from larql.progress import ProgressBar
    from larql.source import open_model

    with ProgressBar(f"converting {model}") as progress:
        return open_model(model, cache=cache, progress=progress)


def _load(model: str, *, threads: int | None, ctx: int | None, precision: Precision, no_cache: bool) -> Model:
    from larql.model import load

    return load(model, threads=threads, context=ctx, precision=precision.value, cache=not no_cache, progress=True)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """The text from the argument, stdin or a file; of the latter two, one line end at the very end is dropped."""
    if prompt is not None and file is not None:
        raise InputError("give either PROMPT or --file")
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and file is None:
        text = "" if sys.stdin is None or sys.stdin.isatty() else _read_text(None)
        if not text:
            raise InputError("there is no prompt; give PROMPT or --file, or write it to stdin")
    else:
        text = _read_text(file)
    return text.removesuffix("\n").removesuffix("\r")


def _read_text(file: Path | None) -> str:
    """The text of a file or of stdin."""
    if file is None:
        _check_stdin()
    try:
        data = file.read_bytes() if file else sys.stdin.buffer.read()
        return data.decode()
    except OSError as error:
        raise InputError(f"{file or 'stdin'} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file or 'stdin'} is not UTF-8 text (byte {error.start})") from error


def _check_stdin() -> None:
    if sys.stdin is None:
        raise InputError("standard input is closed")


def _thread_counts(text: str | None) -> tuple[int, ...]:
    """The numbers of a list with commas."""
    parts = text.split(",") if text is not None else []
    if not all(part.strip().isdigit() and int(part) >= 1 for part in parts):
        raise InputError(f"--threads: {text!r} is no list of thread counts such as 1,2")
    return tuple(map(int, parts))


def _say(text: str) -> None:
    _tell(f"larql: {text}")


def _tell(text: str) -> None:
    """Writes to stderr; when that fails, there is nobody to be told."""
    try:
        typer.echo(text, err=True)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Drops what is in a stream's buffer: what could not be written cannot be written at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise LarqlError(f"cannot write {path}: {error.strerror or error}") from error


def _warn_of_base_model(model: Model, name: str) -> None:
    if not model.chat_format.has_template:
        _say(f"{name} has no chat template, so it may only continue texts; it gets the usual one for its vocabulary")


def _print_pieces(stream: TextStream) -> None:
    """Prints text as it comes; the line is ended also when an interrupt ends the text."""
    try:
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def _as_data(text: str, stream: TextStream, model: Model) -> dict[str, Any]:
    data = {
        "prompt_ids": stream.prompt_ids,
        "ids": stream.ids,
        "text": text,
        "finish_reason": stream.finish_reason,
        "timings": asdict(stream.timings),
        "threads": model.engine.threads,
        "isa": model.engine.isa,
    }
    return data if stream.logprobs is None else data | {"logprobs": stream.logprobs}


def _timing_line(stream: TextStream, model: Model) -> str:
    timings, engine = stream.timings, model.engine
    decode = f" at {timings.decode_tok_s:.1f} tok/s" if timings.decode_tok_s else ""
    return (
        f"loaded in {timings.load_s:.2f} s, "
        f"{len(stream.prompt_ids)} prompt tokens at {timings.prefill_tok_s:.1f} tok/s, "
        f"{len(stream.ids)} new tokens{decode}, {engine.threads} threads, {engine.isa}, {engine.precision}"
    )
