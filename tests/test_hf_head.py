"""The published Fast Weight Layer as the head of our own Hugging Face model."""

import torch

from fastweights.hf.head import FastHead, HeadConfig
from fastweights.torch import FWLBlock

V, D = 40, 16


def random_tokens(*shape, seed=1):
    return torch.randint(1, V, shape, generator=torch.Generator().manual_seed(seed))


def head_and_inputs(B=2, T=9):
    torch.manual_seed(0)
    head = FastHead(HeadConfig(D, 12, normalizer=2.0, decay=0.9, step_size=0.5), dtype=torch.float64)
    return head, torch.randn(B, T, D, dtype=torch.float64), random_tokens(B, T), torch.randn(V, D).double()


def test_features_are_causal_and_a_cut_sequence_is_the_whole():
    head, x, tokens, E = head_and_inputs()
    whole, end = head(x, tokens, E)
    parts, state = [], None
    for a, b in ((0, 4), (4, 5), (5, 9)):
        features, state = head(x[:, a:b], tokens[:, a:b], E, state=state)
        parts.append(features)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, end)
    changed = tokens.clone()
    changed[:, 6] = changed[:, 6] % (V - 1) + 1
    other, _ = head(x, changed, E)
    torch.testing.assert_close(other[:, :6], whole[:, :6])
    assert not torch.allclose(other[:, 6], whole[:, 6])  # token 6 is learned before its own features are answered


def test_padding_may_hold_anything():
    head, x, tokens, E = head_and_inputs(B=1)
    real = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 0]).bool()
    x[:, ~real] = torch.nan
    features, state = head(x, tokens, E, mask=real[None])
    alone, its = head(x[:, real], tokens[:, real], E)
    torch.testing.assert_close(features[:, real], alone)
    torch.testing.assert_close(state, its)


def test_it_is_the_fast_weight_layer():
    torch.manual_seed(0)
    unembed = torch.nn.Parameter(torch.randn(V, D))
    block = FWLBlock(D, V, inputs=D, hidden=12, normalizer=2.0, decay=0.9, unembed=unembed).double()
    head, x, tokens, _ = head_and_inputs()
    head.load_state_dict({n: x for n, x in block.state_dict().items() if n != "unembed"})
    with torch.no_grad():
        block.steps.fill_(0.5), head.steps.fill_(0.5)
    labels = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    wanted = block(x, labels, torch.ones(2, 9, dtype=torch.float64))
    got, _ = head(x, tokens, block.unembed)
    torch.testing.assert_close(got @ block.unembed.mT, wanted)
