"""The documentation site: it builds from what is here, nothing is fetched, no link is broken, no name is missing."""

import importlib.util
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browser
import pytest

ROOT = Path(__file__).parent.parent
FETCHED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src")}  # what a browser loads by itself


class Page(HTMLParser):
    """Anchors, links and loaded files of a page."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values.get("id"), values.get("name")} - {None}
        for name, value in attributes:
            if (tag, name) in FETCHED and values.get("rel") != "canonical":
                self.loaded.append(value)
            if (tag, name) == ("a", "href"):
                self.links.append(value)


def broken(folder):
    """(page, link) of every link or loaded file that leads nowhere, or, when loaded, out of the folder."""
    pages = {path.resolve(): Page(path) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links + page.loaded:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                if link in page.loaded and url.scheme != "data":
                    yield path.name, link
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            anchor = unquote(url.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                yield path.name, link


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def hooks():
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; pip install '.[docs]'")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.xdist_group("site")
def test_no_link_is_broken_and_nothing_is_fetched(site):
    assert list(broken(site)) == []
    assert len(list(site.rglob("*.html"))) > 30


def test_the_check_of_links_can_fail(tmp_path):
    (tmp_path / "b.html").write_text('<p id="here">')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"></a><a href="b.html#gone"></a><a href="c.html"></a><a href="https://example.org"></a>'
        '<script src="https://example.org/x.js"></script>'
    )
    found = ["b.html#gone", "c.html", "https://example.org/x.js"]
    assert sorted(broken(tmp_path)) == [("a.html", link) for link in found]


@pytest.mark.xdist_group("site")
def test_the_reference_has_every_public_name(site, hooks):
    for page, (_, _, module) in hooks.REFERENCE.items():
        anchors = Page(site / "reference" / f"{page}.html").anchors
        missing = [name for name, place in hooks.public_names(module).items() if place not in anchors]
        assert missing == [], module
        shown = (site / "reference" / f"{page}.html").read_text()
        assert "doc-symbol-module" not in shown, "a file is shown in the place of a public name"


@pytest.mark.xdist_group("site")
def test_formulas_are_mathml(site):
    for page in ("reference/torch.html", "what-is-a-fast-weight.html"):
        text = (site / page).read_text()
        assert "<math" in text
        assert "arithmatex" not in text


def test_public_names_are_those_that_import(hooks):
    for module in ("fastweights", "fastweights.torch", "fastweights.lm"):
        imported = importlib.import_module(module)
        names = hooks.public_names(module)
        assert set(names) == set(getattr(imported, "__all__", names))
        assert all(getattr(imported, name).__doc__ for name in names)


@pytest.mark.xdist_group("site")
def test_every_page_is_in_the_navigation(site):
    links = set(Page(site / "index.html").links)
    pages = {p.with_suffix(".html").name for p in (ROOT / "docs").glob("*.md")}
    assert pages - links == set()


@pytest.mark.xdist_group("site")
@pytest.mark.parametrize("size", ["1400,1000", "400,800"], ids=["desktop", "phone"])
def test_a_browser_shows_it_from_disk_without_an_error(site, tmp_path, size):
    """The search runs in a script of ours, which only a browser can try."""
    flags = [
        "--headless",
        *browser.FLAGS,
        f"--user-data-dir={tmp_path}",
        f"--window-size={size}",
        "--enable-logging=stderr",
    ]
    command = [
        browser.executable(),
        *flags,
        "--virtual-time-budget=5000",
        "--dump-dom",
        f"file://{site}/index.html?q=overwrite",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert "matching documents" in done.stdout
    assert 'href="results/overwrite.html' in done.stdout.partition("matching documents")[2]
