"""What users of transformers do with a model: each as they would, small."""

import copy
import warnings

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorWithFlattening,
    DynamicCache,
    Trainer,
    TrainingArguments,
)

from fastweights import FastWeightError
from fastweights.hf import FastWeightCache, FastWeightConfig, FastWeightForCausalLM
from fastweights.torch.tree import flatten

V = 50
KINDS = [("delta,softmax", "linear"), ("gated-delta,lstm", "linear"), ("retnet,softmax", "fwl")]


def make(mixers="delta,softmax", **how):
    torch.manual_seed(0)
    config = dict(vocab_size=V, hidden_size=32, num_attention_heads=2, sliding_window=8, mixers=mixers)
    return FastWeightForCausalLM(FastWeightConfig(**config | how)).eval()


def random_tokens(*shape, seed=1):
    return torch.randint(1, V, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def saved(tmp_path):
    make().save_pretrained(tmp_path)
    return tmp_path


def assert_initial(module, name):
    """Within the bounds of documented initial values: nothing is uninitialised memory."""
    for n, x in module.state_dict().items():
        assert x.isfinite().all(), f"{name}.{n}"
        assert x.abs().max() <= 8.0, f"{name}.{n}"
        if "norm" in n and "weight" in n:
            assert (x == 1).all(), f"{name}.{n}"


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        (dict(mixers=["delta", "softmax", "gated-delta"]), "model.blocks.2"),
        (dict(mixers=["delta", "softmax", "performer"]), "model.blocks.2"),
        (dict(head="fwl"), "fast"),
        (dict(tie_word_embeddings=False), "lm_head"),
        (dict(vocab_size=V + 3, ignore_mismatched_sizes=True), "model.embed_tokens"),
    ],
)
def test_weights_that_a_checkpoint_lacks_are_initialised(saved, changes, missing):
    for _ in range(2):  # memory that was used before is not zero
        torch.empty(200_000).fill_(float("nan"))
        model = AutoModelForCausalLM.from_pretrained(saved, **changes).eval()
        assert_initial(model.get_submodule(missing), missing)
        whole = make()
        for name, x in model.state_dict().items():  # what the checkpoint has is as it was
            if not name.startswith((missing, "lm_head")):
                assert torch.equal(x, whole.state_dict()[name]), name
        tokens = random_tokens(2, 9)
        assert model(tokens, labels=tokens).loss < 6


def test_empty_weights_can_be_initialised():
    with torch.device("meta"):
        model = FastWeightForCausalLM(make("gated-delta,performer", head="fwl").config)
    assert all(x.is_meta for x in model.state_dict().values())
    model.to_empty(device="cpu")
    for x in model.state_dict().values():
        x.fill_(float("nan")) if x.is_floating_point() else x.fill_(7)
    model.apply(lambda module: setattr(module, "_is_hf_initialized", False))
    model.init_weights()
    assert_initial(model, "model")
    assert model.model.blocks[1].mixer.layer.draws == 0
    same = make("gated-delta,performer").model.blocks[1].mixer.layer.projection
    torch.testing.assert_close(model.model.blocks[1].mixer.layer.projection, same)


def test_a_forward_on_meta_runs():
    with torch.device("meta"):
        model = FastWeightForCausalLM(make("gated-delta,softmax", head="fwl").config)
        out = model(torch.zeros(2, 5, dtype=torch.long), attention_mask=torch.ones(2, 5, dtype=torch.long))
    assert out.logits.shape == (2, 5, V)


def test_lora_reaches_every_projection(tmp_path):
    peft = pytest.importorskip("peft")
    tokens = random_tokens(2, 9)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)
    model = peft.get_peft_model(make("gated-delta,softmax"), lora)
    reached = {n.split("base_model.model.model.")[1] for n, m in model.named_modules() if hasattr(m, "lora_A")}
    parts = ("feed_forward.into", "feed_forward.out")
    assert reached == {f"blocks.0.{n}" for n in ("mixer.layer.in_proj", "mixer.layer.out_proj", *parts)} | {
        f"blocks.1.{n}" for n in ("mixer.in_proj", "mixer.out_proj", *parts)
    }
    before = model(input_ids=tokens, labels=tokens).loss
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(10):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < before - 0.1
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make("gated-delta,softmax"), tmp_path)
    with torch.no_grad():  # a loaded adapter is frozen; with gradients norms round otherwise
        want = model(input_ids=tokens).logits
        assert torch.equal(again(input_ids=tokens).logits, want)
    merged = model.merge_and_unload()
    assert isinstance(merged, FastWeightForCausalLM)
    torch.testing.assert_close(merged(tokens).logits, want, rtol=1e-4, atol=1e-4)


