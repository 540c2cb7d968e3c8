"""Benchmarks of the kernels that run without a GPU in small."""

import io
import json
from importlib.util import find_spec

import pytest
import torch
from rich.console import Console

from fastweights.bench import decode, memory, report
from fastweights.bench.agree import Disagreement
from fastweights.bench.case import Case


def test_decoding_is_timed_and_shown():
    quietly = lambda what, steps: None  # noqa: E731
    results = decode.run(decode.SMOKE, [1, 3], "cpu", tokens=2, advance=quietly)
    ways = ("eager", *((decode.OURS, decode.THEIRS) if find_spec("transformers") else ()))
    assert [(r.batch, r.how) for r in results] == [(batch, how) for batch in (1, 3) for how in ways]
    asked = decode.prompts(("delta", "transformer"), ("linear", "fwl"), (4, 40), decode.SMOKE_SIZE)
    found = decode.after_prompts(asked, "cpu", tokens=2, advance=quietly, warm=0)
    assert [(r.model, r.tokens) for r in found] == [
        (name, n) for name in ("delta", "delta, fwl", "transformer") for n in (4, 40)
    ]
    carried = [r.carried for r in found]
    assert carried[0] == carried[1] < carried[2] == carried[3]  # whatever was read
    assert carried[5] > 9 * carried[4]
    assert all(r.tokens_per_second > 0 for r in (*results, *found))
    out = io.StringIO()
    decode.show(results, decode.SMOKE, "cpu", Console(file=out, width=80))
    decode.show_prompts(found, "smoke", "cpu", Console(file=out, width=80))
    assert "2 blocks of width 16" in out.getvalue()
    assert "…" not in out.getvalue()
    json.dumps([decode.payload(results, decode.SMOKE), decode.prompts_payload(found, "smoke")])


@torch.no_grad()
def test_other_tokens_are_no_result(monkeypatch):
    """A second way to step that writes another text ends the benchmark before anything is timed."""
    model, token = decode.LanguageModel(decode.SMOKE, 50).eval(), torch.tensor([0, 1])
    ((_, decoder),) = decode.writers(model, model.init_state(2), token)
    again = decode.Decoder(model, model.init_state(2), token, decode.likeliest)
    assert torch.equal(decode.write(decoder, 3), decode.write(again, decode.SAME + 3)[:, -3:])
    texts = iter([torch.zeros(2, 8), torch.ones(2, 8)])
    monkeypatch.setattr(decode, "write", lambda *a: next(texts))
    monkeypatch.setattr(decode, "ways", lambda token: (False, True))
    with pytest.raises(Disagreement, match="writes other tokens"):
        decode.writers(model, model.init_state(2), token)


def test_features_are_timed_and_checked():
    """The memory of the paper beside the same from eager features, both against float64."""
    case = Case("delta", (1, 40, 2, 4, 4), features="dpfp-3", norm="sum")
    (result,) = memory.run([case], repeats=1, methods=["chunked"])
    assert case.key_width == 24
    assert {"chunked", "eager features, chunked"} <= set(result.errors)
    assert max(result.errors["chunked"].values()) < 1e-5
    out = io.StringIO()
    report.show([result], Console(file=out, width=120))
    assert "1,40,2,4" in out.getvalue()
    assert "dpfp-3, sum" in out.getvalue()
    assert json.loads(json.dumps(report.payload("cpu", [result])))["results"][0]["features"] == "dpfp-3"


def test_the_shapes_of_a_gpu():
    asked = memory.cases(list(memory.SHAPES["cuda"]), ["delta", "sum"], "cuda", "bfloat16")
    assert [c.features for c in asked].count("dpfp-3") == len(memory.PAPER["cuda"])
    assert not any(c.mapped for c in memory.cases(list(memory.SHAPES["cuda"])[:1], ["delta"], "cuda", "bfloat16"))
