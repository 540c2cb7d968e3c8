"""Benchmarks of the kernels that run without a GPU in small."""

import io
import json

import pytest
import torch
from rich.console import Console

from fastweights.bench import decode, memory, report
from fastweights.bench.agree import Disagreement
from fastweights.bench.case import Case


def test_decoding_is_timed_and_shown():
    results = decode.run(decode.SMOKE, [1, 3], "cpu", tokens=2, advance=lambda what, steps: None)
    assert [(r.batch, r.how) for r in results] == [(1, "step by step"), (3, "step by step")]
    assert all(r.tokens_per_second > 0 for r in results)
    out = io.StringIO()
    decode.show(results, decode.SMOKE, "cpu", Console(file=out, width=100))
    assert "2 blocks of width 16" in out.getvalue()
    json.dumps(decode.payload(results, decode.SMOKE))


def test_other_tokens_are_no_result(monkeypatch):
    """A way to step that forgets the state writes another text, and then nothing is timed."""
    with torch.no_grad():
        writer = decode.Writer(decode.LanguageModel(decode.SMOKE, 50).eval(), 2, "cpu")
        want = decode.write(writer, writer.step, 6)
        assert torch.equal(decode.write(writer, writer.step, 6), want)
    texts = iter([want, want + 1])
    monkeypatch.setattr(decode, "write", lambda *a: next(texts))
    with pytest.raises(Disagreement, match="writes other tokens"):
        decode.run(decode.SMOKE, [1], "cpu", tokens=1, advance=lambda what, steps: None)


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