def test_label_smoothing_scores_the_next_token(tmp_path):
    model, tokens = make(), random_tokens(2, 9)
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.1, report_to="none", use_cpu=True)
    with torch.no_grad():
        got = Trainer(model, arguments).compute_loss(model, dict(input_ids=tokens, labels=tokens.clone()))
        log_p = model(tokens).logits[:, :-1].log_softmax(-1)
    nll = -log_p.gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(got, (0.9 * nll - 0.1 * log_p.mean(-1)).mean())


@pytest.mark.parametrize(("mixers", "head"), KINDS)
def test_packed_texts_do_not_see_each_other(mixers, head):
    """Each text as if it were alone: logits and gradients, whichever way their starts are told."""
    model = make(mixers, head=head).double().train()
    texts = [random_tokens(n, seed=n) for n in (5, 1, 9)]
    batch = DataCollatorWithFlattening(return_tensors="pt")([dict(input_ids=t.tolist()) for t in texts])
    offsets = torch.tensor([0, 5, 6, 15])
    ways = [
        dict(position_ids=batch["position_ids"]),
        dict(seq_idx=torch.tensor([[0] * 5 + [1] + [2] * 9])),
        dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=9, max_length_k=9),
    ]

    def gradients(logits):
        loss = (logits * torch.linspace(-1, 1, V, dtype=torch.float64)).square().sum()
        return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    want = torch.cat([model(t[None]).logits for t in texts], 1)
    of_want = gradients(want)
    for how in ways:
        got = model(batch["input_ids"], **how).logits
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients(got), of_want, rtol=1e-5, atol=1e-5)
    leaky = model(batch["input_ids"]).logits
    assert not torch.allclose(leaky, want, rtol=1e-3, atol=1e-3)


