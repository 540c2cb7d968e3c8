"""The documents are true: their code runs, numbers are the files', the tree is the tree; imports go one way, light."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fastweights"
README = (ROOT / "README.md").read_text()

# What a room may import of this package. Rooms in one set may not import each other.
LEVELS = [
    {"__init__"}, {"core"}, {"chunk_decay", "layer_scan"}, {"checks", "chunk_form", "debugging"},
    {"files", "framework", "literals", "features", "sequential"}, {"tensor_files"},
    {"fwl_checks", "fwl_config"}, {"fwl", "attention"}, {"refresh"}, {"refresh_run"},
    {"torch", "jax", "keras"}, {"text"}, {"models"}, {"training"}, {"hf"},
    {"lab", "inspect"}, {"bench", "lm"}, {"cli"}, {"__main__"},  # lm is an application: only cli imports it
]  # fmt: skip


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def level(name):
    return next(i for i, rooms in enumerate(LEVELS) if name in rooms)


def imported_rooms(source):
    """Rooms of fastweights that a module's source imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{a.name}" for a in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "fastweights":
                known = len(parts) > 1 and any(parts[1] in rooms for rooms in LEVELS)
                yield parts[1] if known else "__init__"


# Keras on JAX computes with JAX arrays, for which keras.ops lacks what a Fast Weight Layer needs
EXCEPTIONS = {"keras/framework.py": {"jax"}}


def wrong_arrows(name, source, exceptions=frozenset()):
    allowed = {name, "__init__", *exceptions}
    higher = [other for other in imported_rooms(source) if other not in allowed and level(other) >= level(name)]
    return [] if name == "__init__" else higher


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    exceptions = EXCEPTIONS.get(str(path.relative_to(PACKAGE)), frozenset())
    assert wrong_arrows(room(path), path.read_text(), exceptions) == []


def test_imports_test_can_fail():
    assert wrong_arrows("core", "from fastweights.torch import ops") == ["torch"]
    assert wrong_arrows("torch", "def f():\n    import fastweights.jax.ops") == ["jax"]
    for name in ("hf", "lab", "inspect", "bench"):
        assert wrong_arrows(name, "from fastweights.lm import training") == ["lm"]


def imported_at_once(name, source, modules):
    """Modules of the package that a module's source imports when it is itself imported: not inside functions."""
    body = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
    for node in body:
        if isinstance(node, ast.Import):
            found = [a.name for a in node.names]
        else:
            inner = [f"{node.module}.{a.name}" for a in node.names]
            found = [x if x in modules else node.module for x in inner]
        yield from (x for x in found if x in modules and x != name)


def circles(sources):
    """Modules that import each other, directly or through others, as one such circle; empty where there is none."""
    imports = {name: set(imported_at_once(name, source, sources)) for name, source in sources.items()}
    while leaves := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in leaves:
            del imports[name]
    return sorted(imports)


def test_no_module_imports_itself_through_others():
    dotted = lambda p: ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")  # noqa: E731
    assert circles({dotted(p): p.read_text() for p in PACKAGE.rglob("*.py")}) == []
    assert circles({"a": "from b import c", "b.c": "import a", "b": ""}) == ["a", "b.c"]


def loaded_by(statement):
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


# what `load` does with a run: a model is built and its weights are checked, without PyTorch's compiler
OPENED = """
from fastweights.models.run_folder import Config, LanguageModel, check_weights
check_weights(Config(), 257, LanguageModel(Config(), 257).state_dict(), "weights")
"""


def test_imports_are_light():
    heavy = {"torch", "jax", "keras", "tensorflow", "numpy", "transformers"}
    assert not heavy & set(loaded_by("import fastweights"))
    loaded = set(loaded_by("import fastweights.torch"))
    assert not {"jax", "keras", "tensorflow", "triton"} & loaded
    assert "torch" in loaded  # the check can fail
    loaded = set(loaded_by(OPENED))
    assert not {"jax", "keras", "tensorflow", "triton", "torch._dynamo"} & loaded
    assert not {"torch", "keras", "tensorflow"} & set(loaded_by("import fastweights.jax"))


def seconds(statement):
    code = f"import time; t = time.process_time(); {statement}; print(time.process_time() - t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_imports_are_quick():
    assert any(seconds("import fastweights") < 0.1 for _ in range(3))
    ours = "import torch; t = time.process_time(); import fastweights.torch"
    assert any(seconds(ours) < 0.2 for _ in range(3))


def test_readme_is_one_screen_after_another():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert any('pip install ".[torch]"' in line for line in lines[:8])
    assert any("import fastweights" in line for line in lines[:14])


