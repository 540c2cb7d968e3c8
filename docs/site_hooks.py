"""What `mkdocs build` does for this site beyond Markdown.

- Pages of the reference are made from each module's `__all__`, so that no public name can be missing.
- Notebooks become pages.
- Formulas become MathML, which browsers show without any script.
- A folder in the navigation stands for its pages; a page that is not there is left out, one that it forgets is added.
"""

import ast
import json
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "fastweights"
REFERENCE = {  # page -> (title, what it says first, module)
    "fastweights": ("fastweights", "What all frameworks share.", "fastweights"),
    "torch": ("PyTorch", "`import fastweights.torch as fw`", "fastweights.torch"),
    "jax": ("JAX and Flax", "`import fastweights.jax as fw`; layers are `flax.linen` modules.", "fastweights.jax"),
    "keras": ("Keras", "`import fastweights.keras as fw`, on TensorFlow, JAX or torch.", "fastweights.keras"),
    "lm": ("Language models", "`from fastweights.lm import load`", "fastweights.lm"),
    "hf": ("Hugging Face", "`import fastweights.hf as hf`", "fastweights.hf"),
}


def assigned(module: str, name: str):
    """The literal that a module assigns to a name, read without importing it; None if it assigns none."""
    path = PACKAGE.joinpath(*module.split(".")[1:], "__init__.py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return ast.literal_eval(node.value)
    return None


def public_names(module: str) -> dict[str, str]:
    """name -> where it is defined or re-exported, for every public name of a module."""
    homes = assigned(module, "_HOME") or {}  # names that are imported when asked for
    names = assigned(module, "__all__") or ["FastWeightError", "debug"]
    folder = PACKAGE.joinpath(*module.split(".")[1:])

    def place(name):
        if name in homes:
            return f"fastweights.{homes[name]}.{name}"
        # a file of the same name would be shown in the place of what it defines
        return f"{module}.{name}.{name}" if (folder / f"{name}.py").exists() else f"{module}.{name}"

    return {name: place(name) for name in names}


def fields_of_config() -> str:
    """The fields of a training configuration as a table: name, default, meaning."""
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for node in ast.walk(ast.parse((PACKAGE / "models" / "config.py").read_text())):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call) and len(node.value.args) > 1:
            default, meaning = (ast.literal_eval(a) for a in node.value.args[:2])
            rows.append(f"| `{node.target.id}` | `{default!r}` | {meaning} |")
    return "\n".join(rows)


def config_members() -> list[str]:
    """The public methods and properties of a training configuration."""
    tree = ast.parse((PACKAGE / "models" / "config.py").read_text())
    (config,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config")
    return [node.name for node in config.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def reference_page(title: str, first: str, module: str) -> str:
    """The memory itself first, then functions and layers, then states, errors and tables."""

    def place(name: str) -> tuple[bool, bool, str]:
        later = name.endswith(("State", "Output", "Error")) or name.isupper()
        return later, name not in ("fast_weight", "FastWeightAttention"), name.lower()

    def entry(name: str) -> str:
        if names[name] == "fastweights.models.config.Config":  # its signature repeats every help text
            bare = f"::: {names[name]}\n    options: {{show_signature: false, members: false}}\n\n{fields_of_config()}"
            return "\n\n".join(
                [bare, *(f"::: {names[name]}.{m}\n    options: {{heading_level: 3}}" for m in config_members())]
            )
        return f"::: {names[name]}"

    names = public_names(module)
    return f"# {title}\n\n{first}\n\n" + "\n\n".join(map(entry, sorted(names, key=place))) + "\n"


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: its text, and its code in blocks."""
    cells = json.loads(path.read_text())["cells"]
    parts = ["".join(c["source"]) if c["cell_type"] == "markdown" else "```python\n" + "".join(c["source"]) + "\n```"
             for c in cells]  # fmt: skip
    parts.insert(1, f"*Run it: [{path.name}]({path.name}) (in `docs/notebooks` of the repository).*")
    return "\n\n".join(parts) + "\n"


def on_config(config):
    def there(entry):
        """An entry of the navigation with folders filled in; None where there is no page."""
        ((title, target),) = entry.items()
        if isinstance(target, list):
            return {title: [e for e in map(there, target) if e]}
        if target == "reference/":
            return {title: [{t: f"reference/{page}.md"} for page, (t, _, _) in REFERENCE.items()]}
        if target == "notebooks/":
            pages = sorted((DOCS / target).glob("*.ipynb"))
            return {title: [f"notebooks/{p.stem}.md" for p in pages]} if pages else None
        if target.endswith("/"):
            return {title: sorted(f"{target}{p.name}" for p in (DOCS / target).glob("[!R]*.md"))}
        return entry if (DOCS / target).exists() else None

    nav = [entry for entry in map(there, config.nav) if entry]
    others = sorted(p.name for p in DOCS.glob("*.md") if p.name not in str(nav))
    config.nav = nav + ([{"Other pages": others}] if others else [])
    return config


def on_files(files, config):
    for page, what in REFERENCE.items():
        files.append(File.generated(config, f"reference/{page}.md", content=reference_page(*what)))
    for path in sorted((DOCS / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook_page(path)))
    return files


def on_page_content(html, **_):
    """Formulas as MathML."""

    def formula(found):
        text = found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
        return convert(text, display="block")

    return re.sub(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', formula, html, flags=re.S)


SHIM = '<script src="https://unpkg.com/iframe-worker/shim"></script>'  # the theme fetches it; ours comes along


def on_post_page(output, page, config):
    return output.replace(SHIM, f'<script src="{"../" * page.url.count("/")}style/file_worker.js"></script>')


def on_post_template(output, **_):
    return output.replace(SHIM, "")


def on_post_build(config):
    """The theme's page for addresses that are not there only works on a server, at its root."""
    Path(config.site_dir, "404.html").unlink(missing_ok=True)
