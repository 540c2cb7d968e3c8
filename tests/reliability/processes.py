"""The same seed gives the same bits, in this process, in one that was spawned and in one that was forked.

    cd tests && python -m reliability.processes

Prints, as JSON, checksums of what each made: weights and generated tokens, and the batches of 0, 1, 2 and 4 workers of
a DataLoader.
"""

import json
import multiprocessing
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from fastweights.files import checksum
from fastweights.lm.generation import Sampling, generate
from fastweights.lm.training import train
from fastweights.models import run_folder
from fastweights.models.config import Config
from fastweights.text.encoded_corpus import prepare
from fastweights.training.batches import Batches

SMALL = dict(head="fwl", refresh=4, dim=16, heads=2, layers="delta,softmax", length=16, batch=2, eval_every=3, warmup=1,
             steps=3, dropout=0.1, device="cpu")  # fmt: skip


def work(folder, name):
    """Train and generate: checksums of the weights and of the tokens."""
    run = train(Config(data=str(folder / "texts"), **SMALL), folder / name, cache=folder / "cache")
    model = run_folder.load(run, last=True, device="cpu")
    weights = checksum(x.contiguous().numpy().tobytes() for _, x in sorted(model.state_dict().items()))
    tokens = list(generate(model, model.read(b"one fish"), 20, Sampling(seed=3)))
    return [weights, tokens]


def in_a_process(start, *arguments):
    with multiprocessing.get_context(start).Pool(1) as pool:
        return pool.apply(work, arguments)


def batches(folder, workers):
    """Checksum of 8 batches; the dataset is the run's own, every item a function of seed and step."""
    split = prepare(str(folder / "texts"), "bytes", folder / "cache").splits["train"]
    steps = Batches(split, 2, 16, 0, True)
    loader = DataLoader(steps, batch_size=None, sampler=range(8), num_workers=workers)
    return checksum(x.numpy().tobytes() for x in loader)


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "texts").mkdir()
        for i in range(4):
            (folder / "texts" / f"{i}.txt").write_bytes(b"one fish two fish red fish blue fish %d\n" % i * 10)
        made = dict(here=work(folder, "here"))
        made |= {start: in_a_process(start, folder, start) for start in ("spawn", "fork")}
        json.dump(dict(made=made, batches={n: batches(folder, n) for n in (0, 1, 2, 4)}), sys.stdout)


if __name__ == "__main__":
    main()
