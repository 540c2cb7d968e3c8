"""A Fast Weight Layer attached to models of other people: nothing changes until it is trained, then it learns."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Trainer,
    TrainingArguments,
)

from fastweights.core import FastWeightError
from fastweights.hf import (
    FastHead,
    FastWeightConfig,
    FastWeightForCausalLM,
    HeadConfig,
    attach,
    attached,
    detach,
    load_attached,
    save_attached,
    state_of,
)
from fastweights.torch import DynamicEvaluation, FWLBlock

V, D = 40, 16
END = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)
WIDE = dict(vocab_size=V, hidden_size=D, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, **END)
NEXT = WIDE | dict(
    num_key_value_heads=1, head_dim=8, linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=8,
    linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, mlp_only_layers=[0, 1], layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=D, n_layer=2, n_head=2, n_positions=64, **END)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **WIDE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, **WIDE)),
    "mamba": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=V, hidden_size=D, num_hidden_layers=2, state_size=4, time_step_rank=2, **END)
    ),
    "qwen3-next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**NEXT)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(max_position_embeddings=64, **WIDE)),
    "ours": lambda: FastWeightForCausalLM(
        FastWeightConfig(vocab_size=V, hidden_size=D, num_attention_heads=2, mixers="delta*2", **END)
    ),
}
MODES = ["residual", "between"]


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().double().eval()


@pytest.fixture(params=MODELS)
def model(request):
    return make(request.param)


def random_tokens(*shape, seed=1):
    return torch.randint(1, V, shape, generator=torch.Generator().manual_seed(seed))


def make_strong(head):
    """As if it had been trained: what it learns changes the logits a lot."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in head.named_parameters():
            p.add_(torch.randn_like(p) * 0.3 if name.startswith("dense") else 0.0)
        head.steps.copy_(torch.linspace(2.0, 4.0, len(head.steps)))
    return head


def attach_strong(model, mode="residual", **how):
    return make_strong(attach(model, 12, mode=mode, normalizer=2.0, **how))


def test_an_untrained_residual_is_exactly_the_model(model):
    tokens = random_tokens(2, 11)
    before, wrote = model(tokens).logits, model.generate(tokens, max_new_tokens=6, do_sample=False)
    attach(model, 12)
    assert torch.equal(model(tokens).logits, before)
    assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False), wrote)
    make_strong(attached(model))
    assert not torch.allclose(model(tokens).logits, before, atol=1e-3)
    detach(model)
    assert torch.equal(model(tokens).logits, before)
    assert all(p.requires_grad for p in model.parameters())
    assert not any("fast_head" in name for name in model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untrained_residual_is_exact_in_other_precisions(dtype):
    model, tokens = make("llama").to(dtype), random_tokens(2, 11)
    before = model(tokens).logits
    assert attach(model).dense1.dtype == torch.float32
    assert torch.equal(model(tokens).logits, before)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_reach_only_the_new_part(model, mode):
    head = attach_strong(model, mode)
    tokens = random_tokens(2, 11)
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert all(p.grad is None for name, p in model.named_parameters() if "fast_head" not in name)


def test_an_untrained_residual_has_a_gradient():
    model = make("llama")
    head = attach(model, 12)
    tokens = random_tokens(2, 11)
    model(tokens, labels=tokens).loss.backward()
    assert head.steps.grad[2:].abs().min() > 0  # those of the second layer; the first follows once it is not zero
    assert head.dense2.grad.abs().sum() > 0
    detach(model)
    attach(model, 12, freeze=False)
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "fast_head" not in name)


@pytest.mark.parametrize("mode", MODES)
def test_generate_adapts_with_and_without_cache(model, mode):
    tokens = random_tokens(3, 9)
    last = lambda: model.generate(tokens, max_new_tokens=10, do_sample=False, return_dict_in_generate=True,  # noqa: E731
                                  output_logits=True).logits[-1]  # fmt: skip
    plain = last()
    attach_strong(model, mode)
    assert not torch.allclose(last(), plain, atol=1e-3)
    ways = [dict(do_sample=False), dict(do_sample=True), dict(num_beams=3, do_sample=False)]
    for how in ways:
        found = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            found.append(model.generate(tokens, max_new_tokens=10, use_cache=use_cache, **how))
        assert torch.equal(*found), how


