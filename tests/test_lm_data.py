"""Corpora, tokenizers and batches: fixed splits, exact bytes, the same batch for the same step."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fastweights.core import FastWeightError
from fastweights.text import corpus, corpus_files, tokenizer
from fastweights.text import encoded_corpus as data
from fastweights.text.encoded_corpus import prepare
from fastweights.text.streams import Stream, sizes
from fastweights.training.batches import Batches
from fastweights.training.objective import to_batch

TEXT = b"def f(x):\n    return x + 1\n"


@pytest.fixture
def files(tmp_path):
    root = tmp_path / "texts"
    root.mkdir()
    for i in range(30):
        (root / f"{i}.txt").write_bytes(b"%d " % i + TEXT * (i + 1))
    return root


def test_stdlib_is_found_without_its_tests():
    root, paths = corpus.files("stdlib")
    names = [p.relative_to(root).parts for p in paths]
    assert ("abc.py",) in names
    assert len(names) > 300
    assert not any({"test", "tests", "site-packages"} & set(n) for n in names)
    modules = [p.relative_to(root).parts for p in corpus.files("stdlib-modules")[1]]
    assert set(names) > set(modules) > {n for n in names if len(n) == 1}
    assert {n[0] for n in set(names) - set(modules)} >= {"encodings", "pydoc_data", "idlelib"}


def test_splits_depend_on_names_alone(files):
    found = list(corpus.documents(str(files)))
    split = corpus.split(found, "")
    (files / "another.txt").write_bytes(TEXT)
    again = corpus.split(list(corpus.documents(str(files))), "")
    assert sorted(d.name for part in split.values() for d in part) == sorted(d.name for d in found)
    assert all(split.values())
    assert {d.name for d in split["train"]} <= {d.name for d in again["train"]}
    many = corpus.split([corpus.Document(f"{i}.txt", b"") for i in range(4000)], "")
    shares = [len(many[name]) / 4000 for name in ("train", "valid", "test")]
    assert shares == pytest.approx([0.9, 0.05, 0.05], abs=0.015)


def test_the_start_of_a_document_is_read_and_never_a_label():
    rows = np.array([[9, 1, 2, 9, 3], [4, 5, 9, 6, 7]])
    tokens, labels, weights, documents = to_batch(rows, 9, "cpu")
    assert weights.tolist() == [[1, 1, 0, 1], [1, 0, 1, 1]]
    assert (tokens == 9).tolist() == documents.starts.tolist()
    assert labels.tolist() == rows[:, 1:].tolist()


def test_one_file_is_cut(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(33, 133)))
    split = corpus.split(list(corpus.documents(str(tmp_path / "a.txt"))), "")
    assert b"".join(d.data for part in split.values() for d in part) == bytes(range(33, 133))
    assert [len(part[0].data) for part in split.values()] == [90, 5, 5]


def test_what_is_no_text_is_left_out(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b" \n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_bytes(TEXT)
    with pytest.raises(FastWeightError, match="holds no text; expected at least one file that is neither empty nor"):
        prepare(str(tmp_path), "bytes", tmp_path / "cache")
    with pytest.raises(FastWeightError, match="expected stdlib, stdlib-modules, hf:NAME or an existing file or folder"):
        prepare(str(tmp_path / "nothing"), "bytes")


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_every_byte_comes_back(spec):
    made = tokenizer.make(spec, [TEXT * 20])
    content = TEXT + "é\r\n\t".encode() + bytes(range(256))
    encoded = made.encode(content)
    assert made.decode(encoded) == content
    assert made.lengths()[encoded].sum() == len(content)
    assert encoded.max() < made.start == made.size - 1


def test_subwords_are_learned_and_kept(tmp_path):
    made = tokenizer.make("bpe:300", [TEXT * 20])
    assert len(made.encode(TEXT)) < len(TEXT) / 2
    made.save(tmp_path)
    for again in (tokenizer.load(tmp_path), tokenizer.make(str(tmp_path / "tokenizer.json"), [])):
        assert again.encode(TEXT).tolist() == made.encode(TEXT).tolist()


@pytest.mark.parametrize("spec, message", [
    ("bpe:100", "expected a size of at least 257"), ("bpe:many", "expected bpe:SIZE"),
    ("none", "expected bytes, bpe:SIZE"),
])  # fmt: skip
def test_tokenizer_says_what_is_wrong(spec, message):
    with pytest.raises(FastWeightError, match=message):
        tokenizer.make(spec, [TEXT])


def test_a_corpus_is_encoded_once(files, tmp_path, monkeypatch):
    first = prepare(str(files), "bytes", tmp_path / "cache")
    monkeypatch.setattr(data, "write_folder", None)  # a second time would fail
    again = prepare(str(files), "bytes", tmp_path / "cache")
    monkeypatch.setattr(corpus_files, "MAPPED", 0)
    assert isinstance(corpus_files.open_folder(again.folder).splits["train"].tokens, np.memmap)
    for name, part in first.splits.items():
        np.testing.assert_array_equal(part.tokens, again.splits[name].tokens)
    document = first.splits["test"].document(0)
    assert document[0] == 256
    assert bytes(document[1:].tolist()) == (files / first.splits["test"].names[0]).read_bytes()
    assert first.bytes_per_token == 1


def test_an_interrupted_encoding_leaves_nothing(files, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus_files, "_write", full)
    with pytest.raises(FastWeightError, match="No space left on device; nothing was kept"):
        prepare(str(files), "bytes", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_carried_rows_go_on_and_cover_everything(files, tmp_path):
    split = prepare(str(files), "bytes", tmp_path / "cache").splits["train"]
    batches = Batches(split, rows=3, length=50, seed=1, carried=True)
    steps = [batches[i] for i in range(batches.per_epoch)]
    for before, after in itertools.pairwise(steps):
        np.testing.assert_array_equal(before[:, -1], after[:, 0])
    rows = [np.concatenate([s[r, :-1] for s in steps]) for r in range(3)]
    stream = np.concatenate(rows)
    starts = np.flatnonzero(stream == 256)
    whole = {bytes(split.document(i)[1:].tolist()) for i in range(len(split))}
    found = [bytes(d[1:].tolist()) for d in np.split(stream, starts)[1:-1]]
    assert set(found) <= whole
    assert len(found) >= len(split) - 2
    assert len(stream) > len(split.tokens) - 3 * 50 - 1
    assert batches.starts_epoch(0)
    assert batches.starts_epoch(batches.per_epoch)
    assert not np.array_equal(batches[0], batches[batches.per_epoch])  # another epoch, another order
    np.testing.assert_array_equal(batches[7], Batches(split, 3, 50, 1, True)[7])


def test_packed_windows_cover_everything_once(files, tmp_path):
    split = prepare(str(files), "bytes", tmp_path / "cache").splits["train"]
    batches = Batches(split, rows=2, length=50, seed=1, carried=False)
    windows = [bytes((w[:-1] % 256).tolist()) for i in range(batches.per_epoch) for w in batches[i]]
    assert len(windows) == batches.per_epoch * 2
    total = np.bincount(np.concatenate([batches[i][:, :-1].ravel() for i in range(batches.per_epoch)]), minlength=257)
    assert (total <= np.bincount(split.tokens, minlength=257)).all()


def test_a_corpus_shorter_than_a_batch(files, tmp_path):
    split = prepare(str(files), "bytes", tmp_path / "cache").splits["train"]
    with pytest.raises(
        FastWeightError, match=r"hold \d+ tokens; expected at least 256001: a batch is 1000 rows of 256"
    ):
        Batches(split, 1000, 256, 0, True)


def test_hugging_face_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FastWeightError, match="needs datasets, not installed; pip install datasets"):
        list(corpus.documents("hf:wikitext"))
    fake = ModuleType("datasets")
    fake.load_dataset = lambda *name, split, streaming: [{"text": " ".join(name)}, {"text": ""}]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert [d.data for d in corpus.documents("hf:wikitext:raw")] == [b"wikitext raw"]


def test_what_is_left_out_is_counted_and_kept(tmp_path):
    (tmp_path / "texts").mkdir()
    for name, content in dict(a=TEXT, b=TEXT, c=TEXT, d=b"", e=b" \n", f=TEXT.decode().encode("utf-16")).items():
        (tmp_path / "texts" / name).write_bytes(content)
    for _ in range(2):  # encoded, and opened again
        found = prepare(str(tmp_path / "texts"), "bytes", tmp_path / "cache")
        assert found.left_out == {"empty": 2, "binary": 1}
        assert "left out: 2 empty files, 1 binary file" in str(found)
    with pytest.raises(FastWeightError, match=r"neither empty nor binary .left out: 1 binary file; .* UTF-16 to UTF-8"):
        prepare(str(tmp_path / "texts" / "f"), "bytes", tmp_path / "cache")


def test_what_cannot_be_read_is_said(files, monkeypatch):
    """A file or folder without permission must not be missing from a corpus without a word."""
    real = Path.read_bytes

    def forbidden(self):
        if self.name == "3.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", forbidden)
        with pytest.raises(
            FastWeightError, match=r"cannot read .*3.txt: Permission denied; expected files and folders"
        ):
            list(corpus.documents(str(files)))
    (files / "within").mkdir()
    scan = os.scandir

    def closed(path):
        if str(path).endswith("within"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(FastWeightError, match=r"cannot read .*within: Permission denied; expected files and folders"):
        list(corpus.documents(str(files)))


def test_folders_within_are_read_and_hidden_ones_are_not(files, tmp_path):
    for name in ("b/c.txt", ".git/d.txt", "b/.e.txt", "f.txt"):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_bytes(TEXT)
    (files / "link").symlink_to(files / "b")
    names = [path.relative_to(files).as_posix() for path in corpus.files(str(files))[1]]
    assert names == sorted([*(f"{i}.txt" for i in range(30)), "b/c.txt", "f.txt"], key=lambda name: Path(name).parts)


def test_a_cache_folder_that_cannot_be_written_says_where_else(files, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    (tmp_path / "a file").write_bytes(b"")
    with pytest.raises(FastWeightError, match=r"cannot write .*; nothing was kept. Encoded text is kept there unless"):
        prepare(str(files), "bytes")


def test_files_are_utf8_whatever_the_language_of_the_system(tmp_path):
    """A tokenizer's file has characters beyond ASCII, as on a server without a locale, or on Windows."""
    lines = ["from pathlib import Path", "from fastweights.files import write_text"]
    code = "\n".join([*lines, f"write_text(Path({str(tmp_path)!r}, 'x'), '\\u00e9')"])
    plain = os.environ | dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    subprocess.run([sys.executable, "-c", code], env=plain, check=True)
    assert (tmp_path / "x").read_bytes() == "\u00e9".encode()


