"""Tokens per second that a language model reads, learning and not: what a refreshed Fast Weight Layer costs.

    python benchmarks/fwl_reading.py                    (the demo's model on a CPU, one document)
    python benchmarks/fwl_reading.py --device cuda      (8 blocks of 512, 8 documents side by side, bfloat16 products)

All ways are timed in one process, in turn, on the same random tokens; the ratio is the median over rounds of speed
against carried memory without learning. Then training steps, forward and backward, of the same model with the layer
learning and not.
"""

import argparse
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.torch import graphs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--segment", type=int, default=1024, help="tokens per call")
    parser.add_argument("--calls", type=int, default=1, help="calls in a row before the device is waited for")
    parser.add_argument("--vocab", type=int, default=0)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--no-training", action="store_true", help="leave the training steps out")
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of ways to time; all when absent")
    given = parser.parse_args()
    gpu = given.device == "cuda"
    sizes = dict(depth=8, dim=512, heads=8) if gpu else {}
    vocab, batch = given.vocab or (8192 if gpu else 257), given.batch or (8 if gpu else 1)
    autocast = torch.autocast("cuda", torch.bfloat16) if gpu else nullcontext()
    torch.manual_seed(0)
    ways = {"carried memory": (0, "held", False, True)}
    ways |= {
        f"refresh {C}, {within}": (C, within, True, True) for C in (64, 32, 16) for within in ("held", "cumulative")
    }
    if gpu:
        ways["refresh 64, held, no CUDA graph"] = (64, "held", True, False)
    ways["published"] = (0, "held", True, True)
    ways = {
        n: way for n, way in ways.items() if n == "carried memory" or not given.only or n.startswith(tuple(given.only))
    }
    base = LanguageModel(Config(refresh=64, **sizes), vocab)
    models = {}
    for name, (C, within, _, _) in ways.items():
        models[name] = LanguageModel(Config(refresh=C, within=within, **sizes), vocab).to(given.device).eval()
        weights = base.state_dict()
        if not C:
            weights["fast.steps"] = torch.full((6,), 0.01)
        models[name].load_state_dict(weights)
    row = torch.randint(vocab - 1, (batch, given.segment + 1), device=given.device)
    states = dict.fromkeys(ways)
    seconds, host = ({name: [] for name in ways} for _ in range(2))
    most = graphs.MOST
    with torch.no_grad(), autocast:
        for round in range(given.rounds + 4):
            for name, (_, _, learn, graph) in ways.items():
                model, refuse = models[name], graphs.refuses
                if not graph:
                    graphs.refuses = lambda x: "asked for"
                state = states[name] if states[name] is not None else model.init_state(batch)
                _wait(gpu)
                start = time.perf_counter() if gpu else time.process_time()
                for _ in range(given.calls):
                    state = model.score(row[:, :-1], row[:, 1:], state, learn=learn, slow=False).state
                launched = time.perf_counter() - start
                _wait(gpu)
                spent = (time.perf_counter() if gpu else time.process_time()) - start
                states[name], graphs.refuses = state, refuse
                if round >= 4:
                    seconds[name].append(spent)
                    host[name].append(launched)
    memory = np.array(seconds["carried memory"])
    for name, spent in seconds.items():
        speed = given.calls * batch * given.segment / np.median(spent)
        ratio, launched = np.median(memory / np.array(spent)), np.median(host[name]) / np.median(spent)
        also = f"   the host was done after {launched:.2f} of the time" if gpu else ""
        print(f"{name:34} {speed:12,.0f} tokens/s   {ratio:.3f} of carried memory{also}")
    held = [known for known in graphs._calls.values() if known is not None]
    print(f"graphs kept: {sum(not isinstance(k, str) for k in held)} of at most {most}; refused: "
          f"{[k for k in held if isinstance(k, str)]}")  # fmt: skip
    if not given.no_training:
        training(given, base.to(given.device).train(), row, autocast, gpu)


def training(given, model, row, autocast, gpu):
    """Seconds of a training step by the layer's refresh, against the layer that does not learn."""
    seconds = {name: [] for name in ("static", "refresh 64", "refresh 32")}
    for round in range(given.rounds + 3):
        for name, spent in seconds.items():
            learn = name != "static"
            if learn:
                model.fast.config = replace(model.fast.config, refresh=int(name.split()[1]))
            _wait(gpu)
            start = time.perf_counter() if gpu else time.process_time()
            with autocast:
                loss = model.score(row[:, :-1], row[:, 1:], learn=learn, slow=False).loss.mean()
            loss.backward()
            model.zero_grad(set_to_none=True)
            _wait(gpu)
            if round >= 3:
                spent.append((time.perf_counter() if gpu else time.process_time()) - start)
    for name, spent in seconds.items():
        ratio = np.median(np.array(spent) / np.array(seconds["static"]))
        print(f"training, {name:24} {1000 * np.median(spent):10.1f} ms   {ratio:.3f} of static")


def _wait(gpu):
    if gpu:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
