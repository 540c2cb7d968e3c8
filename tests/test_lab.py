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
from two_processes import forked, same_worker

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from fastweights import cli, lab  # noqa: E402
from fastweights.core import FastWeightError  # noqa: E402
from fastweights.lab import papers  # noqa: E402
from fastweights.lab.engine import claims, experiment, plans, processes, results, runner  # noqa: E402
from fastweights.lab.engine.experiment import Report  # noqa: E402
from fastweights.lab.engine.reproduce import reproduce  # noqa: E402

LAB = Path(lab.__file__).parent


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
    module.cost = lambda arm: 1.0
    module.plot = lambda rows, path: Path(path).write_bytes(b"PNG")
    module.size = lambda rows: f"{len(rows)} rows"
    module.holds = lambda rows: ("reproduced", f"{len(rows)} rows")
    module.CLAIMS = (claims.Claim("counts", "All is counted.", "3 rows", "Table 0", lambda rows: module.holds(rows)),)
    for part in (experiment, plans):
        monkeypatch.setattr(part, "load", lambda name: module)
    return module


def test_runs_and_keeps_typed_rows(toy, tmp_path):
    outcome = reproduce("capacity", out=tmp_path)
    assert outcome.confirmed == ["reproduced: All is counted. Ours: 3 rows [3 rows; Table 0]"]
    assert not outcome.failed
    assert [p.name for p in outcome.files] == ["capacity.csv", "capacity.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["capacity.csv", "capacity.png"]
    (row,) = results.read_csv(tmp_path / "capacity.csv")[results.arm_key(dict(number=1, seed=0))]
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
        plans.plan("capacity", out=tmp_path, only="number=9")


@pytest.mark.parametrize("part", ["0/2", "3/2", "x", "1/"])
def test_bad_parts(toy, tmp_path, part):
    with pytest.raises(FastWeightError, match="expected i/n with 1 <= i <= n"):
        plans.plan("capacity", out=tmp_path, part=part)


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


def test_every_file_of_papers_is_an_experiment():
    files = [module.name for module in pkgutil.iter_modules(papers.__path__)]
    assert sorted(files) == sorted(name.replace("-", "_") for name in lab.EXPERIMENTS)


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
    plans.check_data([plans.plan("language-model", **some)], None)  # reads what Python brings along
    with pytest.raises(FastWeightError, match=r"with wikitext-2/wiki.train.tokens, .*enwik8\*: language-model reads"):
        plans.check_data([plans.plan("language-model", out=tmp_path)], tmp_path)


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
    assert imports["fastweights.lab.engine.runner"] >= {"fastweights.lab.engine.experiment"}  # the check can fail
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


@same_worker
def test_failures_in_processes_cost_their_arms_alone(tmp_path):
    """A process that fails or dies is replaced and every other arm is done; on a GPU the arm is tried once more."""
    plan = plans.plan("recall", smoke=True, out=tmp_path)
    good = dict(plan.arms[0], steps=2)
    bad, deadly = dict(good, model="nothing"), dict(good, vocab=-1)
    plan.chosen = [bad, good, deadly, dict(good, seed=1)]
    shown = []
    pool = processes.ProcessPool(
        [(plan, arm) for arm in plan.chosen], "cpu", None, math.inf, lambda *message: shown.append(message)
    )
    pool.retries, pool.context = True, forked()  # as on a GPU
    failures, failed = [], pool._failed
    pool._failed = lambda number, i, error: (failures.append(i), failed(number, i, error))
    errors = pool.run(2)
    assert len(errors) == 2
    assert "model is 'nothing'" in errors[0]
    assert len([text for _, _, text in shown if "FAILED" in text]) == 2
    assert plan.missing(plan.chosen) == [bad, deadly]
    assert sorted(failures) == [0, 0, 2, 2]  # tried twice each, in another process


def test_longest_arms_first(toy, tmp_path, monkeypatch):
    toy.cost = lambda arm: arm["number"]
    plan = plans.plan("capacity", out=tmp_path)
    assert [plan.cost(arm) for arm in plan.arms] == [0.0, 1.0, 2.0]
    order = []
    monkeypatch.setattr(
        processes.ProcessPool, "run", lambda self, jobs: order.extend(arm["number"] for _, arm in self.tasks)
    )
    runner.run_all([plan], jobs=2)
    assert order == [2, 1, 0]


def test_list_names_every_experiment(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fastweights", "reproduce", "--list"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out = capsys.readouterr().out
    assert not stop.value.code
    assert all(f"{name}  " in out for name in lab.EXPERIMENTS)
    assert out.count("Cost: ") == len(lab.EXPERIMENTS)
    assert "Every memory with the delta rule answers better than softmax" in out
    assert "Computed from the results in" in out


@pytest.mark.parametrize("name", lab.EXPERIMENTS)
def test_every_experiment_says_what_it_is(name):
    text = experiment.docstring(name)
    for heading in ("Paper", "Claim", "Cost", "Differs"):
        assert experiment.section(text, heading), f"{name}: its docstring has no {heading}:"
    module = importlib.import_module(f"fastweights.lab.papers.{name.replace('-', '_')}")
    for settings in (module.FULL, module.SMOKE):
        arms = module.arms(**settings)
        assert len({results.arm_key(arm) for arm in arms}) == len(arms)
        assert all("seed" in arm for arm in arms)
        assert json.loads(json.dumps(arms)) == arms


@pytest.mark.parametrize("name", lab.EXPERIMENTS)
def test_smoke_of_every_experiment(name, tmp_path):
    outcome = reproduce(name, smoke=True, out=tmp_path)
    assert not outcome.failed
    assert outcome.confirmed
    picture = (tmp_path / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    again = plans.plan(name, smoke=True, out=tmp_path)
    assert not again.missing(again.arms)
    module = importlib.import_module(f"fastweights.lab.papers.{name.replace('-', '_')}")
    assert module.check_smoke(again.rows)  # rows read from the CSV serve as well
