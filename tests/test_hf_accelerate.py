"""transformers' own hybrid models on our operation: the same logits, gradients and tokens as on theirs."""

import contextlib
import copy
import io
import json

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.kimi_linear import KimiLinearConfig
from transformers.models.olmo_hybrid import OlmoHybridConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_next import Qwen3NextConfig, modeling_qwen3_next

from fastweights import FastWeightError
from fastweights.bench import hf as bench_hf
from fastweights.cli import bench_models
from fastweights.hf import accelerate
from fastweights.hf.accelerate import convolution, gated_delta_rule

SHARED = dict(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
LINEAR = dict(
    linear_key_head_dim=8, linear_value_head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2
)  # fmt: skip
CONFIGS = {
    "qwen3-next": lambda: Qwen3NextConfig(**SHARED, **LINEAR, head_dim=16, num_experts=0, mlp_only_layers=[0, 1]),
    "qwen3.5": lambda: Qwen3_5TextConfig(**SHARED, **LINEAR, head_dim=16),
    "olmo-hybrid": lambda: OlmoHybridConfig(**SHARED, **LINEAR | {"linear_num_key_heads": 2}),
    "kimi-linear": lambda: KimiLinearConfig(
        **SHARED, linear_head_dim=16, linear_num_heads=2, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, mlp_layer_types=["dense", "dense"],
    ),
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def model(request):
    torch.manual_seed(0)
    found = AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()
    with torch.no_grad():
        for name, x in found.named_parameters():
            if x.dim() == 1 or x.isnan().any():  # decays and norms, some of which are left as they were allocated
                x.copy_(torch.rand_like(x) if "A_log" not in name else torch.randn_like(x))
            else:
                x.copy_(torch.randn_like(x) * x.shape[-1] ** -0.5)
    return found


def tokens(B=2, T=70):
    return torch.randint(2, 50, (B, T), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def exact(monkeypatch):
    """A context in which transformers computes in float64 what its PyTorch code casts to float32."""

    @contextlib.contextmanager
    def context():
        with monkeypatch.context() as patch:
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            yield

    return context


def test_logits_and_gradients(model, exact):
    """Those of transformers' own path: float64 to 1e-9, float32 within 1e-5 of these, where theirs may be further."""

    def results(model):
        model.zero_grad()
        out = model(tokens(), labels=tokens())
        out.loss.backward()
        return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def check(got, want, tolerance):
        torch.testing.assert_close(got[0].double(), want[0], rtol=tolerance, atol=tolerance)
        assert got[1].keys() == want[1].keys()
        scale = max(g.abs().max() for g in want[1].values())
        for name, g in want[1].items():
            torch.testing.assert_close(
                got[1][name].double() / scale, g / scale, rtol=tolerance, atol=tolerance, msg=name
            )

    theirs, precise = results(model), copy.deepcopy(model).double()
    with accelerate(model):
        ours = results(model)
    assert not torch.equal(ours[0], theirs[0])  # it was computed another way
    with exact():
        want = results(precise)
        with accelerate(precise):
            got = results(precise)
    assert not torch.equal(got[0], want[0])
    check(got, want, 1e-9)
    check(ours, want, 1e-5)
    check(theirs, want, 1e-4)  # the same function
    assert torch.equal(results(model)[0], theirs[0])  # undone


@pytest.mark.parametrize("beams", [1, 3])
def test_generated_tokens_with_left_padding(model, beams):
    prompt, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    prompt[0, :4], mask[0, :4] = 0, 0
    run = lambda: model.generate(prompt, attention_mask=mask, max_new_tokens=8, num_beams=beams, do_sample=False)  # noqa: E731
    want = run()
    accelerate(model)
    assert torch.equal(run(), want)


def test_a_copy_runs_by_itself_and_twice_is_once(model):
    accelerated = accelerate(model)
    assert accelerated.layers
    assert not accelerate(model).layers  # nothing left to change
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = model(tokens()).logits
        for x in twin.parameters():
            x.zero_()
        assert torch.equal(model(tokens()).logits, before)
        assert not torch.equal(twin(tokens()).logits, before)
    accelerated.undo()
    assert all("forward" not in vars(layer) for layer in accelerated.layers)


def test_it_is_pickled_and_compiled(model):
    """What other processes get runs on our operation too; a compiler finds our names, not those that they stand for."""
    accelerate(model)
    want, file = model(tokens()).logits, io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(tokens()).logits, want)
    assert not accelerate(twin).layers
    compiled = torch.compile(lambda x: model(x, use_cache=False).logits, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens()), want, rtol=1e-5, atol=1e-5)


def test_a_model_reads_packed_rows_as_each_alone(model):
    x, offsets = tokens(1, 20), torch.tensor([0, 7, 20], dtype=torch.int32)
    packed = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=13, max_length_k=13)
    with accelerate(model), torch.no_grad():
        want = torch.cat([model(x[:, :7]).logits, model(x[:, 7:]).logits], 1)
        places = torch.cat([torch.arange(7), torch.arange(13)])[None]
        got = model(x, position_ids=places, use_cache=False, **packed).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_packed_rows_do_not_leak():
    """Which theirs refuse without flash-linear-attention."""
    q, k = torch.randn(2, 1, 9, 2, 4, dtype=torch.float64)
    v, g, beta = torch.randn(1, 9, 2, 3, dtype=torch.float64), -torch.rand(1, 9, 2), torch.rand(1, 9, 2)
    run = lambda a, b, **how: gated_delta_rule(q[:, a:b], k[:, a:b], v[:, a:b], g[:, a:b], beta[:, a:b], **how)  # noqa: E731
    o, _ = run(0, 9, cu_seqlens=torch.tensor([0, 4, 9]), use_qk_l2norm_in_kernel=True)
    for a, b in ((0, 4), (4, 9)):
        torch.testing.assert_close(o[:, a:b], run(a, b, use_qk_l2norm_in_kernel=True)[0])