def test_text_without_blanks_is_cut_into_words():
    """Training a tokenizer takes the square of the longest word: a megabyte of letters would take an hour."""
    made = tokenizer.Subwords.train(260, [b"ACGT" * 50])
    split = made.tokenizer.pre_tokenizer.pre_tokenize_str
    for text in ("ACGT" * 500, "=" * 3000, " " * 3000, "\n" + " " * 3000, "x " + " " * 600 + "x"):
        assert max(stop - start for _, (start, stop) in split(text)) <= 257
        assert made.decode(made.encode(text.encode())) == text.encode()


PLAIN = "Hello World, naïve café 日本語 😀 ok\n\n  two  spaces"


def pretrained(kind):
    """A tokenizer as a user may bring one: byte-level (GPT-2), with marked blanks (Llama), with marked ends (BERT)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "gpt2":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        how = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"])
    elif kind == "llama":
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(undo)
        pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
        how = trainers.BpeTrainer(vocab_size=320, special_tokens=pieces, show_progress=False)
    else:
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        how = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"], show_progress=False)
    made.train_from_iterator(["Hello World, two spaces and more words."] * 20, how)
    if kind == "llama":  # its bytes are pieces like others
        made = Tokenizer.from_str(json.dumps(json.loads(made.to_str()) | dict(added_tokens=[])))
    return tokenizer.Subwords(made)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_text_comes_token_by_token_as_it_is_decoded_at_once(kind):
    """Alone, a token of some tokenizers loses the blank before it, or is marked as the end of a word."""
    made = pretrained(kind)
    plain = PLAIN if kind != "bert" else "Hello World, two spaces"
    tokens = made.encode(plain.encode()).tolist()
    whole = made.decode(tokens)
    if kind != "bert":
        assert whole == plain.encode()
    assert b"".join(made.decode([t]) for t in tokens) == whole or not made.exact
    for cut in range(len(tokens)):  # after a prompt, which ends with a whole character
        if not made.decode(tokens[:cut]).endswith("\ufffd".encode()):
            stream = Stream(made, tokens[:cut])
            found = b"".join([*(stream.add(t) for t in tokens[cut:]), stream.rest()])
            assert made.decode(tokens[:cut]) + found == whole
    widths = made.lengths()[tokens] if made.exact else sizes(made, tokens)
    assert widths.sum() == len(whole)
    assert (made.lengths()[tokens].sum() == len(whole)) == made.exact  # what it was taken for before


def test_a_stream_does_not_wait_for_ever():
    """Bytes that are no character are given as such after a few tokens."""
    made = pretrained("llama")
    stream, number = Stream(made), made.tokenizer.token_to_id("<0xE6>")
    given = [stream.add(number) for _ in range(40)]
    assert sum(map(bool, given)) >= 4
    assert len(stream.tokens) < 20
