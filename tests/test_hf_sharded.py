"""FSDP2 of our models under transformers: two processes, padded and unpadded batches, checkpoint, generation."""

import pytest
import torch

pytest.importorskip("transformers")

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from two_processes import in_two_processes, same_worker

from fastweights.hf import FastWeightConfig, FastWeightForCausalLM


def make():
    torch.manual_seed(0)
    config = dict(vocab_size=40, hidden_size=16, num_attention_heads=2, sliding_window=8, mixers="gated-delta,softmax")
    return FastWeightForCausalLM(FastWeightConfig(**config, head="fwl"))


def batch():
    tokens = torch.randint(1, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    return tokens, mask


def train(model):
    """Losses of a few steps, every other batch padded."""
    tokens, mask = batch()
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(4):
        given = mask if step % 2 else torch.ones_like(mask)
        loss = model(tokens, attention_mask=given, labels=torch.where(given.bool(), tokens, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def as_rank(rank, folder):
    torch.distributed.init_process_group("gloo")
    try:
        model = make()
        for block in model.model.blocks:
            fully_shard(block, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        losses = train(model)
        tokens, mask = batch()
        wrote = model.eval().generate(tokens, attention_mask=mask, max_new_tokens=3, do_sample=False)
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(dict(losses=losses, wrote=wrote, weights=weights), folder / "found.pt")
    finally:
        torch.distributed.destroy_process_group()


def alone():
    """Losses, weights and new tokens of one process."""
    model = make()
    losses = train(model)
    tokens, mask = batch()
    return losses, model, model.eval().generate(tokens, attention_mask=mask, max_new_tokens=3, do_sample=False)


@same_worker
def test_two_processes_are_one(tmp_path):
    losses, model, wrote = in_two_processes(as_rank, tmp_path, meanwhile=alone)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert losses[-1] < losses[1]
    torch.testing.assert_close(found["losses"], losses)
    torch.testing.assert_close(found["weights"], dict(model.state_dict()))
    assert torch.equal(found["wrote"], wrote)