TESTED_ELSEWHERE = {"huggingface.md"}  # needs transformers: test_hf.py
PAGES = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").glob("*.md")) if "```python" in p.read_text())]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in TESTED_ELSEWHERE], ids=lambda p: p.stem)
def test_code_prints_what_it_says(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert blocks
    namespace = {}
    for block in blocks:
        exec(block, namespace)
        printed = capsys.readouterr().out.splitlines()
        promised = re.findall(r"^print\(.*\)\s+# (.*)$", block, re.M)
        assert len(printed) == len(promised)
        for line, promise in zip(printed, promised, strict=True):
            assert_says(promise, line)


NARROW = [1, 2048, 4, 64, 64]
MEASURED = {  # row of the README's table -> file of benchmarks/, shape, column -> contestant
    "delta rule, H200, GPU's clock, ms": ("nvidia-h200-delta", [8, 4096, 16, 128, 128], {1: "kernel", 2: "FLA"}),
    "delta rule, two CPU cores, ms": (
        "amd-epyc-6058709-delta",
        [1, 2048, 4, 64, 64],
        {1: "chunked", 3: "Hugging Face"},
    ),
    "sum rule, two CPU cores, ms": (
        "amd-epyc-b6ea3d8-sum",
        [1, 2048, 4, 64, 64],
        {1: "chunked", 4: "fast-transformers"},
    ),
}


@pytest.mark.parametrize("row", MEASURED)
def test_readme_times_are_those_measured(row):
    file, shape, columns = MEASURED[row]
    results = json.loads((ROOT / "benchmarks" / f"{file}.json").read_text())["results"]
    (result,) = [r for r in results if r["shape"] == shape]
    cells = re.search(rf"^\| {re.escape(row)} \| (.*) \|$", README, re.M)[1].split(" | ")
    for column, contestant in columns.items():
        for said, direction in zip(cells[column - 1].split(" / "), ("forward", "forward_backward"), strict=True):
            assert float(said) == pytest.approx(result[direction][contestant]["median"], rel=0.005)


def test_readme_times_with_the_host_are_those_of_the_results_page():
    cells = re.search(r"^\| the same as a user times it, ms \| (.*?) \| (.*?) \|", README, re.M).groups()
    page = (ROOT / "docs/results/kernels-on-a-gpu.md").read_text()
    assert f"| (8, 4096, 16, 128, 128) | {cells[0]} | {cells[1]} |" in page


def test_readme_counts_the_claims_of_the_scoreboard():
    scoreboard = (ROOT / "docs/results/README.md").read_text()
    claims, reproduced = re.search(r"Of (\d+) claims: (\d+) reproduced", scoreboard).groups()
    assert f"{claims} claims, {reproduced} reproduced" in README


def assert_says(promise, line):
    """The same words; numbers may differ by what another machine's rounding does to a short training run."""
    number = r"\d+(?:\.\d+)?"
    assert re.sub(number, "#", promise).startswith(re.sub(number, "#", line))
    for got, said in zip(re.findall(number, line), re.findall(number, promise), strict=False):
        assert abs(float(got) - float(said)) <= (5 if "%" in line else 0.3), (line, promise)


def test_readme_check_can_fail():
    for line in ("recall 60% after", "recall 98% before"):
        with pytest.raises(AssertionError):
            assert_says("recall 98% after training", line)


def broken_links(path):
    """Links of a Markdown file to files that are not there."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text)
    return [link for link in links if "://" not in link and not (path.parent / link).exists()]


def test_links_lead_somewhere(tmp_path):
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    assert {str(p): links for p in pages if (links := broken_links(p))} == {}
    (tmp_path / "page.md").write_text("[a](page.md) [b](none.md#top) [c](https://example.org/x)")
    assert broken_links(tmp_path / "page.md") == ["none.md"]


def test_the_tree_is_the_tree():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = re.search(r"```\nfastweights/\n(.*?)```", text, re.S).group(1)
    listed = set(re.findall(r"^  (\S+)", tree, re.M))
    hidden = {"__init__.py", "py.typed", "__pycache__/"}
    on_disk = {p.name + "/" * p.is_dir() for p in PACKAGE.iterdir()} - hidden
    assert listed == on_disk
    for name in re.findall(r"^(\w+)/ ", tree, re.M):
        assert (ROOT / name).is_dir()
    for folder, note in re.findall(r"^  (\w+)/\s+(.*)$", tree, re.M):
        for file in re.findall(r"\w+\.py", note):
            assert (PACKAGE / folder / file).is_file(), f"{folder}/{file}"


def explained(source):
    """(lines of docstrings and comments, all lines that are not blank)."""
    lines = [line.strip() for line in source.splitlines()]
    found = sum(line.startswith("#") for line in lines)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            text = node.body[0]
            found += sum(map(bool, lines[text.lineno - 1 : text.end_lineno]))
    return found, sum(map(bool, lines))


def test_files_stay_short():
    """No file has 400 lines, and the median file has fewer than 150, explanation included."""
    lengths = [len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")]
    assert max(lengths) < 400
    assert median(lengths) < 150


def test_a_quarter_of_the_package_is_explanation():
    """Docstrings and comments over all lines that are not blank; a little less for work in progress."""
    found, total = map(sum, zip(*(explained(p.read_text()) for p in PACKAGE.rglob("*.py")), strict=True))
    assert found / total > 0.24
