"""`fastweights inspect`: what the page holds is what the model did, and a real browser shows it."""

import base64
import gzip
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import Visit, opened
from oracle import assert_close

import fastweights.torch as fw
from fastweights import cli
from fastweights.core import FastWeightError
from fastweights.inspect import page, page_data, run_reader
from fastweights.inspect.reading import SEGMENT, check_text
from fastweights.inspect.sources import NONE, SourceTracker
from fastweights.models import run_folder
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.tensor_files import write_tensors

pytest.importorskip("plotly", reason="plotly is not installed; pip install '.[inspect]'")

SCRIPT = (
    "<script>document.title = 'gone'</script><img src=http://example.org/x.png onerror=\"document.title='gone'\">\n"
)
TEXT = SCRIPT + "".join(f"größe{i % 7} = {i * i % 91}\t# {i}\n" for i in range(60))


def make_run(folder, seed=0, **changes):
    """A run with untrained weights."""
    config = Config(**dict(dim=16, heads=2, layers="gated-delta,linear", length=64, refresh=32) | changes)
    torch.manual_seed(seed)
    model = LanguageModel(config, 257)
    folder.mkdir()
    run_folder.write_config(folder, config, 257)
    write_tensors(folder / run_folder.BEST, {f"model.{n}": x for n, x in model.state_dict().items()}, {})
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two runs, and a text with markup in it."""
    place = tmp_path_factory.mktemp("inspect")
    make_run(place / "one")
    make_run(place / "two", seed=1, layers="delta", head="linear")
    (place / "text.txt").write_text(TEXT)
    return place


@pytest.fixture
def inspect(place, monkeypatch, capsys):
    """Run the command in this process: (exit code, standard output, standard error)."""

    def call(*arguments):
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", ["fastweights", "inspect", *map(str, arguments), "--device", "cpu"])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code or 0, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def reading(place):
    tracker = SourceTracker(4096, 10**9)
    return run_reader.read_run(
        place / "one", place / "text.txt", every=16, limit=0, device="cpu", observer=tracker
    ), tracker


def test_losses_are_those_of_the_model(place, reading):
    found, _ = reading
    model = run_folder.load(place / "one", device="cpu")
    row = torch.tensor([[256, *TEXT.encode()]])
    state, parts = None, []
    with torch.no_grad():
        for at in range(0, row.shape[1] - 1, SEGMENT):
            part = row[:, at : at + SEGMENT + 1]
            parts.append(model.score(part[:, :-1], part[:, 1:], state))
            state = parts[-1].state
    static, memory, fast = (m.losses for m in found.modes)
    assert [m.key for m in found.modes] == ["static", "memory", "fast"]
    assert_close(memory, torch.cat([x.slow[0] for x in parts]).double().numpy())
    assert_close(fast, torch.cat([x.loss[0] for x in parts]).double().numpy())
    assert np.allclose(static[:64], memory[:64], atol=1e-5), "the first window has no memory to miss"
    assert not np.allclose(static[64:], memory[64:], atol=1e-3)
    for back in found.rolled_back:
        assert np.allclose(back.losses[:64], memory[back.token : back.token + 64], atol=1e-5)
        assert len(back.losses) == len(row[0]) - 1 - back.token
    assert len(found.rolled_back) > 3


def test_sources_are_those_of_the_whole_text(place, reading):
    """Followed segment by segment, they are what one attribution of the whole text says."""
    model = run_folder.load(place / "one", device="cpu")
    with torch.no_grad(), fw.probe(model, keep=True) as p:
        model(torch.tensor([[256, *TEXT.encode()]])[:, :-1])
    followed = reading[1].result()
    assert list(followed) == [r.name for r in p.memories]
    for record in p.memories:
        whole, found = record.attribution(), followed[record.name]
        for sources, rows in ((found.reads, whole.rows()), (found.takes, whole.overwritten())):
            sizes = rows.weights[0].abs() * whole.sizes[0][None]
            share = (sizes / sizes.sum(-1, True).clamp(min=1e-30)).mean(1).numpy()
            t, j = np.nonzero(sources.distance != NONE)
            got = sources.share[t, j]
            assert np.allclose(got, share[t, t - sources.distance[t, j].astype(int)], atol=1e-4)
            assert np.allclose(sources.share[:, 0], share.max(1), atol=1e-4)
        taken = whole.overwritten().weights[0].abs().mean(1).sum(0).numpy()
        assert np.allclose(found.taken, taken, atol=1e-3)
        assert (found.taken > 0).any() == (record.rule == "delta")


def test_what_lies_before_the_window_is_told_as_one(place, reading):
    tracker = SourceTracker(128, 10**9)
    run_reader.read_run(place / "one", place / "text.txt", every=16, limit=0, device="cpu", observer=tracker)
    for name, found in reading[1].result().items():
        near, distance = tracker.result()[name].reads, found.reads.distance
        assert near.distance[near.distance != NONE].max() < 256
        in_segment = distance < np.arange(len(distance))[:, None] % 256
        inside = np.where((distance != NONE) & in_segment, found.reads.share, 0)
        assert (near.share.sum(1) + 1e-3 >= inside.sum(1) * near.share.sum(1).clip(0, 1)).all()
        assert (near.earlier[256:] > 0).any()
        assert not near.earlier[:256].any()


def test_every_character_belongs_to_a_token(reading):
    text, lengths = page_data.pieces(reading[0])
    assert text == TEXT
    assert lengths.sum() == len(TEXT)
    assert sorted(set(lengths)) == [0, 1], "the first byte of an umlaut is a token without a character"


def test_the_budget_decides_how_many_sources(reading):
    for budget, sources in ((10**9, (5, 3, 2)), (20 * 2 * 2000, (4, 2, 2)), (11 * 2000, (2, 1, 1))):
        tracker = SourceTracker(256, budget)
        tracker.begin(2000)
        tracker._plan(2)
        assert (*tracker.counts, tracker.memories) == sources


@pytest.fixture(scope="module")
def browser():
    with opened() as found:
        yield found


@pytest.fixture(scope="module")
def small_page(place, reading):
    path = place / "small.html"
    page.write(path, [page_data.model_block(reading[0], reading[1].result())], "What the memory did with text.txt")
    return path


def ready(visit):
    visit.page.wait_for_selector("body[data-ready=true]", timeout=60_000)
    return visit.page


@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize("width", [1400, 400], ids=["desktop", "phone"])
def test_a_browser_shows_the_page(browser, small_page, width):
    with Visit(browser, small_page, width=width, dark=width == 400) as visit:
        p = ready(visit)
        assert p.title() == "What the memory did with text.txt", "a script in the text has run"
        assert p.locator("img").count() == 0
        assert p.evaluate("document.documentElement.scrollWidth") <= width
        named = p.evaluate("""[...document.querySelectorAll('button, select, input, [tabindex], [role=img]')].filter(
            e => e.offsetParent && !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length))
            .map(e => e.outerHTML)""")
        assert named == []
        assert p.locator("html.dark").count() == (width == 400)
        p.get_by_role("button", name="Dark", exact=True).click()
        assert p.locator("html.dark").count() == (width != 400)
        text, detail = p.locator(".fw-text"), p.locator(".detail")
        text.click(position=dict(x=60, y=100))
        chosen = p.evaluate("views[0].token")
        assert chosen > 0
        assert f"Token {chosen:,}" in detail.inner_text()
        p.keyboard.press("ArrowRight")
        assert p.evaluate("views[0].token") == chosen + 1
        p.keyboard.press("End")
        assert f"Token {len(TEXT.encode()) - 1:,}" in detail.inner_text()
        assert "Where its read came from" in detail.inner_text()
        detail.locator("li button").first.click()
        assert p.evaluate("views[0].token") <= len(TEXT.encode()) - 1
        for mode, said in (("memory off", "empty memory"), ("memory on, layer learns", "learns from every token")):
            p.get_by_label(mode, exact=True).check()
            assert said in p.locator("fieldset + .about").inner_text()
        p.get_by_role("button", name="Roll the memory back to here").click()
        assert p.get_by_label("memory rolled back to token", exact=True).is_checked()
        assert p.evaluate("views[0].from") > 0
        assert "rolled back to token" in detail.locator("table").inner_text()
        p.get_by_label("Memory", exact=True).select_option(label="block 0 (delta)")
        for chart in range(2):
            choice = p.locator(".chart").nth(chart).locator("xpath=../select")
            choice.select_option(index=1)
            assert p.locator(".chart .main-svg").count() >= 2
        p.get_by_role("button", name=re.compile("^Go to token")).last.click()
        assert visit.problems == []
        assert visit.outside == []


@pytest.mark.xdist_group("browser")
def test_a_hundred_thousand_tokens_scroll(browser, place, monkeypatch):
    monkeypatch.setattr(run_reader, "ROLLED_BACK", 2)
    run = make_run(place / "narrow", dim=8, heads=1, layers="gated-delta", head="linear", length=1024)
    long = place / "long.txt"
    long.write_text((TEXT * 100)[:100_000].encode()[:100_000].decode("utf-8", "ignore"))
    tracker = SourceTracker(256, 3_600_000)
    found = run_reader.read_run(run, long, every=16, limit=100_000, device="cpu", observer=tracker)
    size = page.write(place / "long.html", [page_data.model_block(found, tracker.result())], "long")
    assert len(found.text.tokens) > 99_990
    assert size < 10_000_000
    with Visit(browser, place / "long.html") as visit:
        p = ready(visit)
        assert p.evaluate("document.getElementsByTagName('*').length") < 3000, "something is made for every token"
        p.locator(".fw-text").focus()
        p.keyboard.press("End")
        p.wait_for_function("views[0].box.scrollTop > 10000")
        p.evaluate("views[0].box.scrollTop = views[0].box.scrollHeight / 2")
        p.wait_for_function("views[0].painted > 5 && views[0].painted < 60")
        assert visit.problems == []
        assert visit.outside == []


@pytest.mark.xdist_group("browser")
def test_two_models_side_by_side(browser, place, inspect):
    code, out, err = inspect("one", "text.txt", "--compare", "two", "-o", "both.html", "--limit", 500)
    assert code == 0, err
    assert "Written to both.html" in out
    with Visit(browser, place / "both.html", width=1600) as visit:
        p = ready(visit)
        boxes = [b.bounding_box() for b in p.locator(".fw-text").all()]
        assert len(boxes) == 2
        assert boxes[0]["y"] == pytest.approx(boxes[1]["y"], abs=80)
        assert boxes[1]["x"] > boxes[0]["x"] + boxes[0]["width"]
        p.locator(".fw-text").first.click(position=dict(x=60, y=100))
        assert p.evaluate("views[0].token === views[1].token && views[1].token > 0")
        p.set_viewport_size(dict(width=400, height=800))
        p.wait_for_function("document.documentElement.scrollWidth <= 400")
        assert visit.problems == []


def blocks_of(path: Path) -> list[dict]:
    """The headers of a page's models."""
    packed = re.findall(r'<script type="application/octet-stream" class="model">(.*?)</script>', path.read_text())
    found = [gzip.decompress(base64.b64decode(p)) for p in packed]
    return [json.loads(b[4 : 4 + int.from_bytes(b[:4], "little")]) for b in found]


