"""The language model: its body, and the ways in which its last layer, a Fast Weight Layer, learns.

Shapes: B pages or windows, T tokens, D width.
"""

from contextlib import nullcontext

import torch
from safetensors.torch import load_file

from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.torch import FWLBlock
from fastweights.torch.tree import map_tensors


def folder(args):
    """The folder in --work of one body: its weights, its layers, its rates, and losses of pages. Made if need be."""
    path = args.work / f"{args.body}-{args.depth}x{args.dim}-seed{args.seed}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def layer_file(args, trained_at, long=False):
    """The file of a layer that was trained through its learning.

    Args:
        args: of the command line.
        trained_at: tokens between its updates in training; 0 for the published sum.
        long: whether it was trained on windows of --tune-length.
    """
    return folder(args) / f"layer-{trained_at or 'sum'}{'-long' if long else ''}.safetensors"


def build_model(args, vocab):
    """An untrained model with the seed of the command line."""
    torch.manual_seed(args.seed)
    config = Config(layers=f"{args.body}*{args.depth}", dim=args.dim, heads=args.dim // 64 or 2, head="fwl",
                    refresh=64, length=args.length, window=args.window)  # fmt: skip
    return LanguageModel(config, vocab).to(args.device)


def load_body(args, pages):
    """The model that the stage `body` trained, in evaluation mode."""
    model = build_model(args, pages.vocab)
    weights = load_file(folder(args) / "body.safetensors")
    model.load_state_dict(weights | {"fast.unembed": weights["embedding.weight"]})
    return model.to(args.device).eval()


def build_layer(args, model, refresh, within="held"):
    """The model's last layer, with its weights, and another way to learn.

    Args:
        args: of the command line.
        model: the language model.
        refresh: tokens between updates; 0 for the published sum of gradients, with decay.
        within: "held" or "cumulative": whether gradients inside a chunk wait for its end, or count at once.
    """
    learning = dict(refresh=refresh, within=within) if refresh else dict(decay=0.999)
    layer = FWLBlock(args.dim, model.vocab, inputs=args.dim, hidden=model.fast.config.hidden, normalizer=1.0,
                     log_steps=True, unembed=model.embedding.weight, **learning).to(args.device)  # fmt: skip
    layer.load_state_dict(model.fast.state_dict())
    return layer


def autocast(args):
    """A context in which matrix products are in bfloat16 on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if args.device == "cuda" else nullcontext()


@torch.no_grad()
def features(args, model, rows):
    """The body's features (B, T, D) of tokens (B, T + 1), its memory carried from the first token of a row to the last.

    They are read in pieces of --length tokens.
    """
    tokens, state, parts = torch.as_tensor(rows).to(args.device), None, []
    T = tokens.shape[1] - 1
    for start in range(0, T, args.length):
        with autocast(args):
            x, blocks = model(tokens[:, start : min(start + args.length, T)], state)
        parts.append(x.float())
        state = model.init_state(len(tokens))._replace(blocks=map_tensors(torch.Tensor.detach, blocks))
    return torch.cat(parts, 1)
