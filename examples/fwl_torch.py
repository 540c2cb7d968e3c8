"""A Fast Weight Layer on a small causal Transformer, in PyTorch: `python examples/fwl_torch.py` (seconds on a CPU).

Every document is random text of eight words of its own, so a model must learn the words while it reads.
"""

import torch
from torch import nn

from fastweights.torch import FWLBlock, make_labels

VOCAB_SIZE, SIZE, LENGTH, ATTN_CHUNKS = 64, 32, 48, 2


class CausalTransformer(nn.Module):
    """Any body will do whose output at token t sees no later token."""

    def __init__(self, size, layers=1, heads=4):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB_SIZE, size), nn.Embedding(LENGTH, size)
        layer = nn.TransformerEncoderLayer(size, heads, 4 * size, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens):
        T = tokens.shape[1]
        x = self.embed(tokens) + self.position(torch.arange(T))
        return self.layers(x, mask=nn.Transformer.generate_square_subsequent_mask(T), is_causal=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = CausalTransformer(SIZE)
        self.block = FWLBlock(SIZE, VOCAB_SIZE, ATTN_CHUNKS)

    def forward(self, tokens):
        """The loss of the next words: weights are 0 where there is none to predict."""
        labels, weights = make_labels(tokens)
        x = self.body(tokens)
        logits = self.block(x, labels, weights)
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (losses * weights).sum() / weights.sum()


def documents(n):
    words = torch.randint(VOCAB_SIZE, (n, 8))
    return words.gather(1, torch.randint(8, (n, LENGTH)))


def main(steps=40):
    torch.manual_seed(0)
    model, unseen = Model(), documents(16)
    with torch.no_grad():
        print(f"loss before: {model(unseen):.3f}")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(documents(16)).backward()
        optimizer.step()
    with torch.no_grad():
        print(f"loss after: {model(unseen):.3f}")


if __name__ == "__main__":
    main()
