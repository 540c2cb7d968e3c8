"""Our models in the Hugging Face ecosystem: the same numbers with and without cache, padded or not, saved or not."""

import copy
import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Trainer,
    TrainingArguments,
    pipeline,
)  # fmt: skip

from fastweights import tensor_files
from fastweights.core import FastWeightError
from fastweights.hf import FastWeightCache, FastWeightConfig, FastWeightForCausalLM, FastWeightModel, export
from fastweights.hf.export import from_language_model, tokenizer_of
from fastweights.lm import Config
from fastweights.models import run_folder
from fastweights.models.language_model import LanguageModel
from fastweights.text.tokenizer import Bytes, Subwords

SMALL = dict(vocab_size=40, hidden_size=16, num_attention_heads=2, sliding_window=6, pad_token_id=0)
FAST = dict(normalizer=4.0)
KINDS = [("gated-delta*2", "fwl"), ("delta,softmax", "linear"), ("softmax,lstm", "fwl"), ("retnet,performer", "linear")]
close = dict(rtol=1e-6, atol=1e-7)  # rotary angles are float32


def make(mixers="gated-delta*2", head="fwl", **changes):
    torch.manual_seed(0)
    config = FastWeightConfig(**(SMALL | dict(mixers=mixers, head=head, fast=FAST) | changes))
    return FastWeightForCausalLM(config).double().eval()


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "+".join(kind))
def model(request):
    return make(*request.param)


def random_tokens(*shape):
    return torch.randint(1, 40, shape, generator=torch.Generator().manual_seed(1))


def test_a_sequence_cut_anywhere_is_the_whole(model):
    tokens = random_tokens(2, 15)
    whole = model(tokens).logits
    out = model(tokens[:, :7])
    parts = [out.logits]
    for a, b in ((7, 8), (8, 13), (13, 15)):
        parts.append(model(tokens[:, a:b], past_key_values=out.past_key_values).logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, **close)


def test_padding_on_any_side_changes_nothing(model):
    tokens, after = random_tokens(3, 20), random_tokens(3, 3)
    mask = torch.rand(3, 20, generator=torch.Generator().manual_seed(2)) < 0.7
    mask[0] = torch.arange(20) >= 6
    mask[1] = torch.arange(20) < 14
    out = model(tokens, attention_mask=mask)
    more = model(after, past_key_values=out.past_key_values, attention_mask=torch.ones(3, 23)).logits
    for row in range(3):
        alone = model(tokens[row, mask[row]][None])
        torch.testing.assert_close(out.logits[row, mask[row]], alone.logits[0], **close)
        torch.testing.assert_close(
            more[row], model(after[row][None], past_key_values=alone.past_key_values).logits[0], **close
        )


@pytest.mark.parametrize("how", [
    dict(do_sample=False), dict(do_sample=True, top_k=10), dict(num_beams=3, do_sample=False),
    dict(num_beams=2, do_sample=True, num_return_sequences=2),
], ids=["greedy", "sample", "beams", "beam-sample"])  # fmt: skip
def test_generate_with_and_without_cache(model, how):
    tokens = random_tokens(3, 9)
    mask = (torch.arange(9) >= torch.tensor([[0], [3], [5]])).long()
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        found.append(model.generate(tokens, attention_mask=mask, max_new_tokens=8, use_cache=use_cache, **how))
    assert torch.equal(*found)
    if how == dict(do_sample=False):
        alone = model.generate(tokens[1:2, 3:], max_new_tokens=8, do_sample=False)
        assert torch.equal(found[0][1, 3:], alone[0])


def test_generate_goes_on_from_a_cache(model):
    tokens = random_tokens(2, 6)
    first = model.generate(tokens, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    more = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=4, do_sample=False)
    assert torch.equal(more, model.generate(tokens, max_new_tokens=8, do_sample=False))


