"""Which module may use which, in Rust and in Python, and what must not appear where.

The tables are the rules; ARCHITECTURE.md says why. The scanners read text and syntax trees only: they import nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# A top-level Rust module (with its submodules) to the modules it may use.
RUST = {
    "error": "",
    "config": "error",
    "quant": "error",
    "kernels": "pack quant error",
    "mapped": "error",
    "gguf": "mapped quant error",
    "pack": "quant",
    "cores": "",
    "team": "cores error",
    "profile": "team",
    "roofline": "team kernels error",
    "sampler": "error",
    "memory": "error",
    "vindex": "gguf mapped pack team quant error",
    "weights": "vindex memory pack gguf kernels team quant config error",
    "activations": "team kernels",
    "matmul": "activations weights pack team kernels",
    "ops": "kernels config",
    "batch": "",
    "kv_cache": "kernels config error",
    "attention": "batch kv_cache team kernels",
    "model": "activations attention batch kv_cache ops matmul profile team weights kernels config error",
    "engine": "model attention batch kv_cache profile team weights kernels config error",
    "ladder": ("engine activations batch kv_cache matmul ops team weights gguf quant kernels config error"),
    "python": (
        "ladder engine activations batch kv_cache matmul sampler profile roofline team weights vindex gguf quant "
        "kernels config error"
    ),
}

# The same for Python; imports that only the type checker sees count too. Every module may import `larql.errors`.
PYTHON = {
    "errors": "",
    "config": "",
    "families": "config",
    "progress": "",
    "files": "",
    "cache": "files",
    "packaged": "cache files",
    "pretokenizers": "",
    "spm_merges": "",
    "tokenizer": "spm_merges pretokenizers",
    "machine": "",
    "plots": "",
    "roofline": "plots machine cache files _core",
    "model_file": "roofline tokenizer families config _core",
    "gguf_file": "tokenizer cache families config _core",
    "typed_json": "",
    "vindex": "typed_json tokenizer files families config _core",
    "convert": "vindex gguf_file model_file progress typed_json files _core",
    "verify": "vindex gguf_file model_file",
    "hub": "",
    "source": "convert vindex gguf_file model_file progress packaged hub cache files",
    "store": "vindex packaged hub cache files",
    "session": "progress _core",
    "session_file": "session files",
    "generate": "session progress tokenizer _core",
    "chat_template": "",
    "chat_format": "chat_template tokenizer",
    "inspect": "vindex model_file _core",
    "trace": "session plots tokenizer _core",
    "kernels": "_core",
    "model": ("chat_format chat_template generate trace session_file session inspect source model_file progress _core"),
    "chat": "model generate progress",
    "evaluate": "model session source model_file progress _core",
    "peer_worker": "",
    "peer": "",
    "contest": "peer model _core",
    "figures": "contest model config",
    "bench": "figures contest peer roofline machine inspect model source model_file progress _core",
    "bench_table": "",
    "ladder": "bench figures plots roofline machine model source progress _core",
    "__init__": "chat model generate trace session kernels _core",
    "chat_console": "chat model generate cache",
    "cli": (
        "ladder plots store chat_console chat progress bench_table bench roofline evaluate inspect model generate "
        "verify convert source vindex model_file cache _core"
    ),
}
# The modules at the end of the chains: nothing imports them.
PYTHON_ENDS = {"__init__", "cli"}


class Absence(NamedTuple):
    """Code that may appear in the named files only; a name that ends with / is a folder."""

    what: str
    pattern: str
    allowed: str
    in_tests: bool = True  # whether it holds in Rust's test code, too
    in_strings: bool = False


RUST_ABSENCES = (
    Absence("only python.rs knows Python", r"\b(pyo3|numpy|Py[A-Z]\w*)\b", "python.rs python/"),
    Absence("only team.rs starts threads", r"\brayon\b|\bthread\s*::\s*(spawn|scope|Builder|[{*])", "team.rs ladder/"),
    Absence("few modules open files", r"\bFile\s*::|\bfs\s*::(?!File;)", "mapped.rs vindex.rs cores.rs", False),
    Absence("memory is mapped in few places", r"\bmemmap2\b", "mapped.rs memory.rs"),
    Absence("few modules call the system's library", r"\blibc\b", "mapped.rs memory.rs cores.rs"),
    Absence(
        "only the kernels know instruction sets",
        r"\b(std|core)\s*::\s*(arch|simd)\b|\btarget_(feature|arch)\b|\bis_\w+_feature_detected\b|\basm!",
        "kernels/ ladder.rs ladder/",
    ),
    Absence(
        "unsafe code is in few files",
        r"\bunsafe\b",
        "activations.rs attention.rs cores.rs kernels/ ladder/avx2.rs mapped.rs matmul.rs quant/blocks.rs team.rs",
    ),
    Absence(
        "the environment is read in few places",
        r"\benv\s*::",
        "team.rs kernels/mod.rs kernels/prefetch.rs",
        in_tests=False,
    ),
    Absence("no code knows a model family", r"(?i)gemma|qwen|llama|smollm", "", in_tests=False, in_strings=True),
    Absence("the library prints nothing", r"\b(e?print(ln)?|dbg)!", "", in_tests=False),
    Absence(
        "functions of the platform's mathematics library differ by a bit between machines",
        r"\.\s*(exp|exp2|exp_m1|ln|ln_1p|log|log2|log10|powf|powi|sin|cos|tan|sin_cos|sinh|cosh|tanh|cbrt|hypot)\(",
        "",
        in_tests=False,
    ),
)

PYTHON_ABSENCES = (
    # Patterns are matched with imported modules, dotted.
    Absence("only cli.py and progress.py talk to a terminal", r"typer(\..*)?|rich(\..*)?", "cli.py progress.py"),
    Absence("only the tokenizer knows the tokenizers package", r"tokenizers(\..*)?", "tokenizer.py pretokenizers.py"),
    Absence("nothing opens the network", r"(socket|ssl|http|urllib|requests|httpx)(\..*)?", ""),
    Absence(
        "only measurements start processes",
        r"(subprocess|multiprocessing|concurrent)(\..*)?",
        "evaluate.py machine.py peer.py",
    ),
)


class Use(NamedTuple):
    """One module's use of another: where it stands, and what of it is used."""

    line: int
    module: str
    item: str


