"""A Fast Weight Layer on a small LSTM, in PyTorch: `python examples/fwl_torch.py` (seconds on a CPU).

In every document eight words follow each other in an order of its own, so a model must learn the order while it reads.
The layer takes a step of gradient descent after every eight words, at its weights as they have become by then.
"""

import torch
from torch import nn

from fastweights.torch import FWLBlock, make_labels

VOCAB_SIZE, SIZE, LENGTH = 32, 32, 96


class Model(nn.Module):
    """Any body will do whose output at token t sees no later token."""

    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(VOCAB_SIZE, SIZE), nn.LSTM(SIZE, SIZE, batch_first=True)
        self.block = FWLBlock(SIZE, VOCAB_SIZE, inputs=SIZE, refresh=8, normalizer=1.0, step_size=0.05)

    def forward(self, tokens):
        """The loss of the next words, without what was learned from the document and with it."""
        labels, weights = make_labels(tokens)  # weights are 0 where there is nothing to predict
        out = self.block.run(self.body(self.embed(tokens))[0], labels, weights, logits=False)
        return [(losses * weights).sum() / weights.sum() for losses in (out.slow_loss, out.loss)]


def documents(n):
    """(n, LENGTH): in each document a word is followed by one other, its own, nine times of ten."""
    follows = torch.rand(n, VOCAB_SIZE).argsort(1)
    words = torch.randint(VOCAB_SIZE, (n, LENGTH))
    for t in range(1, LENGTH):
        known = torch.rand(n) < 0.9
        words[:, t] = torch.where(known, follows.gather(1, words[:, t - 1 : t])[:, 0] % 8, words[:, t] % 8)
    return words


def main(steps=40):
    torch.manual_seed(0)
    model, unseen = Model(), documents(32)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        sum(model(documents(16))).backward()
        optimizer.step()
    with torch.no_grad():
        slow, fast = model(unseen)
    print(f"loss without learning from the document: {slow:.3f}")
    print(f"loss with learning from the document: {fast:.3f}")


if __name__ == "__main__":
    main()
