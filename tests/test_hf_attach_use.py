"""An attached head and cache in use: threads, forked memories, saved files, Trainer, and mistakes that are told."""

import copy
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file
from test_hf_attach import MODELS, D, V, attach_strong, make, random_tokens
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from fastweights.core import FastWeightError
from fastweights.hf import (
    attach,
    attached,
    detach,
    load_attached,
    save_attached,
    state_of,
    using,
)
from fastweights.torch import DynamicEvaluation


@pytest.fixture(params=MODELS)
def model(request):
    return make(request.param)


@torch.no_grad()
def test_threads_share_a_model():
    """No call leaves anything on the model that another could see."""
    from concurrent.futures import ThreadPoolExecutor

    model = make("llama")
    attach_strong(model)
    texts = [random_tokens(1, 9 + i, seed=i) for i in range(8)]
    wanted = [model(x).logits for x in texts]
    run = torch.no_grad()(lambda x: model(x).logits)
    with ThreadPoolExecutor(4) as pool:
        for got, one in zip(pool.map(run, texts * 3), wanted * 3, strict=True):
            torch.testing.assert_close(got, one)


@torch.no_grad()
def test_a_cache_carries_what_was_learned_and_forks():
    model = make("llama")
    attach_strong(model)
    tokens = random_tokens(1, 12)
    whole = model(tokens).logits
    cache = model(tokens[:, :8]).past_key_values
    fork = copy.deepcopy(cache)
    model(random_tokens(1, 4, seed=5), past_key_values=cache)
    torch.testing.assert_close(model(tokens[:, 8:], past_key_values=fork).logits, whole[:, 8:])
    assert state_of(fork).head.dense1.shape == (1, D, 12)
    assert state_of(fork).cache.filled.tolist() == [6]
    with pytest.raises(FastWeightError, match="expected no crop"):
        fork.crop(-2)
    attached(model).adapting = False
    still = model(tokens).logits
    torch.testing.assert_close(still[:, :1], whole[:, :1])
    assert not torch.allclose(still[:, 5:], whole[:, 5:], atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["empty", "sliding"])
def test_a_cache_may_be_empty_or_hold_sliding_layers_alone(kind):
    """A DynamicCache() makes its layers on the way; ours must not pass for one that attends to all tokens."""
    sizes = dict(vocab_size=V, hidden_size=D, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    if kind == "sliding":
        sizes |= dict(num_key_value_heads=2, head_dim=4, sliding_window=64)
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).eval()
        assert set(model.config.layer_types) == {"sliding_attention"}
    else:
        model = make("llama")
    attach_strong(model)
    tokens, cache = random_tokens(1, 12), DynamicCache(config=model.config) if kind == "sliding" else DynamicCache()
    parts = [model(tokens[:, part], past_key_values=cache).logits for part in (slice(0, 8), slice(8, 12))]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens).logits)


@torch.no_grad()
@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_a_head_of_its_own(again):
    model = make("llama")
    tokens = random_tokens(1, 12)
    alone = model(tokens).logits
    attach(model, where="all", refresh=2, step_size=0.5)
    copied = again(model)
    assert torch.equal(copied(tokens).logits, model(tokens).logits)
    detach(copied)
    assert torch.equal(copied(tokens).logits, alone)
    assert not torch.equal(model(tokens).logits, alone)  # still attached


def test_a_damaged_head_is_refused(tmp_path):
    """One bit of its weights, one digit of its settings; the model stays as it was."""
    model = make("llama")
    attach(model, refresh=3)
    save_attached(model, tmp_path)
    detach(model)
    for name in ("fast_head.safetensors", "fast_head.json"):
        path = tmp_path / name
        whole = path.read_bytes()
        bad = bytearray(whole)
        bad[-9 if name.endswith("s") else whole.index(b'"refresh": 3') + 11] ^= 1
        path.write_bytes(bad)
        with pytest.raises(FastWeightError, match="is damaged"):
            load_attached(model, tmp_path)
        assert not hasattr(model, "fast_head")
        path.write_bytes(whole)
    load_attached(model, tmp_path)


def test_save_and_load_the_new_part_alone(model, tmp_path):
    head = attach_strong(model, refresh=3)
    tokens = random_tokens(2, 11)
    wanted = model(tokens).logits
    save_attached(model, tmp_path)
    saved = load_file(tmp_path / "fast_head.safetensors")
    assert {name: x.shape for name, x in saved.items()} == {n: x.shape for n, x in head.state_dict().items()}
    assert json.loads((tmp_path / "fast_head.json").read_text())["head"]["refresh"] == 3
    detach(model)
    load_attached(model, tmp_path)
    assert torch.equal(model(tokens).logits, wanted)
    detach(model)
    about = json.loads((tmp_path / "fast_head.json").read_text())
    del about["sha256"]  # edited on purpose
    (tmp_path / "fast_head.json").write_text(json.dumps(about | dict(kind="fastweights head 1")))
    with pytest.raises(FastWeightError, match="is 'fastweights head 1'; expected 'fastweights head 2'"):
        load_attached(model, tmp_path)