# Rust


def blank(source: str, start: int, end: int) -> str:
    """`source` with spaces instead of everything but line ends from `start` to `end`."""
    return source[:start] + re.sub(r"[^\n]", " ", source[start:end]) + source[end:]


def rust_code(source: str, *, strings: bool = False) -> str:
    """Rust source without comments, and without the text of strings unless `strings`; lines keep their numbers."""
    token = re.compile(
        r"""//[^\n]* | /\*.*?\*/ | b?r(\#*)".*?"\1 | b?"(?:[^"\\]|\\.)*" | b?'(?:[^'\\\n]|\\[^\n]{1,9}?)'""",
        re.VERBOSE | re.DOTALL,
    )
    for match in token.finditer(source):
        if match[0].startswith("/") or not strings:
            source = blank(source, *match.span())
    return source


def without_tests(code: str) -> str:
    """Code from `rust_code` without its `#[cfg(test)]` modules."""
    while match := re.search(r"#\[cfg\(test\)\]\s*mod\s+\w+\s*\{", code):
        depth, end = 1, match.end()
        while depth and end < len(code):
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            end += 1
        code = blank(code, match.start(), end)
    return code


def rust_module(path: Path) -> str:
    """The top-level module that a file, relative to rust/, belongs to."""
    return path.with_suffix("").parts[0]


def rust_uses(code: str, module: str) -> Iterator[Use]:
    """The uses of other top-level modules in code from `rust_code`, through `crate::` and `super::`."""
    for match in re.finditer(r"(?<!\$)\b(?:crate\s*::\s*|(?:super\s*::\s*)+)(?!super)", code):
        line = code.count("\n", 0, match.start()) + 1
        for used, items in path_heads(code[match.end() :]):
            if match[0].startswith("super") and used not in RUST:
                continue  # something of the module itself
            if used != module:
                yield from (Use(line, used, item) for item in items)