def test_the_cache_has_constant_size_and_forks():
    model = make("gated-delta,softmax")
    cache = model(random_tokens(2, 3)).past_key_values
    size, fork = cache.bytes, copy.copy(cache)
    model(random_tokens(2, 30), past_key_values=cache)
    assert cache.bytes == size > 0
    assert (cache.get_seq_length(), fork.get_seq_length()) == (33, 3)
    one = random_tokens(2, 1)
    again = model(one, past_key_values=fork).logits
    torch.testing.assert_close(again, model(torch.cat([random_tokens(2, 3), one], 1)).logits[:, -1:], **close)
    want = model(one, past_key_values=copy.copy(cache)).logits
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    got = model(one[[0, 0, 1, 1]], past_key_values=copy.copy(cache)).logits
    torch.testing.assert_close(got, want[[0, 0, 1, 1]], **close)
    cache.batch_select_indices(torch.tensor([0, 3]))
    assert cache.batch_size == 2
    torch.testing.assert_close(model(one, past_key_values=copy.copy(cache)).logits, want, **close)
    cache.crop(0)
    with pytest.raises(FastWeightError, match=r"crop\(-5\) goes 5 tokens further back than was recorded; expected act"):
        cache.crop(-5)
    cache.reset()
    assert (cache.get_seq_length(), cache.is_initialized) == (0, False)


def test_wrong_caches_and_masks_are_told():
    model = make()
    cache = model(random_tokens(2, 3)).past_key_values
    with pytest.raises(FastWeightError, match="past_key_values has 2 rows; expected 3"):
        model(random_tokens(3, 1), past_key_values=cache)
    with pytest.raises(FastWeightError, match="past_key_values is a DynamicCache; expected a FastWeightCache"):
        model.model(random_tokens(3, 1), past_key_values=DynamicCache())
    with pytest.raises(FastWeightError, match="attention_mask has 2 columns; expected at least 3"):
        model(random_tokens(2, 3), attention_mask=torch.ones(2, 2))
    with pytest.raises(FastWeightError, match="head is 'magic'"):
        FastWeightConfig(head="magic")


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load(tmp_path, tied):
    model = make(tie_word_embeddings=tied).float()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.save_pretrained(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, FastWeightForCausalLM)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), FastWeightConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path), FastWeightModel)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    tokens = random_tokens(2, 9)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half(tokens).logits.dtype == torch.bfloat16


def test_labels_and_loss_are_those_of_other_models():
    model = make()
    tokens = random_tokens(2, 9)
    labels = tokens.clone()
    labels[0, :4] = -100
    out = model(tokens, labels=labels)
    logits, wanted = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(logits, wanted).to(out.loss.dtype), **close)
    assert model(tokens, labels=labels, return_dict=False)[0] == out.loss
    assert model(tokens, logits_to_keep=2).logits.shape == (2, 2, 40)
    assert len(model(tokens, output_hidden_states=True).hidden_states) == 3


def test_checkpointed_gradients_are_the_gradients():
    model = make("gated-delta,softmax").train()
    tokens, found = random_tokens(2, 9), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(tokens, attention_mask=torch.arange(9)[None] >= torch.tensor([[0], [2]]), labels=tokens).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, **close)


def test_trainer_trains_it(tmp_path):
    model = make().float()
    rows = [dict(input_ids=x, labels=x) for x in (torch.arange(12).repeat(8, 1) + torch.arange(8)[:, None]) % 9 + 1]
    before = model(rows[0]["input_ids"][None], labels=rows[0]["labels"][None]).loss
    how = TrainingArguments(output_dir=str(tmp_path), max_steps=25, per_device_train_batch_size=8, learning_rate=1e-2,
                            report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
                            dataloader_pin_memory=False, logging_strategy="no")  # fmt: skip
    Trainer(model=model, args=how, train_dataset=rows, eval_dataset=rows).train()
    after = model.eval()(rows[0]["input_ids"][None], labels=rows[0]["labels"][None]).loss
    assert after < before / 2


def language_model(head, **changes):
    torch.manual_seed(0)
    config = Config(dim=16, heads=2, layers="gated-delta,softmax", length=8, head=head, **dict(refresh=3) | changes)
    return LanguageModel(config, 257).eval()


