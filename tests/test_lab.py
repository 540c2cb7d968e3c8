"""The lab: every experiment runs in small, interrupted runs go on, and the fast forms compute what the slow ones do."""

import ast
import importlib
import json
import math
import pkgutil
import subprocess
import sys
import time
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from fastweights import cli, lab  # noqa: E402
from fastweights.core import FastWeightError  # noqa: E402
from fastweights.lab import papers  # noqa: E402
from fastweights.lab.engine import claims, experiment, pool, results  # noqa: E402
from fastweights.lab.engine.experiment import Report  # noqa: E402
from fastweights.lab.engine.reproduce import reproduce  # noqa: E402
from fastweights.lab.engine.training import train  # noqa: E402
from fastweights.lab.tasks.key_value_retrieval import Model, Task, effective  # noqa: E402

LAB = Path(lab.__file__).parent
HERE = [m.name for m in pkgutil.iter_modules(papers.__path__)]
FOUND = [name for name in lab.EXPERIMENTS if name.replace("-", "_") in HERE]


@pytest.fixture
def toy(monkeypatch):
    """An experiment of three arms, in place of `capacity`; arm 1 can be told to fail."""
    module = type(sys)("toy")
    module.__doc__ = "Toy."
    module.FULL = module.SMOKE = dict(count=3, seeds=1)
    module.arms = lambda count, seeds: [dict(number=n, seed=0) for n in range(count * seeds)]
    module.ran, module.broken = [], False

    def run(arm, *, device, report):
        report(0.5, "half")
        if module.broken and arm["number"] == 1:
            raise KeyboardInterrupt
        module.ran.append(arm["number"])
        return [dict(square=arm["number"] ** 2, half=arm["number"] / 2, name="a", odd=arm["number"] % 2 == 1)]

    module.run = run
    module.plot = lambda rows, path: Path(path).write_bytes(b"PNG")
    module.size = lambda rows: f"{len(rows)} rows"
    module.holds = lambda rows: ("reproduced", f"{len(rows)} rows")
    module.CLAIMS = (claims.Claim("counts", "All is counted.", "3 rows", "Table 0", lambda rows: module.holds(rows)),)
    monkeypatch.setattr(experiment, "load", lambda name: module)
    return module