def path_heads(text: str) -> Iterator[tuple[str, list[str]]]:
    """The first segments of the paths at the start of `text`, which may be a group, each with the second ones."""
    for path in group(text) if text.startswith("{") else [text]:
        head = re.match(r"\s*(?:r#)?(\w+|\*)\s*(?:::\s*)?", path)
        assert head, f"not a path: {path[:40]!r}"
        rest = path[head.end() :]
        if rest.startswith("{"):
            items = [item.split()[0].split(":")[0] for item in group(rest) if item.strip()]
        else:
            second = re.match(r"\w+|\*", rest) if head[0].rstrip().endswith("::") else None
            items = [second[0] if second else "self"]
        yield head[1], items


def group(text: str) -> list[str]:
    """The elements of the `{..}` group that `text` starts with."""
    depth, start, elements = 0, 1, []
    for i, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0 or (depth == 1 and character == ","):
            elements.append(text[start:i])
            start = i + 1
        if depth == 0:
            break
    return [element for element in elements if element.strip()]


def rust_violations(path: Path, source: str) -> Iterator[str]:
    """What is wrong in a file of rust/, `path` relative to it, as file:line and the rule."""
    module, code = rust_module(path), rust_code(source)
    if module != "lib":
        if module not in RUST:
            yield f"rust/{path}:1: module {module} is not in the table of this test"
            return
        for use in rust_uses(code, module):
            if use.module not in RUST[module].split():
                yield f"rust/{path}:{use.line}: {module} may not use {use.module} ({use.item})"
    is_test = path.stem == "tests"
    for rule in RUST_ABSENCES:
        if allowed(path, rule) or (is_test and not rule.in_tests):
            continue
        text = rust_code(source, strings=rule.in_strings)
        for match in re.finditer(rule.pattern, text if rule.in_tests else without_tests(text)):
            line = source.count("\n", 0, match.start()) + 1
            yield f"rust/{path}:{line}: {match[0]!r}, but {rule.what}"


def allowed(path: Path, rule: Absence) -> bool:
    names = rule.allowed.split()
    return any(path.as_posix() == name or (name[-1] == "/" and path.as_posix().startswith(name)) for name in names)


# Python


def python_module(path: Path) -> str:
    """The module of larql, or the package in it, that a file, relative to python/larql, belongs to."""
    return path.with_suffix("").parts[0]