def test_left_padding_changes_nothing(model):
    attach_strong(model)
    tokens = random_tokens(2, 12)
    mask = (torch.arange(12) >= torch.tensor([[0], [5]])).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    takes = dict(position_ids=positions) if model.config.model_type not in ("mamba", "fastweights") else {}
    padded = model(tokens, attention_mask=mask, **takes).logits[1, 5:]
    torch.testing.assert_close(padded, model(tokens[1:, 5:]).logits[0], rtol=1e-5, atol=1e-6)
    how = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
    wrote = model.generate(tokens, attention_mask=mask, **how)
    assert torch.equal(wrote[1, 5:], model.generate(tokens[1:, 5:], **how)[0])


@pytest.mark.parametrize("mode", MODES)
def test_features_are_causal_and_a_cut_sequence_is_the_whole(mode):
    torch.manual_seed(0)
    head = make_strong(FastHead(HeadConfig(D, 12, mode=mode, normalizer=2.0, decay=0.9), dtype=torch.float64))
    x, tokens, E = torch.randn(2, 9, D, dtype=torch.float64), random_tokens(2, 9), torch.randn(V, D).double()
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


@pytest.mark.parametrize("mode", MODES)
def test_padding_may_hold_anything(mode):
    torch.manual_seed(0)
    head = make_strong(FastHead(HeadConfig(D, 12, mode=mode, normalizer=2.0, decay=0.9), dtype=torch.float64))
    x, tokens, E = torch.randn(1, 9, D, dtype=torch.float64), random_tokens(1, 9), torch.randn(V, D).double()
    real = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 0]).bool()
    x[:, ~real] = torch.nan
    features, state = head(x, tokens, E, mask=real[None])
    alone, its = head(x[:, real], tokens[:, real], E)
    torch.testing.assert_close(features[:, real], alone)
    torch.testing.assert_close(state, its)


def test_between_is_the_fast_weight_layer():
    torch.manual_seed(0)
    block = FWLBlock(
        D, V, inputs=D, hidden=12, normalizer=2.0, decay=0.9, unembed=torch.nn.Parameter(torch.randn(V, D))
    )
    block.double()
    head = FastHead(HeadConfig(D, 12, mode="between", normalizer=2.0, decay=0.9), dtype=torch.float64)
    head.load_state_dict({n: x for n, x in block.state_dict().items() if n != "unembed"})
    with torch.no_grad():
        block.steps.fill_(0.5), head.steps.fill_(0.5)
    x, tokens = torch.randn(2, 9, D, dtype=torch.float64), random_tokens(2, 9)
    labels = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    wanted = block(x, labels, torch.ones(2, 9, dtype=torch.float64))
    got, _ = head(x, tokens, block.unembed)
    torch.testing.assert_close(got @ block.unembed.mT, wanted)


def residual_by_hand(head, x, tokens, E):
    """Features of one row (T, D) by autograd and a loop: weights minus steps times the gradients of all before."""
    c, p = head.config, {n: q.detach() for n, q in head.named_parameters()}
    names = ["dense1", "bias1", "dense2", "bias2"]
    scale = dict(dense1=1 / D, bias1=1.0, dense2=1 / c.size, bias2=1.0)
    moved = {n: torch.zeros_like(p[n]) for n in names}

    def bounded(m, like):
        return m / (1 + m.square().mean() / (like.square().mean() + 1e-6) / 0.3**2).sqrt()

    def features(weights, x, moved=None):
        u = x / (x.square().mean() + 1e-6).sqrt()
        h = u @ weights["dense1"] + weights["bias1"]
        slow = torch.relu(h).square() @ weights["dense2"] + weights["bias2"]
        if moved is None:
            return x + slow
        a = torch.relu(h + bounded(u @ moved["dense1"] + moved["bias1"], h)).square()
        fast = a @ (weights["dense2"] + moved["dense2"]) + weights["bias2"] + moved["bias2"]
        return x + slow + bounded(fast - slow, x)

    found = []
    for t in range(len(x)):
        if t:
            slow = {n: p[n].clone().requires_grad_() for n in names}
            loss = torch.nn.functional.cross_entropy(features(slow, x[t - 1]) @ E.mT, tokens[t]) / c.normalizer
            gradients = torch.autograd.grad(loss, list(slow.values()))
            for i, (n, g) in enumerate(zip(names, gradients, strict=True)):
                moved[n] = c.decay * moved[n] - p["steps"][i] * scale[n] * g
        found.append(features(p, x[t], moved))
    return torch.stack(found)


