"""Files from strangers: 2,000 mutated ones through every loader (`make fuzz` does 100,000), links, markup, sizes."""

import json
import resource

import pytest

from fastweights import FastWeightError
from fastweights.models import run_folder
from fastweights.models.config import Config
from fastweights.text import corpus

pytest.importorskip("transformers")
pytest.importorskip("gguf")
from reliability.fuzz import fuzz


@pytest.mark.filterwarnings("ignore")
def test_mutated_files_are_read_or_refused(monkeypatch):
    """Never anything but FastWeightError, and never much memory."""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    outcomes, failures, grown = fuzz(2000)
    assert not failures, failures[0]
    assert sum(outcomes.values()) == 2000
    assert {what for _, what in outcomes} == {"read", "refused"}  # mutations are neither all fatal nor all harmless
    assert grown < 512 * 2**20


def test_fuzz_can_fail(monkeypatch):
    """A loader that raises something else is caught."""
    monkeypatch.setattr("fastweights.lab.engine.results.csv.DictReader", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fuzz(1, hf=False)  # already as it reads the file that nobody has changed


def test_links_out_of_a_corpus_are_refused(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "secret.txt").write_text("a key")
    (tmp_path / "texts" / "a.txt").write_text("a text")
    (tmp_path / "texts" / "b.txt").symlink_to(tmp_path / "texts" / "a.txt")
    assert len(list(corpus.documents(str(tmp_path / "texts")))) == 2  # within the folder they lead nowhere new
    (tmp_path / "link").symlink_to(tmp_path / "texts")
    assert len(list(corpus.documents(str(tmp_path / "link")))) == 2  # the folder itself is the user's word
    (tmp_path / "texts" / "c.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(FastWeightError, match=r"c\.txt is a link to .*secret\.txt; expected files within .*texts"):
        list(corpus.documents(str(tmp_path / "texts")))


@pytest.mark.parametrize(
    "change",
    [
        dict(dim=2**12, hidden=2**14),
        dict(dim=2**30),
        dict(layers="delta*999999999"),
        dict(depth=10**9),
        dict(hidden=2**36),
    ],
)
def test_sizes_are_checked_before_memory_is_taken(tmp_path, change):
    from fastweights.models.language_model import LanguageModel
    from fastweights.tensor_files import write_tensors

    small = Config(dim=8, heads=1, depth=1, head="linear")
    weights = {f"model.{n}": x for n, x in LanguageModel(small, 257).state_dict().items()}
    write_tensors(tmp_path / run_folder.BEST, weights, {})
    about = dict(config=small.to_dict() | change, vocab=257)
    (tmp_path / run_folder.CONFIG).write_text(json.dumps(about))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FastWeightError, match=r"expected of shape|over 4096 blocks"):
        run_folder.load(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB; the first would take over 2**20


def test_text_on_a_page_is_not_markup():
    """Titles are escaped; what a model read is data, encoded, and no place of the script puts it in as HTML."""
    pytest.importorskip("plotly")
    from importlib.resources import files

    from fastweights.inspect.page import SCRIPTS, page

    hostile = "</title></script><script>alert(1)</script>"
    made = page([hostile.encode()], hostile)
    assert hostile not in made
    assert "&lt;script&gt;alert(1)" in made
    script = "".join((files("fastweights.inspect") / name).read_text() for name in SCRIPTS)
    assert not [word for word in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(") if word in script]


def test_a_vocabulary_with_a_huge_number_is_refused():
    tokenizers = pytest.importorskip("tokenizers")
    from fastweights.text.tokenizer import Subwords

    given = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 10**9}, []))
    with pytest.raises(FastWeightError, match="largest of its 2 numbers is 1000000000; expected 0 to 1"):
        Subwords(given)
