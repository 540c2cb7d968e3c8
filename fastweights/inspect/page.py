"""One self-contained HTML page of what models did with a text: it needs no other file, and fetches nothing.

The numbers of every token are small integers in one compressed block per model (page_data.py), which the browser
inflates. The charts are Plotly's, whose script is part of the page. The text is data as well: nothing in it can become
markup.
"""

import base64
import gzip
import html
from importlib.resources import files
from pathlib import Path

from fastweights.files import write_text

SCRIPTS = ("page_data.js", "page_charts.js", "page.js")  # one after the other


def page(blocks: list[bytes], title: str) -> str:
    """The page of one model, or of several side by side.

    Args:
        blocks: one of each model, as `model_block` makes them.
        title: heading of the page and of the browser's tab.

    Returns:
        HTML with style, script, Plotly and data inside: it can be mailed, and opens without a network.
    """
    from plotly.offline import get_plotlyjs

    folder = files("fastweights.inspect")
    content = (folder / "page.html").read_text(encoding="utf-8")
    models = [f'<script type="application/octet-stream" class="model">{_base64(block)}</script>' for block in blocks]
    parts = {
        "TITLE": html.escape(title),
        "STYLE": (folder / "page.css").read_text(encoding="utf-8"),
        "SCRIPT": "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "DATA": "\n".join(models),
        "PLOTLY": _base64(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)),
    }
    for name, part in parts.items():
        content = content.replace(f"<!--{name}-->", part)
    return content


def _base64(data: bytes) -> str:
    """Bytes as text that may stand in a script element."""
    return base64.b64encode(data).decode()


def write(path: Path, blocks: list[bytes], title: str) -> int:
    """Write the page to an HTML file; returns its size in bytes.

    Args:
        path: of the file.
        blocks, title: as for `page`.
    """
    content = page(blocks, title)
    write_text(path, content)
    return len(content.encode())
