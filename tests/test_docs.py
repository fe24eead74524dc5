"""Pages that are written by programs are as these would write them now."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_the_command_line_is_up_to_date() -> None:
    made = runpy.run_path(str(DOCS / "make_cli.py"))["page"]()
    assert (DOCS / "cli.md").read_text("utf-8") == made, "run: python docs/make_cli.py"
