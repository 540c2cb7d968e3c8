"""A real browser for tests: Debian's Chromium or whichever is installed, driven by Playwright."""

import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def executable():
    """The path of a browser; skips the test, with the reason, where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(NAMES)} is on the path (apt install chromium)")
    return found


@contextmanager
def opened():
    """A browser of Playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install '.[dev]'")
    path = executable()
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """A page from disk: what it wrote to the console, which errors it had, and what it asked the network for."""

    def __init__(self, browser, path, *, width=1400, height=1000, dark=False):
        self.problems, self.requests = [], []
        self.context = browser.new_context(
            viewport=dict(width=width, height=height), color_scheme="dark" if dark else "light"
        )
        self.page = self.context.new_page()
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.problems.append(str(e)))
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.goto(f"file://{path}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()

    @property
    def outside(self):
        """Requests for anything but the page itself and what it made."""
        return [u for u in self.requests[1:] if not u.startswith(("data:", "blob:"))]