def test_queries_that_are_not_normalised_are_scaled_all_the_same():
    """Of which no published model makes use."""
    q, k, v = torch.randn(3, 2, 70, 2, 8) * 0.3
    g, beta = -torch.rand(2, 70, 2), torch.rand(2, 70, 2)
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        theirs = getattr(modeling_qwen3_next, name)
        how = dict(g=g, beta=beta, initial_state=None, output_final_state=True)
        for got, want in zip(gated_delta_rule(q, k, v, **how), theirs(q, k, v, **how), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_convolutions_of_packed_rows_do_not_leak_either():
    x, weight = torch.randn(1, 3, 9, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    run = lambda x, **how: convolution(x, weight, activation="silu", **how)  # noqa: E731
    y = run(x, cu_seq_lens_q=torch.tensor([0, 4, 9]))
    for a, b in ((0, 4), (4, 9)):
        torch.testing.assert_close(y[..., a:b], run(x[..., a:b]))


def test_bench_times_what_agrees(capsys, tmp_path, monkeypatch):
    """Both sides of a family, or nothing where they differ."""
    path = tmp_path / "numbers.json"
    bench_models.hf(family=["kimi-linear"], smoke=True, json=path)
    (found, *_) = json.loads(path.read_text())["hf"]["milliseconds"]
    assert (found["family"], found["part"]) == ("kimi-linear", "rule")
    assert found["forward"]["theirs"] > 0
    assert "tokens/s" in capsys.readouterr().out
    monkeypatch.setattr(bench_hf, "gated_delta_rule", lambda *a, **how: [1.1 * gated_delta_rule(*a, **how)[0]])
    with pytest.raises(typer.Exit):
        bench_models.hf(family=["kimi-linear"], smoke=True, json=path)
    assert "outputs of kimi-linear, rule differ by" in capsys.readouterr().err
    with pytest.raises(FastWeightError, match="--family is 'llama'; expected one of qwen3-next"):
        bench_models.hf(family=["llama"], smoke=True, json=path)


def test_what_it_refuses():
    small = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(FastWeightError, match="LlamaForCausalLM has no layer that computes a gated delta rule"):
        accelerate(LlamaForCausalLM(small))