def test_packed_texts_beside_padding():
    """Positions that start again, in rows of which one is padded on the right and one on the left."""
    model = make("gated-delta,softmax", head="fwl").double()
    texts = [random_tokens(n, seed=n) for n in (4, 5, 6, 2)]
    rows = [torch.cat([*texts[:2], torch.zeros(1, dtype=torch.long)]), torch.cat([texts[3] * 0, *texts[2:]])]
    mask = torch.tensor([[1] * 9 + [0], [0] * 2 + [1] * 8])
    positions = torch.tensor([[*range(4), *range(5), 0], [0, 0, *range(6), *range(2)]])
    got = model(torch.stack(rows), attention_mask=mask, position_ids=positions).logits[mask.bool()]
    want = torch.cat([model(t[None]).logits[0] for t in texts])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_hidden_states_of_generated_tokens():
    model, tokens = make(), random_tokens(2, 5)
    how = dict(max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    out = model.generate(tokens, output_hidden_states=True, **how)
    assert [tuple(h.shape for h in step) for step in out.hidden_states] == [
        ((2, 5, 32),) * 3, ((2, 1, 32),) * 3, ((2, 1, 32),) * 3,
    ]  # fmt: skip
    with pytest.raises(FastWeightError, match="output_attentions is True; expected False: a memory has no attention"):
        model.generate(tokens, output_attentions=True, **how)


def test_what_a_forward_does_not_know_is_told():
    model, tokens = make(), random_tokens(2, 5)
    out = model(tokens, position_ids=torch.arange(5)[None], output_attentions=None, token_type_ids=tokens)
    assert torch.equal(out.logits, model(tokens).logits)
    with pytest.raises(FastWeightError, match="forward got temperature; expected no other keywords"):
        model(tokens, temperature=1.0)
    with pytest.raises(FastWeightError, match="past_key_values is a DynamicCache; expected a FastWeightCache, or None"):
        model.generate(tokens, past_key_values=DynamicCache(), max_new_tokens=2)
    with pytest.raises(FastWeightError, match="cache_implementation is 'quantized'; expected None: the state of this"):
        model.generate(tokens, cache_implementation="quantized", max_new_tokens=2)
    with pytest.raises(FastWeightError, match="continuous batching is asked for; expected `generate` with a batch"):
        model.generate_batch([[1, 2, 3]])


@pytest.mark.parametrize("head", ["linear", "fwl"])
def test_generation_goes_on_from_embeddings(head):
    model, tokens = make(head=head), random_tokens(2, 8)
    embedded = model.get_input_embeddings()(tokens)
    how = dict(max_new_tokens=4, do_sample=False)
    want = model.generate(tokens, **how)[:, 8:]
    cache = model(tokens[:, :5], use_cache=True).past_key_values
    assert torch.equal(model.generate(inputs_embeds=embedded, **how), want)
    assert torch.equal(model.generate(inputs_embeds=embedded, past_key_values=cache, **how), want)


def test_embeddings_of_no_token_teach_nothing():
    """A Fast Weight Layer learns from tokens; what is none is read, and the tokens after it are learned from."""
    model, tokens = make("delta", head="fwl").double(), random_tokens(1, 6)
    embedded = model.get_input_embeddings()(tokens).detach().clone()
    embedded[:, 3] += 0.1
    out = model(inputs_embeds=embedded)
    assert out.logits.isfinite().all()
    same = model(inputs_embeds=embedded[:, :3]).logits
    torch.testing.assert_close(out.logits[:, :3], same)
    torch.testing.assert_close(same, model(tokens[:, :3]).logits)


@pytest.mark.parametrize(("mixers", "head"), KINDS)
def test_a_draft_can_be_rejected(mixers, head):
    """What is cropped was never read: the state and the logits after it are those of the tokens that stayed."""
    model, tokens = make(mixers, head=head).double(), random_tokens(2, 12)
    cache = model(tokens[:, :4], use_cache=True).past_key_values
    cache.activate_past_recording()
    for wrong, right in ((4, 2), (3, 0), (1, 1)):
        seen = cache.get_seq_length()
        draft = torch.cat([tokens[:, seen : seen + right], random_tokens(2, wrong, seed=seen)], 1)
        model(draft[:, :-1], past_key_values=cache)
        model(draft[:, -1:], past_key_values=cache)
        cache.crop(-wrong)
        assert cache.get_seq_length() == seen + right
    got = model(tokens[:, 7:], past_key_values=cache)
    want = model(tokens, use_cache=True)
    torch.testing.assert_close(got.logits, want.logits[:, 7:])
    a, b = dict(flatten(cache.state)), dict(flatten(want.past_key_values.state))
    assert a.keys() == b.keys()
    if "softmax" not in mixers:  # which has kept what came before its window
        torch.testing.assert_close(a, b)


def test_as_assistant_and_with_one():
    model, draft, tokens = make(), make("gated-delta"), random_tokens(1, 6)
    how = dict(max_new_tokens=12, do_sample=False, eos_token_id=0, pad_token_id=0)
    want = model.generate(tokens, **how)
    for way in (dict(assistant_model=draft), dict(prompt_lookup_num_tokens=3)):
        got = model.generate(tokens, **way, **how)
        assert torch.equal(got[:, : want.shape[1]], want)  # transformers 5.0 goes one token further


def test_other_ways_to_generate():
    model, tokens = make(), random_tokens(2, 9)
    how = dict(max_new_tokens=4, do_sample=False)
    want = model.generate(tokens, **how)
    assert torch.equal(model.generate(tokens, prefill_chunk_size=4, **how), want)
    assert torch.equal(model.generate(tokens, cache_implementation="static", **how), want)
    assert torch.equal(model.generate(tokens, past_key_values=FastWeightCache(), **how), want)
    assert torch.equal(model(tokens, tokenizer=object()).logits, model(tokens).logits)  # as `transformers serve` calls


def test_attention_of_hybrids(saved):
    model = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="sdpa")
    tokens = random_tokens(1, 5)
    torch.testing.assert_close(model(tokens).logits, make()(tokens).logits)