def test_residual_is_gradient_descent_by_hand():
    torch.manual_seed(0)
    head = make_strong(FastHead(HeadConfig(D, 12, normalizer=2.0, decay=0.9), dtype=torch.float64))
    x, tokens, E = torch.randn(2, 7, D, dtype=torch.float64), random_tokens(2, 7), torch.randn(V, D).double()
    got, _ = head(x, tokens, E)
    wanted = torch.stack([residual_by_hand(head, x[row], tokens[row], E) for row in range(2)])
    assert not torch.allclose(wanted, head(x, tokens, E, learn=False)[0], atol=1e-2)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_a_long_text_in_windows():
    model = make("llama")
    head = attach_strong(model, decay=0.95)
    tokens = random_tokens(1, 24)
    hidden = {}
    hook = model.lm_head.register_forward_pre_hook(lambda m, given: hidden.update(x=given[0]), prepend=True)
    state, logits, body = None, [], []
    for a in range(0, 24, 6):
        first = max(0, a - 6)
        out = model(tokens[:, first : a + 6], fast_state=state, fast_context=a - first, logits_to_keep=6)
        state = out.fast_state
        logits.append(out.logits)
        body.append(hidden["x"][:, a - first :])
    hook.remove()
    features, _ = head(torch.cat(body, 1), tokens, model.lm_head.weight)
    torch.testing.assert_close(torch.cat(logits, 1), features @ model.lm_head.weight.mT)


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
    assert state_of(fork).dense1.shape == (1, 1, D + 1, 12)
    with pytest.raises(FastWeightError, match="expected no crop"):
        fork.crop(-2)
    attached(model).adapting = False
    still = model(tokens).logits
    torch.testing.assert_close(still[:, :1], whole[:, :1])
    assert not torch.allclose(still[:, 5:], whole[:, 5:], atol=1e-3)


def test_save_and_load_the_new_part_alone(model, tmp_path):
    head = attach_strong(model, "between", decay=0.99, rule="delta")
    tokens = random_tokens(2, 11)
    wanted = model(tokens).logits
    save_attached(model, tmp_path)
    saved = load_file(tmp_path / "fast_head.safetensors")
    assert {name: x.shape for name, x in saved.items()} == {n: x.shape for n, x in head.state_dict().items()}
    assert json.loads((tmp_path / "fast_head.json").read_text())["head"]["rule"] == "delta"
    detach(model)
    load_attached(model, tmp_path)
    assert torch.equal(model(tokens).logits, wanted)


def test_trainer_trains_the_head(tmp_path):
    """Every row repeats its own four tokens; the frozen body cannot know them, the head learns to learn them."""
    model = make("gpt2").float()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # as long as those of a trained model
    head = attach(model, 32)
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
    assert head.steps.abs().max() > 0.01
    assert all(torch.equal(x, model.state_dict()[n]) for n, x in body.items())


def test_mistakes_are_told(tmp_path):
    model = make("llama")
    with pytest.raises(FastWeightError, match="no head is attached"):
        detach(model)
    with pytest.raises(FastWeightError, match="mode is 'beside'; expected one of 'residual', 'between'"):
        attach(model, 8, mode="beside")
    with pytest.raises(FastWeightError, match="normalizer is 'batch'; expected a number"):
        attach(model, 8, normalizer="batch")
    attach(model, 8)
    with pytest.raises(FastWeightError, match="a head is attached already"):
        attach(model, 8)
    with pytest.raises(FastWeightError, match="input_ids is missing"):
        model(inputs_embeds=torch.zeros(1, 3, D).double())
    assert model(random_tokens(1, 3)).logits.shape == (1, 3, V)  # after a failure all is well
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