def test_models_of_hugging_face(place, inspect):
    pytest.importorskip("transformers")
    from fastweights.hf.export import export

    export(place / "one", place / "exported")
    code, _, err = inspect("exported", "text.txt", "--hf", "-o", "hf.html", "--limit", 300)
    assert code == 0, err
    code, _, err = inspect("one", "text.txt", "-o", "run.html", "--limit", 300)
    assert code == 0, err
    (theirs,), (ours,) = blocks_of(place / "hf.html"), blocks_of(place / "run.html")
    bits = {m["key"]: m["bits"] for m in theirs["modes"]}
    same = {m["key"]: m["bits"] for m in ours["modes"]}
    assert bits["memory"] == pytest.approx(same["memory"], rel=1e-3)
    assert bits["fast"] == pytest.approx(same["fast"], rel=1e-2)
    assert [m["name"] for m in theirs["memories"]] == ["block 0", "block 1"]


def save_model(folder, config):
    """A Hugging Face model with untrained weights that reads bytes."""
    from transformers import AutoModelForCausalLM

    from fastweights.hf.export import tokenizer_of
    from fastweights.text.tokenizer import Bytes

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    tokenizer_of(Bytes()).save_pretrained(folder)
    return model


def test_models_of_others(place, inspect):
    """transformers' own hybrid model is probed as ours are; any model with a head shows what the head learned."""
    transformers = pytest.importorskip("transformers")
    from fastweights.hf.attach import attach, save_attached

    sizes = dict(vocab_size=260, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=2)  # fmt: skip
    hybrid = transformers.Qwen3NextConfig(
        **sizes, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=1, linear_num_value_heads=2, head_dim=16, num_experts=0, mlp_only_layers=[0, 1],
    )  # fmt: skip
    model = save_model(place / "hybrid", hybrid)
    code, _, err = inspect("hybrid", "text.txt", "--hf", "-o", "hybrid.html", "--limit", 100, "--window", 100)
    assert code == 0, err
    (found,) = blocks_of(place / "hybrid.html")
    assert [(m["name"], m["rule"], m["heads"]) for m in found["memories"]] == [("block 0", "delta", 2)]
    row = torch.tensor([[256, *TEXT.encode()[:100]]])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(row[:, :-1]).logits[0], row[0, 1:])
    assert found["modes"][0]["bits"] == pytest.approx(float(loss) / np.log(2), rel=1e-3)

    plain = save_model(place / "plain", transformers.LlamaConfig(**sizes))
    code, _, err = inspect("plain", "text.txt", "--hf")
    assert code == 2
    assert "LlamaForCausalLM has no layer that computes a gated delta rule" in err.replace("\n", " ")
    attach(plain, 16, refresh=16, step_size=0.05)
    save_attached(plain, place / "plain.head")
    code, _, err = inspect("plain", "text.txt", "--hf", "--head", "plain.head", "-o", "head.html", "--limit", 200)
    assert code == 0, err
    (found,) = blocks_of(place / "head.html")
    assert [m["key"] for m in found["modes"]] == ["static", "fast"]
    assert found["memories"] == []
    assert [c["kind"] for c in found["figures"]["curves"]] == ["losses", "steps"]
    assert found["figures"]["curves"][1]["figure"]["layout"]["yaxis"]["rangemode"] == "tozero"