@pytest.mark.parametrize("head", ["linear", "fwl"])
def test_compiles_and_exports_with_a_mask(head):
    model, tokens = make("gated-delta,softmax", head=head), random_tokens(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with torch.no_grad():
        want = model(tokens, mask)
    real = mask.bool()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens, mask).logits[real], want.logits[real], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        whole = torch.export.export(model, (tokens, mask), dict(use_cache=False)).module()
        step_inputs = dict(input_ids=tokens[:, :1], past_key_values=copy.copy(want.past_key_values), use_cache=True)
        step = torch.export.export(model, (), step_inputs).module()
        torch.testing.assert_close(whole(tokens, mask, use_cache=False).logits[real], want.logits[real])
        after = step(**step_inputs | dict(past_key_values=copy.copy(want.past_key_values)))
        exact = model(tokens[:, :1], past_key_values=copy.copy(want.past_key_values))
    torch.testing.assert_close(after.logits, exact.logits)
    torch.testing.assert_close(dict(flatten(after.past_key_values.state)), dict(flatten(exact.past_key_values.state)))


def test_generate_with_a_compiled_forward_that_overwrites_its_outputs():
    """As CUDA graphs do (mode="reduce-overhead"): what a call returned is gone when the next one starts."""
    returned = []

    def overwriting(graph, _):
        def run(*inputs):
            for old in returned:
                old.fill_(1)
            out = [x.clone() if isinstance(x, torch.Tensor) else x for x in graph(*inputs)]
            returned[:] = [x for x in out if isinstance(x, torch.Tensor)]
            return out

        return run

    model, tokens = make("delta", head="fwl"), random_tokens(2, 9)
    how = dict(max_new_tokens=4, do_sample=False)
    want = model.generate(tokens, **how)
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend=overwriting)
    assert torch.equal(model.generate(tokens, **how), want)
    assert returned


@pytest.mark.parametrize("head", ["linear", "fwl"])
def test_offloaded_to_disk(tmp_path, head):
    model, tokens = make(head=head), random_tokens(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    model.save_pretrained(tmp_path / "model")
    where = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.blocks.0": "disk", "model.blocks.1": "cpu",
             "model.norm": "disk"} | ({"fast": "disk"} if head == "fwl" else {})  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=where, offload_folder=tmp_path / "offloaded"
        )
    assert other.model.blocks[0].norm1.weight.is_meta
    assert torch.equal(other(tokens, mask).logits, model(tokens, mask).logits)
    how = dict(attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert torch.equal(other.generate(tokens, **how), model.generate(tokens, **how))


def test_checkpointing_reaches_the_blocks():
    """Recomputed blocks: the same gradients, padded rows too, and hooks on blocks fire."""
    model, tokens = make("gated-delta,softmax").double().train(), random_tokens(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    calls = []
    for block in model.model.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    found = []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable()
            assert all(block.gradient_checkpointing for block in model.model.blocks)
        model.zero_grad()
        model(tokens, mask, labels=torch.where(mask.bool(), tokens, -100)).loss.backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})
    torch.testing.assert_close(found[0], found[1])
    assert len(calls) == 6  # twice forwards, once more recomputed


@pytest.mark.parametrize(
    ("auto", "shape"),
    [
        (AutoModelForSequenceClassification, (2, 3)),
        (AutoModelForTokenClassification, (2, 9, 3)),
        (AutoModelForQuestionAnswering, (2, 9)),
    ],
)
def test_other_heads(saved, auto, shape):
    model = auto.from_pretrained(saved, num_labels=3, pad_token_id=0)
    out = model(random_tokens(2, 9))
    assert (out.logits if hasattr(out, "logits") else out.start_logits).shape == shape
    (out.logits if hasattr(out, "logits") else out.end_logits).sum().backward()
    assert model.model.blocks[0].mixer.layer.in_proj.weight.grad.abs().sum() > 0
