"""Files that rotted, were cut off or vanished: said, never used; and what is used instead."""

import errno
import json
import resource
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fastweights import FastWeightError, FastWeightWarning, files, tensor_files
from fastweights.lm.training import train
from fastweights.models import run_folder
from fastweights.models.config import Config
from fastweights.models.memory import Memory
from fastweights.models.run_documents import corpus_of
from fastweights.text import corpus_files, tokenizer
from fastweights.text import encoded_corpus as data
from fastweights.training import trainer

SMALL = dict(head="fwl", refresh=4, dim=8, heads=1, depth=1, length=8, batch=1, eval_every=2, warmup=1, device="cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts and a run of 6 steps, checkpoints after 2, 4 and 6."""
    root = tmp_path_factory.mktemp("place")
    for i in range(5):
        (root / f"texts{i}").mkdir()
        (root / f"texts{i}" / "a.txt").write_bytes(b"one fish two fish red fish blue fish %d\n" % i * 20)
    train(Config(data=str(root / "texts0"), tokenizer="bpe:260", steps=6, **SMALL), root / "run", cache=root / "cache")
    return root


@pytest.fixture
def run(place, tmp_path):
    return Path(shutil.copytree(place / "run", tmp_path / "run"))


def flip(path, at, bit=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def test_any_flipped_bit_and_any_cut_is_noticed(tmp_path):
    """Of every byte of a safetensors file one bit, and every length of it."""
    path, rng = tmp_path / "x.safetensors", np.random.default_rng(0)
    tensors = {"a": torch.arange(3.0), "b.c": torch.ones(2, 2, dtype=torch.bfloat16), "n": torch.tensor(7)}
    tensor_files.write_tensors(path, tensors, dict(step="4"))
    whole = path.read_bytes()
    again, about = tensor_files.read_tensors(path)
    assert about == dict(step="4")
    assert all(torch.equal(again[n], x) for n, x in tensors.items())
    for at, bit in enumerate(rng.integers(0, 8, len(whole))):
        flip(path, at, int(bit))
        with pytest.raises(FastWeightError, match=r"is damaged|cannot be read"):
            tensor_files.read_tensors(path)
        path.write_bytes(whole[:at])
        with pytest.raises(FastWeightError, match="cannot be read"):
            tensor_files.read_tensors(path)
        path.write_bytes(whole)


def test_files_without_a_checksum_are_read(tmp_path):
    """Those that were written before there was one."""
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors", dict(step="3"))
    assert tensor_files.read_tensors(tmp_path / "x.safetensors")[1] == dict(step="3")
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors", dict(step="3", sha257="0" * 64))
    with pytest.raises(FastWeightError, match="is damaged"):  # a checksum whose name is damaged is none
        tensor_files.read_tensors(tmp_path / "x.safetensors")


def test_json_says_it_was_changed_and_how_to_keep_that(tmp_path):
    path = tmp_path / "x.json"
    files.write_checked_json(path, dict(a=1, b=[0.1, None]))
    assert files.read_json(path, "numbers") == dict(a=1, b=[0.1, None])
    path.write_text(path.read_text().replace("0.1", "0.2"))
    with pytest.raises(
        FastWeightError, match=r'damaged or was edited: .* expected numbers\. .* delete its line "sha256"'
    ):
        files.read_json(path, "numbers")
    path.write_text("\n".join(line for line in path.read_text().splitlines() if "sha256" not in line))
    assert files.read_json(path, "numbers") == dict(a=1, b=[0.2, None])
    for content in ("[1]", "[" * 100_000, "\udcff", "1" * 10_000):
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(FastWeightError, match="expected numbers"):
            files.read_json(path, "numbers")


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_checkpoint_is_replaced_by_the_one_before(place, run, damage):
    last = run / run_folder.LAST
    wanted = tensor_files.read_tensors(last)[0]
    if damage == "gone":
        last.unlink()
    elif damage == "cut":
        last.write_bytes(last.read_bytes()[:-100])
    else:
        flip(last, -100)
    caught = pytest.warns(FastWeightWarning, match=r"last\.safetensors .*\. previous\.safetensors is used instead")
    with caught if damage != "gone" else warnings.catch_warnings():
        train(Config(), run, resume=True, cache=place / "cache")
    again = tensor_files.read_tensors(last)[0]
    assert all(torch.equal(again[n], x) for n, x in wanted.items())
    assert [json.loads(line)["step"] for line in (run / run_folder.METRICS).read_text().splitlines()] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_damaged_weights_are_replaced_to_evaluate_and_nothing_good_left_is_said(run):
    for name, instead in ((run_folder.BEST, run_folder.LAST), (run_folder.LAST, run_folder.PREVIOUS)):
        flip(run / name, -1)
        with pytest.warns(FastWeightWarning, match=rf"is damaged.*{instead} is used instead"):
            run_folder.load(run)
    flip(run / run_folder.PREVIOUS, -1)
    with pytest.raises(FastWeightError, match=r"best.* is damaged.*last.* is damaged.*previous.* is damaged"):
        run_folder.load(run)


def test_a_damaged_tokenizer_is_refused(run):
    path = run / tokenizer.FILE
    path.write_text(path.read_text().replace('"dropout": null', '"dropout": 0.5'))
    with pytest.raises(FastWeightError, match=r"tokenizer of .*run is bpe-.* expected bpe-.* missing, damaged or of"):
        run_folder.load(run)
    path.unlink()
    with pytest.raises(FastWeightError, match=r"tokenizer of .*run is bytes with 257 tokens; expected bpe-"):
        run_folder.load(run)


def test_a_damaged_memory_is_refused(run, tmp_path):
    model = run_folder.load(run)
    model.read(b"red fish").save(tmp_path / "fish.memory")
    flip(tmp_path / "fish.memory", -5)
    with pytest.raises(FastWeightError, match=r"fish\.memory is damaged"):
        Memory.load(tmp_path / "fish.memory", model)


def test_numbers_that_are_none_are_refused(run, place, tmp_path):
    """What fuzzing found, with checksums that are right."""
    model = run_folder.load(run)
    memory = model.read(b"red fish")
    memory.save(tmp_path / "fish.memory")
    tensors, about = tensor_files.read_tensors(tmp_path / "fish.memory")
    for change in (dict(count="9" * 5000), dict(last="-1"), dict(last=str(model.vocab))):
        tensor_files.write_tensors(tmp_path / "fish.memory", tensors, about | change)
        with pytest.raises(FastWeightError, match=r"ends with token .* expected numbers"):
            Memory.load(tmp_path / "fish.memory", model)
    about = files.read_json(run / run_folder.CONFIG, "")
    files.write_checked_json(run / run_folder.CONFIG, about | dict(vocab=2**63))
    with pytest.raises(FastWeightError, match="cannot be"):
        run_folder.load(run)
    folder = data.prepare(str(place / "texts3"), "bytes", tmp_path / "cache").folder
    index = files.read_json(folder / corpus_files.INDEX, "")
    index["splits"]["train"] |= dict(at=[], names=[], bytes=[])
    files.write_checked_json(folder / corpus_files.INDEX, index)
    with pytest.raises(FastWeightError, match="documents do not follow one another"):
        corpus_files.open_folder(folder)


@pytest.mark.parametrize("damaged", ["train.bin", "index.json", "tokenizer.json"])
def test_a_damaged_corpus_is_encoded_again(place, tmp_path, damaged):
    where = str(place / "texts1"), "bpe:260", tmp_path / "cache"
    corpus = data.prepare(*where)
    wanted = np.array(corpus.splits["train"].tokens)
    path = corpus.folder / damaged
    path.write_bytes(path.read_bytes().replace(b"1", b"2") if damaged == "index.json" else path.read_bytes()[:-6])
    with pytest.raises(FastWeightError, match=r"damaged|cannot be read|bytes; expected"):
        corpus_files.open_folder(corpus.folder)
    with pytest.warns(FastWeightWarning, match="It is made again from"):
        again = data.prepare(*where)
    np.testing.assert_array_equal(again.splits["train"].tokens, wanted)


def test_a_corpus_of_an_older_version_is_said_to_be_so_and_encoded_again(place, tmp_path):
    """Not damaged, and not other text: the run that began with it goes on with what the same documents give."""
    where = str(place / "texts3"), "bytes"
    now = data.prepare(*where, tmp_path / "cache")
    index = files.read_json(now.folder / corpus_files.INDEX, "")
    old = now.folder.rename(tmp_path / "cache" / data._name(*where, 1))
    for about in index["splits"].values():
        del about["tokens_sha256"]
    (old / corpus_files.INDEX).write_text(json.dumps(index["splits"]))
    with pytest.raises(FastWeightError, match=r"was written by an older version .* of version 1; expected version 2"):
        corpus_files.open_folder(old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = data.prepare_again(old, *where, tmp_path / "cache")
    assert again.folder == now.folder
    files.write_checked_json(old / corpus_files.INDEX, index | dict(version=3))
    with pytest.raises(FastWeightError, match=r"was written by another version .* of version 3"):
        corpus_files.open_folder(old)
    with pytest.raises(FastWeightError, match=r"was written by .*, and data is 'gone'; .*the checkpoint is intact"):
        data.prepare_again(old, "gone", "bytes", tmp_path / "cache")


def test_vanished_data_does_not_stop_a_run(place, tmp_path):
    """The encoded copy is enough; without it, what is missing is said, and the run goes on once it is back."""
    config = Config(data=str(place / "texts2"), steps=4, **SMALL)
    run = train(config, tmp_path / "run", cache=tmp_path / "cache")
    content = (place / "texts2" / "a.txt").read_bytes()
    shutil.rmtree(place / "texts2")
    train(config, run, resume=True, cache=tmp_path / "cache")
    assert len(corpus_of(run).splits["train"].tokens)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(FastWeightError, match=r"is gone, and data is .*texts2.*; the checkpoint is intact"):
        train(config, run, resume=True, cache=tmp_path / "cache")
    (place / "texts2").mkdir()
    (place / "texts2" / "a.txt").write_bytes(content)
    with pytest.warns(FastWeightWarning, match="has changed since this run began"):  # its time of change has
        train(config, run, resume=True, cache=tmp_path / "cache")


def test_text_that_changed_is_encoded_by_the_tokenizer_of_the_run(place, run, tmp_path):
    """A tokenizer that was trained anew would give the weights tokens that mean something else."""
    config, about = run_folder.read_config(run)
    own = (run / "tokenizer.json").read_bytes()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(b"quite other words make quite other pairs of letters\n" * 20)
    changed = replace(config, data=str(tmp_path / "texts"), steps=8)
    run_folder.write_config(run, changed, about["vocab"], corpus="gone", tokenizer=about["tokenizer"])
    with pytest.warns(FastWeightWarning, match="has changed since this run began: it goes on with other text"):
        train(changed, run, resume=True, cache=tmp_path / "cache")
    assert (run / "tokenizer.json").read_bytes() == own
    model = run_folder.load(run)
    with pytest.warns(FastWeightWarning, match="has changed"):
        corpus = corpus_of(run, tmp_path / "cache")
    assert corpus.tokenizer.name == model.tokenizer.name == about["tokenizer"]
    tokenizer.Subwords.train(260, [b"xyz" * 9]).save(run)  # of another run
    unlike = r"was encoded by bpe-.*; expected bpe-.*, whose tokens the weights of run"
    with pytest.warns(FastWeightWarning, match="has changed"), pytest.raises(FastWeightError, match=unlike):
        train(changed, run, resume=True, cache=tmp_path / "other")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_refuses_in_mid_run_loses_nothing(place, tmp_path, monkeypatch, number):
    """It is said, the checkpoint before stays, and the run goes on from it to the same end."""
    config, real, count = Config(data=str(place / "texts0"), steps=6, **SMALL), files.os.replace, [0]
    wanted = train(config, tmp_path / "whole", cache=tmp_path / "cache")

    def refuse(a, b):
        count[0] += Path(b).name == run_folder.LAST
        if count[0] >= 2:
            raise OSError(number, errno.errorcode[number])
        return real(a, b)

    monkeypatch.setattr(files.os, "replace", refuse)
    with pytest.raises(FastWeightError, match=errno.errorcode[number]):
        train(config, tmp_path / "run", cache=tmp_path / "cache")
    monkeypatch.setattr(files.os, "replace", real)
    assert not list((tmp_path / "run").glob(".*"))
    train(config, tmp_path / "run", resume=True, cache=tmp_path / "cache")
    for name in (run_folder.LAST, run_folder.BEST):
        a, b = (tensor_files.read_tensors(r / name)[0] for r in (wanted, tmp_path / "run"))
        assert all(torch.equal(a[n], x) for n, x in b.items())


def test_a_full_disk_is_said_and_leaves_nothing_half_written(place, tmp_path, monkeypatch):
    """No file may exceed 20 kB: the system's own refusal, in the middle of a write."""
    config = Config(data=str(place / "texts0"), steps=4, **SMALL | dict(dim=32))
    data.prepare(config.data, config.tokenizer, tmp_path / "cache")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would leave its own files cut off
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(FastWeightError, match=r"cannot write .*safetensors: .*File too large.*; nothing was kept"):
            train(config, tmp_path / "run", cache=tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [p for p in (tmp_path / "run").iterdir() if p.suffix == ".safetensors"]
    train(config, tmp_path / "run", resume=True, cache=tmp_path / "cache")


def test_a_run_killed_before_its_first_checkpoint_starts_again(place, tmp_path, monkeypatch):
    config = Config(data=str(place / "texts0"), steps=4, **SMALL)

    def killed(self, *_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run", cache=tmp_path / "cache")
    train(config, tmp_path / "run", resume=True, cache=tmp_path / "cache")
    assert len((tmp_path / "run" / run_folder.METRICS).read_text().splitlines()) == 4


def test_what_a_killed_process_left_half_written_is_removed(tmp_path, monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = tmp_path / f".x.{gone.pid}.part.txt"
    left.write_text("hal")
    files.write_text(tmp_path / "x.txt", "whole")
    assert left.exists()  # it may be another machine's, at work
    monkeypatch.setattr(files, "STALE", -1)
    files.write_text(tmp_path / "x.txt", "whole")
    assert not left.exists()
