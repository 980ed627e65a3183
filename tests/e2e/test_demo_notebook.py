"""The demo's notebook: every cell is checked as it stands, and `make test-all` runs them all."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs_site.blocks import ROOT, Block, find_fault

NOTEBOOK = ROOT / "docs" / "demo.ipynb"
COMMAND = re.compile(r"^!", re.MULTILINE)
MOST_CELLS = 30


def read_cells(kind: str) -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == kind]


def test_the_notebook_is_one_of_format_4_without_outputs():
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert text == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    cells = notebook["cells"]
    ids = [cell["id"] for cell in cells]
    assert len(set(ids)) == len(ids) <= MOST_CELLS
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell_id) for cell_id in ids)
    common = {"cell_type", "id", "metadata", "source"}
    for cell in cells:
        assert cell["metadata"] == {}
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        if cell["cell_type"] == "code":
            assert set(cell) == common | {"execution_count", "outputs"}
            assert cell["execution_count"] is None
            assert cell["outputs"] == []
        else:
            assert cell["cell_type"] == "markdown"
            assert set(cell) == common


@pytest.mark.parametrize("cell", read_cells("code"), ids=lambda cell: cell["id"])
def test_a_cell_is_sound_as_it_stands(cell):
    """Commands stand alone in their cells, so that their exit codes can be seen."""
    source, place = "".join(cell["source"]), f"{NOTEBOOK.name}: {cell['id']}"
    if source.startswith("!"):
        assert len(COMMAND.findall(source)) == len(source.splitlines()) == 1
        block = Block(place, 1, "sh", source[1:], "", "")
    else:
        compile(source, place, "exec")
        block = Block(place, 1, "python", source, "", "")
    assert find_fault(block) is None


def test_links_of_the_notebook_lead_somewhere():
    text = "".join(line for cell in read_cells("markdown") for line in cell["source"])
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert links
    assert not [link for link in links if not (NOTEBOOK.parent / link).exists()]
    for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md"):
        assert f"({os.path.relpath(NOTEBOOK, page.parent)})" in page.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_cells_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "the group `docs` is not installed"
    nbformat = pytest.importorskip("nbformat", reason=reason)
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source.startswith("!"):
            cell.source += "\nassert _exit_code == 0"
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    shown = {
        cell.id: output.data["text/plain"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "execute_result"
    }
    assert len(_read_rows(shown["top-10"])) == 10
    scores = {row[0]: float(row[1]) for row in _read_rows(shown["metrics"])}
    assert scores["model"] > max(scores["popularity"], scores["random"])
    assert float(_read_rows(shown["neighbours"])[0][-1]) == pytest.approx(1, abs=1e-4)
    losses = [float(row[1]) for row in _read_rows(shown["curves"])]
    assert losses[-1] < losses[0]


def _read_rows(table: str) -> list[list[str]]:
    """The rows of a printed table, below its header."""
    rows = [line.split() for line in table.splitlines()]
    return [row for row in rows if len(row) > 1 and re.fullmatch(r"-?[\d.]+", row[-1])]
