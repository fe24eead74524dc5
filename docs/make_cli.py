"""Writes docs/cli.md from the command line's own description; tests/test_docs.py checks that it was run.

usage: python docs/make_cli.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from larql.cli import app

PAGE = Path(__file__).parent / "cli.md"
HEAD = """\
# The command line

Written by docs/make_cli.py from what `larql --help` and `larql COMMAND --help` say. Standard output is the result
alone, everything else goes to stderr. The exit code is 0, or 1 for a model that cannot be used, and for output that
cannot be written or that nobody reads; 2 for a wrong argument; and 128 and its number for a signal: 130 for an
interrupt, 143 for SIGTERM.
"""


def page() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(app)
    parts = [HEAD]
    for name, command in sorted(group.commands.items()):
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        options = [param for param in command.params if param.param_type_name == "option"]
        words = [usage(argument) for argument in arguments]
        parts.append(f"## larql {name}\n\n`larql {' '.join([name, *words])}`\n\n{command.help.strip()}\n")
        rows = [(f"`{argument.metavar or argument.name.upper()}`", argument.help, "") for argument in arguments]
        rows += [row(option) for option in options if not option.hidden]
        if rows:
            parts.append("\n".join(["| | | default |", "|---|---|---|", *map(line, rows)]) + "\n")
    return "\n".join(parts)


def usage(argument: Any) -> str:
    """An argument as it stands in a usage line."""
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def row(option: Any) -> tuple[str, str, str]:
    """Names, help and default of an option."""
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    default = getattr(option.default, "value", option.default)
    plain = default is None or default == () or option.is_flag
    return names, option.help or "", "" if plain else f"{default}"


def line(cells: tuple[str, str, str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