def test_runs_and_keeps_typed_rows(toy, tmp_path):
    outcome = reproduce("capacity", out=tmp_path)
    assert outcome.confirmed == ["reproduced: All is counted. Ours: 3 rows [3 rows; Table 0]"]
    assert not outcome.failed
    assert [p.name for p in outcome.files] == ["capacity.csv", "capacity.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["capacity.csv", "capacity.png"]
    (row,) = results.read_csv(tmp_path / "capacity.csv")[results.key(dict(number=1, seed=0))]
    assert row.pop("seconds") >= 0
    assert row == dict(number=1, seed=0, square=1, half=0.5, name="a", odd=True)


def test_interrupted_run_goes_on(toy, tmp_path):
    toy.broken = True
    with pytest.raises(KeyboardInterrupt):
        reproduce("capacity", out=tmp_path)
    assert toy.ran == [0]
    with open(tmp_path / "capacity.jsonl", "a") as file:
        file.write('{"arm": {"number": 2, "se')  # killed while writing
    toy.broken = False
    assert reproduce("capacity", out=tmp_path).missing == 0
    assert toy.ran == [0, 1, 2]
    reproduce("capacity", out=tmp_path)
    assert toy.ran == [0, 1, 2]  # the CSV alone says so


def test_parts_are_merged(toy, tmp_path):
    for part in ("1/2", "2/2"):
        assert reproduce("capacity", out=tmp_path, part=part).files == []
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    assert len(reproduce("capacity", out=tmp_path).confirmed) == 1
    assert toy.ran == [0, 2, 1]
    assert not list(tmp_path.glob("*.jsonl"))


def test_only_runs_some_and_shows_all(toy, tmp_path):
    assert reproduce("capacity", out=tmp_path, only="number=2").missing == 2
    assert toy.ran == [2]
    assert len(reproduce("capacity", out=tmp_path, seeds=2).rows) == 6
    with pytest.raises(FastWeightError, match=r"--only is 'number=9'; expected FIELD=VALUE.*number=0\|1\|2"):
        experiment.plan("capacity", out=tmp_path, only="number=9")


@pytest.mark.parametrize("part", ["0/2", "3/2", "x", "1/"])
def test_bad_parts(toy, tmp_path, part):
    with pytest.raises(FastWeightError, match="expected i/n with 1 <= i <= n"):
        experiment.plan("capacity", out=tmp_path, part=part)


def test_rows_may_not_contradict_their_arm(toy, tmp_path):
    with pytest.raises(FastWeightError, match="rows have seed, which the arm has"):
        results.Results(tmp_path, "capacity").add(dict(seed=0), [dict(seed=1)], 0.0)


def test_failed_claim_keeps_the_results(toy, tmp_path):
    toy.holds = lambda rows: ("partly", "4 rows")
    outcome = reproduce("capacity", out=tmp_path)
    assert outcome.failed == ["partly: All is counted. Ours: 4 rows [3 rows; Table 0]"]
    assert not outcome.confirmed
    assert (tmp_path / "capacity.csv").exists()


def test_time_over_keeps_what_is_done(toy, tmp_path):
    deadline_passed = reproduce("capacity", out=tmp_path, minutes=1e-9)
    assert deadline_passed.missing == 3
    assert toy.ran == []
    report = Report(deadline=time.monotonic() - 1)
    with pytest.raises(experiment.OutOfTime):
        report(0.1, "")


def test_unknown_experiment_lists_all():
    with pytest.raises(FastWeightError, match="experiment is 'frobnicate'; expected one of capacity, overwrite"):
        experiment.load("frobnicate")


def test_data_that_is_not_there_is_named_before_anything_runs(tmp_path):
    needs = r"--data is not given; expected a folder with multi30k/train.en, .*: translation reads them"
    with pytest.raises(FastWeightError, match=needs):
        reproduce("translation", out=tmp_path)
    with pytest.raises(FastWeightError, match=r"--data is .*nothing; expected a folder$"):
        reproduce("translation", out=tmp_path, data=tmp_path / "nothing")
    some = dict(out=tmp_path, only="group=application,corpus=stdlib-bytes")
    experiment.check_data([experiment.plan("language-model", **some)], None)  # reads what Python brings along
    with pytest.raises(FastWeightError, match=r"with wikitext-2/wiki.train.tokens, .*enwik8\*: language-model reads"):
        experiment.check_data([experiment.plan("language-model", out=tmp_path)], tmp_path)


def imports_of(path):
    """Modules of the lab that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{a.name}" for a in node.names] + [node.module]
        else:
            continue
        found |= {n for n in names if n in MODULES}
    return found


MODULES = {f"fastweights.lab.{'.'.join(p.relative_to(LAB).with_suffix('').parts)}": p
           for p in LAB.rglob("*.py") if p.name != "__init__.py"}  # fmt: skip


def test_floors_rest_on_each_other():
    """papers import tasks and engine, tasks import engine, engine imports neither; and nothing imports itself."""
    may = dict(papers={"tasks", "engine"}, tasks={"tasks", "engine"}, engine={"engine"})
    imports = {name: imports_of(path) for name, path in MODULES.items()}
    wrong = [f"{a} imports {b}" for a, found in imports.items() for b in found
             if b.split(".")[2] not in may[a.split(".")[2]]]  # fmt: skip
    assert not wrong
    assert imports["fastweights.lab.engine.pool"] >= {"fastweights.lab.engine.experiment"}  # the check can fail
    TopologicalSorter(imports).prepare()  # raises on a cycle


def test_experiments_are_light_to_import():
    """The list of what there is needs neither PyTorch nor NumPy."""
    code = "import sys, importlib, fastweights.lab as lab\n"
    code += "for n in lab.EXPERIMENTS: importlib.import_module('fastweights.lab.papers.' + n.replace('-', '_'))\n"
    code += "print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "matplotlib"} & set(loaded)
    assert "fastweights.lab.papers.translation" in loaded


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FastWeightError, match="cannot write to"):
        results.Results(tmp_path / "file" / "folder", "capacity")


def test_command_in_two_processes(monkeypatch, capsys, tmp_path):
    """The real thing, end to end, twice: the second time nothing is left to run."""
    arguments = ["reproduce", "associative", "--smoke", "--out", str(tmp_path), "--jobs", "2", "--device", "cpu"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["fastweights", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out = capsys.readouterr().out
        assert stop.value.code == 0, out
        assert "all models train" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["associative.csv", "associative.png"]


def test_failures_in_processes_cost_their_arms_alone(monkeypatch, tmp_path):
    """A process that fails or dies is replaced and every other arm is done; on a GPU the arm is tried once more."""
    plan = experiment.plan("recall", smoke=True, out=tmp_path)
    good = dict(plan.arms[0], steps=2)
    bad, deadly = dict(good, model="nothing"), dict(good, vocab=-1)
    plan.chosen = [bad, good, dict(good, seed=1), dict(good, seed=2)]
    broken = pool.run_all([plan], jobs=2)
    assert len(broken) == 1
    assert "model is 'nothing'" in broken[0]
    assert plan.missing(plan.chosen) == [bad]
    work, heard = pool._Pool([(plan, bad), (plan, deadly)], "cpu", None, math.inf, lambda *told: heard.append(told)), []
    work.device = "cuda"  # only the pool believes so
    assert len(work.run(2)) == 2
    assert [text for _, _, text in heard if "FAILED" in text]
    assert plan.missing(plan.chosen) == [bad]


def test_longest_arms_first(toy, tmp_path, monkeypatch):
    toy.cost = lambda arm: arm["number"]
    plan = experiment.plan("capacity", out=tmp_path)
    assert [plan.cost(arm) for arm in plan.arms] == [0.0, 1.0, 2.0]
    order = []
    monkeypatch.setattr(pool._Pool, "run", lambda self, jobs: order.extend(arm["number"] for _, arm in self.tasks))
    pool.run_all([plan], jobs=2)
    assert order == [2, 1, 0]
    del toy.cost
    assert plan.cost(plan.arms[2]) == 1.0


def test_list_names_every_experiment(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fastweights", "reproduce", "--list"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out = capsys.readouterr().out
    assert not stop.value.code
    assert all(f"{name}  " in out for name in FOUND)
    assert out.count("Cost: ") == len(FOUND)
    assert "Every memory with the delta rule answers better than softmax" in out
    assert "Computed from the results in" in out


@pytest.mark.parametrize("name", FOUND)
def test_every_experiment_says_what_it_is(name):
    text = experiment.docstring(name)
    for heading in ("Paper", "Claim", "Cost", "Differs"):
        assert experiment.about(text, heading), f"{name}: its docstring has no {heading}:"
    module = importlib.import_module(f"fastweights.lab.papers.{name.replace('-', '_')}")
    for settings in (module.FULL, module.SMOKE):
        arms = module.arms(**settings)
        assert len({results.key(arm) for arm in arms}) == len(arms)
        assert all("seed" in arm for arm in arms)
        assert json.loads(json.dumps(arms)) == arms


@pytest.mark.parametrize("name", FOUND)
def test_smoke_of_every_experiment(name, tmp_path):
    outcome = reproduce(name, smoke=True, out=tmp_path)
    assert not outcome.failed
    assert outcome.confirmed
    picture = (tmp_path / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    again = experiment.plan(name, smoke=True, out=tmp_path)
    assert not again.missing(again.arms)
    module = importlib.import_module(f"fastweights.lab.papers.{name.replace('-', '_')}")
    assert module.check_smoke(again.rows)  # rows read from the CSV serve as well


MODELS = [("elu+1", "sum", "attention", "stable"), ("favor-64", "sum", "attention", "published"),
          ("favor-64", "sum", "attention", "stable"), ("dpfp-2", "delta", "sum", "stable"),
          ("dpfp-1", "delta", "attention", "stable"), ("elu+1", "delta", "sum+attention", "stable"),
          ("elu+1", "delta", "nlms", "stable"), ("elu+1", "delta", "hellinger", "stable"),
          ("dpfp-1", "delta", "none", "stable"), ("favor-64", "delta", "sum", "published")]  # fmt: skip


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("features, rule, norm, form", MODELS)
def test_weights_of_pairs_are_the_memory_read(float64, features, rule, norm, form):
    """What training reads without a memory is what scoring reads from one, gradients included."""
    torch.manual_seed(0)
    model = Model(Task(9, replace=rule == "delta"), features, rule, norm, form=form, copies=2)
    model.bank = None if model.bank is None else model.bank.double()
    keys, values = model.task.sequences(3, model.task.length, 2, "cpu")
    asked, directions = model.task.question(keys, values)[0][:, None], model.directions()
    got = model.attend(keys, values, asked, directions)
    want = model.read(*model.memory(keys, values, directions), asked, directions)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    used = [p for p in model.parameters if p.requires_grad]
    for a, b in zip(torch.autograd.grad(got.square().sum(), used), torch.autograd.grad(want.square().sum(), used),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-10)


def test_memory_rule_of_the_fwm(float64):
    """Against the rule as it is written: remove what the key retrieves, add the mixture, scale back to norm 1."""
    torch.manual_seed(0)
    model = Model(Task(5, replace=True), "tanh", "fwm", "none", copies=1)
    keys, values = model.task.sequences(2, 10, 1, "cpu")
    got, _ = model.memory(keys, values, None)
    k, beta, v = torch.tanh(model.raw_keys(keys, values)), model.rates(keys, values), model.eye[values]
    W = torch.zeros(2, 5, 64)
    for t in range(10):
        old = torch.einsum("bvk,bk->bv", W, k[:, t, 0])
        new = beta[:, t] * v[:, t, 0] + (1 - beta[:, t]) * old
        W = W + torch.einsum("bv,bk->bvk", new - old, k[:, t, 0])
        if t:
            W = W / W.flatten(1).norm(dim=1).clamp(min=1)[:, None, None]
    torch.testing.assert_close(got[:, 0], W.mT)


def test_task_asks_for_the_last_value():
    torch.manual_seed(0)
    task = Task(6, replace=True)
    keys, values = task.sequences(50, 12, 2, "cpu")
    for asked, target in (task.question(keys, values), task.question(keys, values)):
        for b in range(50):
            for a in range(2):
                at = (keys[b, :, a] == asked[b, a]).nonzero()[-1, 0]
                assert values[b, at, a] == target[b, a]
    asked, target, occurs = task.all_questions(keys, values)
    assert torch.equal(occurs[0, :, 0], torch.isin(torch.arange(6), keys[0, :, 0]))
    assert target[0, keys[0, -1, 0], 0] == values[0, -1, 0]
    keys, values = Task(6, replace=False).sequences(3, 6, 2, "cpu")
    assert torch.equal(keys.sort(1).values, torch.arange(6)[:, None].expand(3, 6, 2))


def test_bounded_norms_never_grow():
    """The eigenvalue of a write along its key, 1 - beta |k|^2, stays in [0, 1]."""
    torch.manual_seed(0)
    raw, beta = 3 * torch.randn(2, 50, 1, 16), torch.rand(2, 50, 1)
    for norm in ("sum", "l2", "hellinger", "nlms"):
        k, rate, _ = effective(norm, "elu+1", raw, beta)
        gain = rate * k.square().sum(-1)
        assert gain.min() >= 0
        assert gain.max() <= 1 + 1e-5
    k, rate, _ = effective("none", "elu+1", raw, beta)
    assert (rate * k.square().sum(-1)).max() > 2


class Countdown:
    """A learner whose two copies have losses that are written down beforehand."""

    copies = 2

    def __init__(self, *losses):
        self.losses, self.steps, self.asked = losses, 0, 0

    def step(self):
        self.steps += 1

    def evaluate(self):
        self.asked += 1
        return torch.tensor([[x[min(self.asked, len(x)) - 1], 7.0] for x in self.losses])


def test_training_stops_each_copy_by_itself():
    learner = Countdown([1.0, 0.5, 0.0009], [1.0, 0.9, 0.95, math.nan, 0.95])
    other = Countdown([1.0, 0.9, 0.8, 0.7], [0.0, 0.0])
    (first, second), (third, fourth) = train([learner, other], steps=45, every=10, target=0.001, patience=3)
    assert (first.ended, first.steps[-1], first.last) == ("reached", 30, pytest.approx(0.0009))
    assert (second.ended, second.steps[-1], second.best) == ("patience", 45, pytest.approx(0.9))
    assert (third.ended, third.steps[-1]) == ("steps", 45)
    assert (fourth.ended, fourth.steps[-1], fourth.scores) == ("reached", 10, [[0.0, 7.0]])
    assert (learner.steps, other.steps) == (45, 45)


def test_training_ends_in_time():
    (course, _), *_ = train([Countdown([1.0], [1.0])], steps=100, every=10, seconds_left=lambda: 0.0)
    assert (course.ended, course.steps) == ("time", [10])


def test_bench_lab_checks_first(monkeypatch):
    from fastweights.bench import lab as bench
    from fastweights.bench.agree import Disagreement

    ticks = []
    result = bench.run(2, lambda what, n: ticks.append(n), **bench.SMOKE)
    assert len(ticks) == 4
    assert result.error < 1e-5
    assert set(bench.payload(result)) >= {"speedup", "published algorithm", "fastweights"}
    monkeypatch.setattr(bench, "dpfp", lambda x: torch.cat([x, -x], -1).relu() + 0.1)
    with pytest.raises(Disagreement, match="deviates from the published algorithm"):
        bench.run(2, lambda what, n: None, **bench.SMOKE)


def test_stacked_lstm_is_torch_lstm():
    from fastweights.lab.tasks.letters_and_digits import LSTM, Learner, Network, sequences

    torch.manual_seed(0)
    ours, x = LSTM(5, 7), torch.randn(3, 6, 5)
    theirs = torch.nn.LSTM(5, 7, batch_first=True)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(theirs, f"{name}_l0").data.copy_(getattr(ours.cell, name))
    torch.testing.assert_close(ours(x)[0], theirs(x)[0])
    learner = Learner("fast", 9, copies=2, device="cpu")
    symbols, digits = sequences(2, 4, "cpu")
    torch.manual_seed(1)  # the second copy's seed
    torch.testing.assert_close(learner(symbols)[1], Network("fast", 9)(symbols[1]))
    letters, asked = symbols[..., 0:8:2], symbols[..., -1:]
    at = (letters == asked).long().argmax(-1, keepdim=True)
    assert torch.equal(symbols[..., 1:8:2].gather(-1, at)[..., 0] - 26, digits)
