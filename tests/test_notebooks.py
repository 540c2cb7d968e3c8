"""The notebooks run from top to bottom, and are stored without output."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; pip install '.[dev]'")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed; pip install '.[dev]'")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))


def run(path, timeout=600):
    """The notebook after a run in a kernel of its own; raises where a cell does."""
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=timeout, kernel_name="python3").execute(cwd=str(path.parent))
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path, monkeypatch, tmp_path):
    if "pretrained" in path.name:
        pytest.importorskip("transformers")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # no history file in the user's home
    notebook = run(path)
    printed = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "stream"]
    assert printed


def test_notebooks_have_no_output():
    assert len(NOTEBOOKS) == 4
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), path.name
            assert cell.get("execution_count") is None, path.name


def test_a_notebook_that_fails_is_seen(tmp_path):
    path = tmp_path / "wrong.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), path)
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        run(path)
