"""What an open probe costs, and that a closed one costs nothing: python benchmarks/probe_cost.py.

Each model reads one row of random tokens (the time does not depend on which): never probed (a second model with the
same weights), under `fw.probe(model, every=16)`, and after it was closed, in turn, so that a busy machine slows all
three alike. Times are the least processor seconds of all rounds, on one thread.
"""

import argparse
import time

import torch

import fastweights.torch as fw
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel

VOCABULARY = 257


def language_model(**config):
    """Reading with a language model of these settings."""
    model = LanguageModel(Config(**config), VOCABULARY).eval()
    return model, lambda row: model.score(row[:, :-1], row[:, 1:])


def bare_layer():
    """Reading with one layer, of features that are not what is timed."""
    layer, features = fw.FastWeightAttention(256, heads=4).eval(), torch.randn(VOCABULARY, 256)
    return layer, lambda row: layer(features[row])


def hugging_face(head):
    """Reading with a model of transformers: ours with a Fast Weight Layer, or Llama with an attached head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from fastweights.hf import FastWeightConfig, FastWeightForCausalLM, attach

    if head == "fwl":
        config = FastWeightConfig(vocab_size=VOCABULARY, hidden_size=128, mixers="gated-delta*4", head="fwl")
        model = FastWeightForCausalLM(config).eval()
    else:
        config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=344, num_hidden_layers=4,
                             num_attention_heads=4)  # fmt: skip
        model = LlamaForCausalLM(config).eval()
        attach(model)
    return model, lambda row: model(row)


MODELS = {
    "the demo's: 4 gated delta blocks of 128, Fast Weight Layer": lambda: language_model(head="fwl"),
    "4 delta blocks of 256": lambda: language_model(dim=256, layers="delta*4", head="linear"),
    "4 sum-rule blocks of 128": lambda: language_model(layers="linear*4", head="linear"),
    "kda, softmax, mamba-2, rwkv-7 of 128": lambda: language_model(layers="kda,softmax,mamba-2,rwkv-7", head="linear"),
    "2 delta-product blocks of 128, two writes per token": lambda: language_model(layers="delta-product*2"),
    "one delta layer of 256, nothing around it": lambda: bare_layer(),
    "transformers: 4 gated delta blocks of 128, Fast Weight Layer": lambda: hugging_face("fwl"),
    "transformers: Llama, 4 blocks of 128, attached head and cache": lambda: hugging_face("attached"),
}


def seconds(run, row):
    """Processor time of one pass."""
    start = time.process_time()
    with torch.no_grad():
        run(row)
    return time.process_time() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--every", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="models whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("plain", "open", "closed", "open/plain", "closed/plain")
    print(f"{'milliseconds of one pass':62}", *(f"{name:>12}" for name in columns))
    for name, make in MODELS.items():
        if args.only not in name:
            continue
        row, passes = torch.randint(VOCABULARY, (1, args.tokens + 1)), []
        for _ in range(2):  # the same weights twice
            torch.manual_seed(0)
            passes.append(make())
        (_, never), (model, run) = passes
        times = {"plain": [], "open": [], "closed": []}
        for _ in range(args.rounds + 1):
            times["plain"].append(seconds(never, row))
            with fw.probe(model, every=args.every):
                times["open"].append(seconds(run, row))
            times["closed"].append(seconds(run, row))
        plain, open_, shut = (min(found[1:]) for found in times.values())  # the first warms up
        row = (f"{1e3 * t:12.1f}" for t in (plain, open_, shut))
        print(f"{name:62}", *row, *(f"{t / plain:12.2f}" for t in (open_, shut)), flush=True)


if __name__ == "__main__":
    main()