def test_trainer_trains_the_head(tmp_path):
    """Every row repeats its own four tokens; the frozen body cannot know them, the head learns to learn them."""
    model = make("gpt2").float()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # as long as those of a trained model
    head = attach(model, 32, refresh=4, cache=False)
    steps = head.log_steps.detach().clone()
    body = {n: x.clone() for n, x in model.state_dict().items() if "fast_head" not in n}
    rows = [dict(input_ids=x, labels=x) for x in random_tokens(64, 4).repeat(1, 8)]
    how = TrainingArguments(output_dir=str(tmp_path), max_steps=60, per_device_train_batch_size=16, learning_rate=2e-2,
                            report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
                            dataloader_pin_memory=False, logging_strategy="no")  # fmt: skip
    test = random_tokens(16, 4, seed=9).repeat(1, 8)
    before = model(test, labels=test).loss
    Trainer(model=model, args=how, train_dataset=rows).train()
    model.eval()
    assert model(test, labels=test).loss < before - 0.5
    assert (head.log_steps - steps).abs().min() > 0.01
    assert all(torch.equal(x, model.state_dict()[n]) for n, x in body.items())


def test_mistakes_are_told(tmp_path):
    model = make("llama")
    with pytest.raises(FastWeightError, match="no head is attached"):
        detach(model)
    with pytest.raises(FastWeightError, match="no head is attached"), using(model, head=False):
        pass
    with pytest.raises(FastWeightError, match="refresh is 0; expected a whole number, 1 or more"):
        attach(model, 8, refresh=0)
    with pytest.raises(FastWeightError, match=r"step_size is -1\.0; expected a positive number"):
        attach(model, 8, step_size=-1.0)
    with pytest.raises(FastWeightError, match="cache is a int; expected a NeuralCache, True or False"):
        attach(model, 8, cache=2048)
    with pytest.raises(FastWeightError, match="where names the output embedding; expected layers below it"):
        attach(model, 8, where=["lm_head.weight"])
    with pytest.raises(FastWeightError, match="is a T5ForConditionalGeneration, with an encoder; expected a causal"):
        attach(T5ForConditionalGeneration(T5Config(vocab_size=V, d_model=D, d_kv=8, num_layers=1, num_heads=2)))
    attach(model, 8)
    with pytest.raises(FastWeightError, match="a head is attached already"):
        attach(model, 8)
    with pytest.raises(FastWeightError, match="input_ids is missing"):
        model(inputs_embeds=torch.zeros(1, 3, D).double())
    out = model(random_tokens(1, 3))
    assert out.logits.shape == (1, 3, V)  # after a failure all is well
    with pytest.raises(FastWeightError, match="state holds 1 rows and a refresh of 64; expected 2 and 64"):
        model(random_tokens(2, 3), fast_state=out.fast_state)
    with pytest.raises(FastWeightError, match="fast_state is a int; expected the fast_state of another call"):
        model(random_tokens(2, 3), fast_state=3)
    save_attached(model, tmp_path)
    with pytest.raises(FastWeightError, match="is a head for type llama; expected gpt2"):
        load_attached(make("gpt2"), tmp_path)
    with pytest.raises(FastWeightError, match="output embedding is a NoneType"):
        attach(model.model)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mamba", "gpt-neox"])
def test_dynamic_evaluation_of_any_model(name):
    model = make(name).float()
    patterns = dict(gpt2="*.mlp.*", mamba="*.mixer.*").get(name, "*.mlp.*")
    tokens = random_tokens(1, 6).repeat(1, 12)
    before = {n: p.clone() for n, p in model.named_parameters()}
    with DynamicEvaluation(model, lr=0.0, segment=6, context=6) as still:
        static = still.run(tokens).losses[0]
    with DynamicEvaluation(model, lr=0.5, segment=6, context=6, parameters=patterns) as dynamic:
        losses = dynamic.run(tokens).losses[0]
        moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert moved
    assert all((".mlp." if name != "mamba" else ".mixer.") in n for n in moved)
    torch.testing.assert_close(losses[:6], static[:6])
    assert losses[-12:].mean() < static[-12:].mean() - 0.05
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