def python_imports(source: str) -> Iterator[tuple[int, str]]:
    """Every import statement of a file, wherever it stands: line, and module, dotted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = [alias.name for alias in node.names] if base == "larql" else []
            yield from ((node.lineno, f"larql.{name}") for name in names)
            if not names:
                yield node.lineno, base


def python_violations(path: Path, source: str) -> Iterator[str]:
    """What is wrong in a file of python/larql, `path` relative to it, as file:line and the rule."""
    module, place = python_module(path), f"python/larql/{path}"
    if module not in PYTHON:
        yield f"{place}:1: module {module} is not in the table of this test"
        return
    may_use = {module, "errors", *PYTHON[module].split()}
    for line, name in python_imports(source):
        parts = name.split(".")
        if parts[0] == "":
            yield f"{place}:{line}: relative import {name}; write larql.{name.lstrip('.')}"
        elif parts[0] == "larql" and (parts[1] if len(parts) > 1 else "__init__") not in may_use:
            yield f"{place}:{line}: {module} may not import {name}"
        for rule in PYTHON_ABSENCES:
            if re.fullmatch(rule.pattern, name) and not allowed(path, rule):
                yield f"{place}:{line}: import of {name}, but {rule.what}"


# Tests


def assert_none(violations: Iterable[str]) -> None:
    found = list(violations)
    assert not found, "\n" + "\n".join(found)


def in_tree(folder: str, suffix: str) -> list[tuple[Path, str]]:
    base = ROOT / folder
    files = sorted(base.rglob(f"*{suffix}"))
    assert len(files) > 10, f"{folder} does not hold what it should"
    return [(path.relative_to(base), path.read_text("utf-8")) for path in files]


def test_rust() -> None:
    assert_none(violation for file in in_tree("rust", ".rs") for violation in rust_violations(*file))


def test_python() -> None:
    assert_none(violation for file in in_tree("python/larql", ".py") for violation in python_violations(*file))


@pytest.mark.parametrize("table", [RUST, PYTHON], ids=["rust", "python"])
def test_the_directions_have_no_circle(table: Mapping[str, str]) -> None:
    graph = {module: used.split() for module, used in table.items()}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    unknown = set(order) - set(table) - {"_core"}
    assert not unknown
    assert not PYTHON_ENDS & {used for users in graph.values() for used in users}


@pytest.mark.parametrize(
    ("path", "source", "line"),
    [
        ("kernels/scalar.rs", "use crate::quant::DType;\nuse crate::model::Forward;", 2),
        ("ops.rs", "use crate::{\n    config::RopeConfig,\n    engine::{self, Engine},\n};", 1),
        ("team.rs", "fn f() {\n    crate::sampler::go()\n}", 2),
        ("quant/blocks.rs", "\nuse super::super::gguf::Gguf;", 2),
        ("ops.rs", "use super::{matmul, config};", 1),
        ("weights.rs", "mod tests {\n    use crate::attention;\n}", 2),
        ("attention.rs", "use crate::engine::{BatchItem, Engine};", 1),
        ("attention.rs", "use crate::*;", 1),
        ("new.rs", "", 1),
        ("engine.rs", "/* a\n comment */ use pyo3::prelude::*;", 2),
        ("model.rs", "fn f() {\n    std::thread::spawn(|| ());\n}", 2),
        ("matmul.rs", "use rayon::prelude::*;", 1),
        ("weights.rs", "let x = std::fs::File::open(path);", 1),
        ("matmul.rs", '#[target_feature(enable = "avx2")]', 1),
        ("ops.rs", "let s = 'a';\nunsafe { f() }", 2),
        ("engine.rs", 'let x = std::env::var("X");', 1),
        ("model.rs", 'if name == "gemma3" {}', 1),
        ("engine.rs", 'println!("{x}");', 1),
        ("ops.rs", "#[cfg(test)]\nmod tests { fn f() { 1.0.sin(); } }\nfn g(x: f64) -> f64 { x.sin() }", 3),
    ],
)
def test_a_planted_violation_in_rust_is_found(path: str, source: str, line: int) -> None:
    found = list(rust_violations(Path(path), source))
    assert found
    assert all(violation.startswith(f"rust/{path}:{line}: ") for violation in found)


def test_what_rust_allows_passes() -> None:
    source = """
        //! crate::engine, pyo3, unsafe
        use crate::{quant::DType, error};
        use super::math;
        /* use crate::model; */
        const TEXT: &str = "crate::model \\" unsafe"; const RAW: &str = r#"a " unsafe"#; const QUOTE: char = '"';
        fn f<'a>(x: &'a str) { $crate::error::Error::new(x) }
        #[cfg(test)]
        mod tests { fn f() { assert_eq!(1.0.exp(), 0.0); println!("gemma"); } }
    """
    assert_none(rust_violations(Path("kernels/scalar.rs"), source))


@pytest.mark.parametrize(
    ("path", "source", "line"),
    [
        ("session.py", "import json\nfrom larql.cli import main", 2),
        ("errors.py", "import larql.config", 1),
        ("tokenizer.py", "from larql import errors, model", 1),
        ("config.py", "def f():\n    from larql.families import gemma3", 2),
        ("families/gemma3.py", "from larql.source import open_model", 1),
        ("families/gemma3.py", "if TYPE_CHECKING:\n    from larql._core import Gguf", 2),
        ("generate.py", "from larql import load", 1),
        ("model.py", "import larql", 1),
        ("model.py", "from .session import Session", 1),
        ("new.py", "", 1),
        ("model.py", "import typer", 1),
        ("model.py", "from tokenizers.models import BPE", 1),
        ("cache.py", "import urllib.request", 1),
        ("source.py", "\nimport subprocess", 2),
    ],
)
def test_a_planted_violation_in_python_is_found(path: str, source: str, line: int) -> None:
    found = list(python_violations(Path(path), source))
    assert found
    assert all(violation.startswith(f"python/larql/{path}:{line}: ") for violation in found)