@pytest.mark.parametrize(("head", "refresh"), [("linear", 0), ("fwl", 0), ("fwl", 3)])
def test_an_exported_model_has_the_same_logits(head, refresh):
    ours = language_model(head, refresh=refresh)
    theirs = from_language_model(ours)
    tokens = random_tokens(2, 20)
    logits = theirs(tokens).logits
    scores = ours.score(tokens[:, :-1], tokens[:, 1:])
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(scores.loss.flatten(), wanted, rtol=1e-4, atol=1e-4)
    state = ours.init_state(2)
    for t in range(20):
        got, state = ours.step(tokens[:, t], state)
        torch.testing.assert_close(got, logits[:, t], rtol=1e-4, atol=1e-4)
    theirs.config.adapt = False
    torch.testing.assert_close(theirs(tokens).logits, ours.logits(tokens)[0], rtol=1e-4, atol=1e-4)


TEXT = "The quick brown fox — naïve, 12345 times\n\t\tover  the lazy dog.\n\n  Übung  \u00a0 x\r\n" * 4


@pytest.mark.parametrize("ours", [Bytes(), Subwords.train(400, [TEXT.encode() * 3])], ids=["bytes", "bpe"])
def test_an_exported_tokenizer_gives_the_same_tokens(ours, tmp_path):
    tokenizer_of(ours).save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs(TEXT)["input_ids"]
    assert ids == [ours.start, *ours.encode(TEXT.encode())]
    assert theirs.decode(ids, skip_special_tokens=True) == TEXT
    assert len(theirs) == ours.size


def test_a_run_in_a_pipeline(tmp_path):
    ours = language_model("fwl")
    run = tmp_path / "run"
    run_folder.write_config(run, ours.config, 257)
    tensor_files.write_tensors(run / run_folder.BEST, {f"model.{n}": x for n, x in ours.state_dict().items()}, {})
    export(run, tmp_path / "exported")
    with pytest.raises(FastWeightError, match="exported exists; expected a new or an empty folder"):
        export(run, tmp_path / "exported")
    assert not list(tmp_path.glob(".exported*"))
    write = pipeline("text-generation", str(tmp_path / "exported"))
    found = write(["The", "A much longer text"], batch_size=2, max_new_tokens=5, do_sample=False)
    for text, rows in zip(["The", "A much longer text"], found, strict=True):
        alone = write(text, max_new_tokens=5, do_sample=False)
        assert rows == alone
        assert rows[0]["generated_text"].startswith(text)
    assert isinstance(write.model(torch.zeros(1, 1, dtype=torch.long)).past_key_values, FastWeightCache)


def test_lm_evaluation_harness(tmp_path):
    """Bits per byte of a local text by the harness are those that the logits say."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("datasets")
    from lm_eval.models.huggingface import HFLM

    text = "The quick brown fox jumps over the lazy dog."
    (tmp_path / "texts.jsonl").write_text(json.dumps(dict(page=text)) + "\n")
    model, tokenizer = from_language_model(language_model("fwl")), tokenizer_of(Bytes())
    task = dict(
        task="local_text", dataset_path="json", dataset_kwargs=dict(data_files=str(tmp_path / "texts.jsonl")),
        test_split="train", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{page}}",
        metric_list=[dict(metric="bits_per_byte")],
    )  # fmt: skip
    harness = HFLM(pretrained=model, tokenizer=tokenizer, max_length=256, device="cpu", add_bos_token=False)
    found = lm_eval.simple_evaluate(model=harness, tasks=[task], bootstrap_iters=0)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = model(ids, labels=ids).loss * (ids.shape[1] - 1) / math.log(2) / len(text.encode())
    assert found["results"]["local_text"]["bits_per_byte,none"] == pytest.approx(float(wanted), rel=1e-4)


def test_the_documentation_runs(capsys):
    page = (Path(__file__).parent.parent / "docs" / "huggingface.md").read_text()
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(block, namespace)
        promised = re.findall(r"^print\(.*\)\s+# (.*)$", block, re.M)
        assert capsys.readouterr().out.splitlines() == promised
