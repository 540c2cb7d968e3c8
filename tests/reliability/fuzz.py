"""Fuzz: mutated real files through every loader. Only FastWeightError may come out, soon, and memory stays bounded.

    cd tests && python -m reliability.fuzz --files 100000 --processes 4

A file that breaks the promise is kept in the folder that --keep names.
"""

import argparse
import json
import lzma
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastweights.core import FastWeightError, FastWeightWarning
from reliability import mutate
from reliability.record import record

SECONDS = 20  # for one file
CONFIG = dict(head="fwl", refresh=4, dim=8, heads=1, layers="delta,softmax", length=8, window=8, batch=1, eval_every=2,
              warmup=1, steps=2, device="cpu")  # fmt: skip


class Target(NamedTuple):
    """A file and what reads it.  load(): reads the mutated file at `path`, among the others that it needs."""

    name: str
    path: Path
    load: Any
    tensors: bool = False
    object: bool = False  # a JSON object of ours, whose checksum a stranger can make good
    weight: int = 1


def targets(root, *, hf=True):
    """Real files of every kind in a folder, and their loaders."""
    from fastweights import tensor_files
    from fastweights.lab.engine import results
    from fastweights.lab.tasks import babi_stories, corpora, sentence_pairs
    from fastweights.lm.training import train
    from fastweights.models import run_folder
    from fastweights.models.config import Config
    from fastweights.models.memory import Memory
    from fastweights.text import corpus_files, tokenizer
    from fastweights.training import log

    text = b"one fish two fish\nred fish blue fish 123\n"
    (root / "texts").mkdir()
    (root / "texts" / "a.txt").write_bytes(text * 20)
    config = Config(data=str(root / "texts"), tokenizer="bpe:260", **CONFIG)
    run = train(config, root / "run", cache=root / "cache")
    (corpus,) = (p for p in (root / "cache").iterdir())
    model = run_folder.load(run)
    model.read(b"red fish").save(root / "fish.memory")
    arm = dict(rule="delta", seed=0)
    lab = results.Results(root / "lab", "overwrite")
    lab.add(arm, [dict(error=0.5, name="<b>x</b>"), dict(error=1e-3, name="y")], 1.0)
    shutil.copy(lab.path, root / "lab" / "kept.jsonl")
    lab.write_csv()
    (root / "data" / "wikitext-2").mkdir(parents=True)
    for split in corpora.SPLITS:
        (root / "data" / "wikitext-2" / f"wiki.{split}.tokens").write_text(
            " = Fish = \n one fish two fish\n = Red = \n x\n"
        )
    (root / "data" / "enwik8.xz").write_bytes(lzma.compress(text * 50))
    (root / "data" / "babi" / "en").mkdir(parents=True)
    for task in range(1, 21):
        for split in ("train", "test"):
            (root / "data" / "babi" / "en" / f"qa{task}_x_{split}.txt").write_text(
                "1 Mary went to the kitchen.\n2 Where is Mary? \tkitchen\t1\n1 John left.\n2 Where is John? \tx,y\t1\n"
            )
    (root / "data" / "multi30k").mkdir()
    for name in ("train", "val", "test_2016_flickr"):
        for language in ("en", "de"):
            (root / "data" / "multi30k" / f"{name}.{language}").write_text("a dog runs .\na cat sits .\n" * 3)
    where = root / "data"
    load = lambda: run_folder.load(run, device="cpu")  # noqa: E731
    found = [
        Target("safetensors", run / "last.safetensors",
               lambda: tensor_files.read_tensors(run / "last.safetensors"), True, weight=8),
        Target("weights of a run", run / "best.safetensors", load, True, weight=2),
        Target("config of a run", run / "config.json", load, object=True, weight=4),
        Target("memory", root / "fish.memory", lambda: Memory.load(root / "fish.memory", model), True, weight=4),
        Target("tokenizer of a run", run / "tokenizer.json", load),
        Target("tokenizer of a stranger", corpus / "tokenizer.json",
               lambda: tokenizer.make(str(corpus / "tokenizer.json"), ()).encode(text), weight=6),
        Target("index of a corpus", corpus / "index.json",
               lambda: corpus_files.open_folder(corpus), object=True, weight=8),
        Target("tokens of a corpus", corpus / "train.bin", lambda: corpus_files.open_folder(corpus), weight=2),
        Target("log of a run", run / "metrics.jsonl", lambda: log._lines(run / "metrics.jsonl"), weight=4),
        Target("table of the lab", root / "lab" / "overwrite.csv",
               lambda: results.read_csv(root / "lab" / "overwrite.csv"), weight=8),
        Target("lines of the lab", root / "lab" / "kept.jsonl",
               lambda: results.read_lines(root / "lab" / "kept.jsonl"), weight=4),
        Target("WikiText", where / "wikitext-2" / "wiki.valid.tokens",
               lambda: corpora.load.__wrapped__("wikitext-2-words", where), weight=4),
        Target("enwik8", where / "enwik8.xz", lambda: corpora.load.__wrapped__("enwik8", where), weight=4),
        Target("bAbI", where / "babi" / "en" / "qa1_x_train.txt", lambda: babi_stories.load.__wrapped__(where),
               weight=2),
        Target("Multi30k", where / "multi30k" / "val.de", lambda: sentence_pairs.load.__wrapped__(where), weight=4),
    ]  # fmt: skip
    return found + (_hugging_face(root) if hf else [])


