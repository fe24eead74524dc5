"""The notebooks under docs/ run from top to bottom, and a notebook shows models, texts and progress as it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs/notebooks"
NAMES = [path.stem for path in sorted(FOLDER.glob("*.ipynb"))]


def run(notebook: Any, folder: Path) -> Any:
    """Fills in the outputs; a cell that raises fails the test."""
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    return notebook


def run_cells(folder: Path, *sources: str) -> list[list[Any]]:
    """The outputs of each of some cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    return [cell.outputs for cell in run(notebook, folder).cells]


@pytest.mark.usefixtures("gemma_path", "smollm_path")
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "outputs are made by whoever runs it"
    run(notebook, tmp_path)
    assert list(tmp_path.iterdir()) == []
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_a_model_is_a_table_and_a_result_its_text(smollm_path: Path, tmp_path: Path) -> None:
    load = f"import larql; model = larql.load({str(smollm_path)!r}, threads=2)"
    model, result, stream, closed = run_cells(
        tmp_path,
        f"{load}; model",
        "model.generate('2 < 3 and', max_tokens=4)",
        "model.stream('Once upon a time', max_tokens=6)",
        "model.close(); model",
    )
    assert "135 M parameters" in model[-1].data["text/html"]
    assert result[-1].data["text/html"].startswith("<div")
    assert "4 written at" in result[-1].data["text/html"]
    text = "".join(output.text for output in stream)
    assert "6 written at" in text
    assert {output.name for output in stream} == {"stdout"}
    assert "closed" in closed[-1].data["text/html"]


def test_a_bar_is_shown_and_goes(tmp_path: Path) -> None:
    make = "from larql.progress import ProgressBar; bar = ProgressBar('reading <it>')"
    halfway, done, early = run_cells(
        tmp_path,
        f"{make}; bar(1, 4)",
        f"{make}; bar(1, 4); bar(4, 4)",
        f"{make.replace(')', ', after=60)')}; bar(1, 4)",
    )
    assert halfway[0].data["text/html"] == 'reading &lt;it&gt; <progress value="1" max="4"></progress> 25%'
    assert done[0].data["text/html"] == ""
    assert early == []
