"""A toy where learning while reading matters: documents with words of their own."""

import torch
from torch import nn

from fastweights.torch import DynamicEvaluation, FWLBlock, make_labels


def documents(n, length=96, words=8, vocabulary=32, seed=0):
    """Each document has its own few words and its own order of them: after a word always comes the same next one."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        cycle = torch.randperm(vocabulary, generator=generator)[:words]
        jump = torch.rand(length, generator=generator) < 0.1
        where, row = 0, []
        for t in range(length):
            where = int(torch.randint(words, (), generator=generator)) if jump[t] else (where + 1) % words
            row.append(cycle[where])
        rows.append(torch.stack(row))
    return torch.stack(rows)


def test_documents_with_their_own_vocabulary_are_learned_while_reading():
    """A body that sees one token cannot know the document; fast weights and dynamic evaluation learn it."""
    torch.manual_seed(0)
    body, block = nn.Embedding(32, 32), FWLBlock(32, 32, inputs=32, normalizer=1.0, step_size=0.1)
    optimizer = torch.optim.Adam([*body.parameters(), *block.parameters()], lr=3e-3)
    train = documents(512)
    for step in range(150):
        tokens = train[torch.randint(512, (16,), generator=torch.Generator().manual_seed(step))]
        labels, weights = make_labels(tokens)
        out = block.run(body(tokens), labels, weights)
        loss = ((out.loss + out.slow_loss) * weights).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    held_out = documents(8, seed=1)
    labels, weights = make_labels(held_out)
    with torch.no_grad():
        out = block.run(body(held_out), labels, weights)
        fast, static = ((x * weights).sum() / weights.sum() for x in (out.loss, out.slow_loss))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.block = body, block

        def forward(self, tokens):
            return self.block.slow_logits(self.body(tokens))

    dynamic = []
    with DynamicEvaluation(Model(), lr=0.3, segment=4) as evaluation:
        for row in held_out:
            evaluation.reset()
            dynamic.append(evaluation.run(row[None]).mean)
    dynamic = sum(dynamic) / len(dynamic)
    assert static > 3.0  # a little under log 32 = 3.47
    assert dynamic < static - 1.5, (float(static), dynamic)
    assert fast < static - 2.0, (float(static), float(fast))
