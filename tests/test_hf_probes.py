"""Probes on the heads of Hugging Face models: what they learned, by whose loss, without a changed bit."""

import numpy as np
import pytest
import torch
from oracle import assert_close

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

import fastweights.hf as hf
import fastweights.torch as fw
from fastweights.torch.dynamic import token_losses

V = 50
FORMS = [dict(refresh=None), dict(refresh=None, rule="delta", decay=0.9), dict(refresh=8),
         dict(refresh=8, within="cumulative")]  # fmt: skip


def ours(**fast):
    torch.manual_seed(0)
    config = dict(vocab_size=V, hidden_size=16, num_attention_heads=2, mixers="delta", head="fwl")
    fast = dict(size=24, normalizer=4.0, step_size=0.3) | fast
    return hf.FastWeightForCausalLM(hf.FastWeightConfig(**config, fast=fast)).double().eval()


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(config).double().eval()


def random_tokens(*shape):
    return torch.randint(1, V, shape, generator=torch.Generator().manual_seed(1))


def predicted(logits, tokens):
    """The loss of each token but the first."""
    return token_losses(logits[:, :-1], tokens[:, 1:]).detach().numpy()


@pytest.mark.parametrize("fast", FORMS)
def test_a_fast_weight_layer_of_our_model(fast):
    model, tokens = ours(**fast), random_tokens(2, 30)
    with torch.no_grad():
        plain = model(tokens).logits
        model.config.adapt = False
        slow = model(tokens).logits
        model.config.adapt = True
        with fw.probe(model) as p:
            seen = model(tokens)
            again = model(tokens[:, :11])
            model(tokens[:, 11:], past_key_values=again.past_key_values)
    assert torch.equal(plain, seen.logits)
    assert [type(p[name]) for name in p.names] == [fw.MemoryRecord, fw.LayerRecord]
    (whole, _), (first, at_first), (second, at_second) = p["fast"].calls
    assert np.isnan(whole["loss"][:, 0]).all()
    assert_close(whole["loss"][:, 1:], predicted(plain, tokens), 1e-8)
    assert_close(whole["slow_loss"][:, 1:], predicted(slow, tokens), 1e-8)
    for name in ("loss", "slow_loss", "step"):  # a text in two calls is measured as in one
        both = np.concatenate([first[name], second[name]], 1)
        assert_close(np.nan_to_num(both), np.nan_to_num(whole[name]), 1e-8, name=name)
    at = np.arange(1, 31) if fast["refresh"] is None else np.array([8, 16, 24])
    assert [*at_first - 30, *at_second - 30] == at.tolist()


@pytest.mark.parametrize("fast", FORMS)
def test_one_step_is_what_was_learned(fast):
    model, T = ours(**fast), (fast["refresh"] or 1) + 1
    with torch.no_grad(), fw.probe(model) as p:
        out = model(random_tokens(2, T))
    learned = sum(S.square().flatten(1).sum(1) for S in out.past_key_values.state.fast[:3]).sqrt().numpy()
    assert_close(p["fast"].step[:, -1], learned)
    assert_close(p["fast"].learned[:, -1], learned)
    assert (learned > 0).all()


def test_a_head_that_is_attached():
    model, tokens = llama(), random_tokens(2, 30)
    with torch.no_grad():
        bare = model(tokens).logits
        head = hf.attach(model, refresh=8, step_size=0.3, cache=False).double()
        plain = model(tokens).logits
        with fw.probe(model) as p:
            seen = model(tokens)
            first = model(tokens[:, :11])
            model(tokens[:, 11:], past_key_values=first.past_key_values)
            model(tokens[:, :9])
    assert torch.equal(plain, seen.logits)
    record = p["fast_head"]
    (whole, at), (one, at_one), (two, at_two), (short, _) = record.calls
    assert p.names == ["fast_head"]
    assert_close(whole["loss"][:, 1:], predicted(plain, tokens), 1e-8)
    assert_close(whole["slow_loss"][:, 1:], predicted(bare, tokens), 1e-8)
    assert at.tolist() == [8, 16, 24]
    assert [*at_one - 30, *at_two - 30] == at.tolist()
    for name in ("loss", "slow_loss", "step"):
        both = np.concatenate([one[name], two[name]], 1)
        assert_close(np.nan_to_num(both), np.nan_to_num(whole[name]), 1e-8, name=name)
    assert_close(short["step"], short["learned"])  # one step
    assert (short["step"] > 0).all()
    assert "forward" not in vars(head)


def test_padding_is_not_measured():
    for model in (ours(), llama()):
        if not isinstance(model, hf.FastWeightForCausalLM):
            hf.attach(model, refresh=8, cache=False).double()
        tokens = random_tokens(1, 12)
        padded, mask = torch.nn.functional.pad(tokens, (5, 0)), torch.nn.functional.pad(tokens * 0 + 1, (5, 0))
        with torch.no_grad(), fw.probe(model) as p:
            model(tokens)
            model(padded, attention_mask=mask)
        (alone, _), (found, _) = p[p.names[-1]].calls
        for name in ("loss", "slow_loss"):
            assert np.isnan(found[name][:, :6]).all()
            assert_close(found[name][:, 6:], alone[name][:, 1:], 1e-8, name=name)