def test_errors_say_what_is_wrong(place, inspect):
    make_run(place / "lstm", layers="lstm", head="linear")
    make_run(place / "newer")
    config = json.loads((place / "newer" / "config.json").read_text())
    config["config"]["colour"] = "red"
    del config["sha256"]
    (place / "newer" / "config.json").write_text(json.dumps(config))
    (place / "zeros.bin").write_bytes(b"abc\0def")
    (place / "noise.bin").write_bytes(bytes(range(128, 256)) * 4)
    (place / "empty.txt").write_bytes(b"")
    for arguments, said in (
        (("lstm", "text.txt"), "run lstm has blocks lstm; expected at least one with a fast-weight memory"),
        (("one", "zeros.bin"), "zeros.bin is not text: byte 3 of it is 0; expected a text file"),
        (("one", "noise.bin"), "noise.bin is not text: 100% of it is no UTF-8"),
        (("one", "empty.txt"), "empty.txt is empty"),
        (("one", "none.txt"), "cannot read none.txt"),
        (("nowhere", "text.txt"), "run nowhere does not exist"),
        (
            ("newer", "text.txt"),
            "config has colour; expected fields of Config: it is from another version of fastweights",
        ),
        (("one", "text.txt", "--head", "x"), "--head is x without --hf"),
        (("one", "text.txt", "--hf"), "cannot be read: Unrecognized model in one"),
    ):
        code, _, err = inspect(*arguments)
        assert code == 2, arguments
        assert said in err.replace("\n", " "), err


def test_text_is_checked():
    check_text(Path("a"), "plain ünd".encode())
    check_text(Path("a"), "mostly text, one byte \xe9 of Latin-1".encode("latin-1"))
    with pytest.raises(FastWeightError, match="is not text"):
        check_text(Path("a"), b"\xff\xfe\xfd")
