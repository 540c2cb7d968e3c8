"""One self-contained HTML page of what models did with a text: no file beside it, and nothing is fetched.

Numbers of every token are small integers in one compressed block per model (the browser inflates it), the charts are
Plotly's, and its script is part of the page. The text is data as well: nothing in it can become markup.
"""

import base64
import gzip
import html
from importlib.resources import files
from pathlib import Path

from fastweights.files import write_text


def page(blocks: list[bytes], title: str) -> str:
    """The page of one model, or of several side by side.

    Args:
        blocks: one per model, as `model_block` makes them.
        title: heading of the page and of the browser's tab.

    Returns:
        HTML with style, script, Plotly and data inside: it can be mailed, and opens without a network.
    """
    from plotly.offline import get_plotlyjs

    here = files("fastweights.inspect")
    style, script, frame = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "page.html"))
    encoded = lambda data: base64.b64encode(data).decode()  # noqa: E731
    data = [f'<script type="application/octet-stream" class="model">{encoded(b)}</script>' for b in blocks]
    plotly = encoded(gzip.compress(get_plotlyjs().encode(), 9, mtime=0))
    parts = dict(TITLE=html.escape(title), STYLE=style, SCRIPT=script, DATA="\n".join(data), PLOTLY=plotly)
    for name, part in parts.items():
        frame = frame.replace(f"<!--{name}-->", part)
    return frame


def write(path: Path, blocks: list[bytes], title: str) -> int:
    """Write the page; its size in bytes.

    Args:
        path: HTML file to write.
        blocks: what was read of each model, compressed.
        title: of the page.
    """
    content = page(blocks, title)
    write_text(path, content)
    return len(content.encode())