def _hugging_face(root):
    """A head for a model of the ecosystem, and a GGUF file."""
    from gguf_file import write_gguf
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from fastweights.hf import attach, detach, load_attached, save_attached
    from fastweights.hf.loading import load_model

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    attach(model, 4)
    save_attached(model, root / "head")
    detach(model)

    def load():
        try:
            load_attached(model, root / "head")
        finally:
            if hasattr(model, "fast_head"):
                detach(model)

    wider = LlamaForCausalLM(LlamaConfig(**sizes | dict(vocab_size=257)))
    write_gguf(root / "x.gguf", wider)
    return [
        Target("head", root / "head" / "fast_head.safetensors", load, True, weight=4),
        Target("settings of a head", root / "head" / "fast_head.json", load, object=True, weight=4),
        Target("GGUF", root / "x.gguf", lambda: load_model(root / "x.gguf", device="cpu")),
    ]


@contextmanager
def within(seconds):
    """Raise TimeoutError after so many seconds; in the main thread alone."""

    def late(*_):
        raise TimeoutError(f"over {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fuzz(count, seed=0, *, hf=True, only=(), keep=None, advance=lambda done: None):
    """Mutate `count` files; returns counts by loader and outcome, the failures as text, and how memory grew.

    only: names of targets, all when empty.
    """
    from fastweights import files
    from fastweights.tensor_files import read_tensors

    files._sync, sync = lambda path: None, files._sync  # the disk is not what is tried here
    rng, outcomes, failures = np.random.default_rng(seed), Counter(), []
    warnings_before = warnings.filters[:]
    warnings.simplefilter("ignore", FastWeightWarning)
    with tempfile.TemporaryDirectory() as folder:
        found = [t for t in targets(Path(folder), hf=hf) if not only or t.name in only]
        whole = {t.path: t.path.read_bytes() for t in found}
        tensors = {t.path: read_tensors(t.path) for t in found if t.tensors}
        for t in found:
            t.load()  # as they are they can be read
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        chances = np.array([t.weight for t in found]) / sum(t.weight for t in found)
        for done in range(count):
            t = found[int(rng.choice(len(found), p=chances))]
            repaired = bool(rng.integers(0, 2))
            if t.object and repaired:
                mutate.write_mutated_json(rng, t.path, json.loads(whole[t.path]))
            elif t.tensors and repaired:
                mutate.write_mutated_tensors(rng, t.path, *tensors[t.path])
            else:
                t.path.write_bytes(mutate.mutate_bytes(rng, whole[t.path], list(whole.values())))
            try:
                with within(SECONDS):
                    t.load()
                outcomes[t.name, "read"] += 1
            except FastWeightError:
                outcomes[t.name, "refused"] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                outcomes[t.name, "failed"] += 1
                said = "".join(traceback.format_exception(error))[-1500:]
                failures.append(f"{t.name}, seed {seed}, file {done}: {said}")
                if keep:
                    Path(keep).mkdir(parents=True, exist_ok=True)
                    shutil.copy(t.path, Path(keep) / f"{seed}-{done}-{t.path.name}")
            t.path.write_bytes(whole[t.path])
            if (done + 1) % 1000 == 0:
                advance(done + 1)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    warnings.filters[:] = warnings_before
    files._sync = sync
    return outcomes, failures, grown


def part(number, given):
    """What one of the processes does: its share of the files, from a seed of its own."""
    os.environ["TQDM_DISABLE"] = "1"
    count = given.files // given.processes + (number < given.files % given.processes)
    return fuzz(count, given.seed + number, hf=not given.no_hf, keep=given.keep,
                only=tuple(filter(None, given.only.split(","))),
                advance=lambda n: print(f"process {number}: {n}", flush=True))  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=1, help="that share the files")
    parser.add_argument("--seed", type=int, default=0, help="of the first process; the next has the next seed")
    parser.add_argument("--keep", default=None, help="folder for files that broke the promise")
    parser.add_argument("--no-hf", action="store_true", help="leave out what needs transformers")
    parser.add_argument("--only", default="", help="names of loaders, comma-separated")
    parser.add_argument("--out", default=None, help="JSON file")
    given = parser.parse_args()
    began = time.monotonic()
    with ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(part, range(given.processes), [given] * given.processes))
    outcomes = sum((counts for counts, _, _ in parts), Counter())
    failures, grown = [text for _, some, _ in parts for text in some], max(grown for _, _, grown in parts)
    by_loader = {}
    for (name, what), n in sorted(outcomes.items()):
        by_loader.setdefault(name, {})[what] = n
    for text in failures[:5]:
        print(text)
    for name, counts in by_loader.items():
        print(f"{name:<24} {counts}")
    figures = dict(files=sum(outcomes.values()), failed=len(failures), peak_growth_bytes=grown, loaders=by_loader)
    record("fuzz", figures | dict(seconds=round(time.monotonic() - began)), given.out)
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
