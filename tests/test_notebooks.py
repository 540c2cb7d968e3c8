"""The notebooks run from top to bottom, and are stored without output."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; pip install '.[dev]'")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed; pip install '.[dev]'")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))


def run(*paths, timeout=600):
    """The notebooks after a run; raises where a cell does.

    One kernel runs all of them, which imports torch once; before each it forgets every name of those before.
    """
    notebooks = [nbformat.read(path, as_version=4) for path in paths]
    together = nbformat.v4.new_notebook()
    together.cells = [c for n in notebooks for c in (nbformat.v4.new_code_cell("%reset -f"), *n.cells)]
    client = nbclient.NotebookClient(together, timeout=timeout, kernel_name="python3")
    client.execute(cwd=str(paths[0].parent))
    return notebooks


def test_notebooks_run(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # no history file in the user's home
    for path, notebook in zip(NOTEBOOKS, run(*NOTEBOOKS), strict=True):
        outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
        assert [o for o in outputs if o.output_type == "stream"], path.name


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
