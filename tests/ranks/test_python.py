"""Training from a script without a guard, a notebook and a REPL, with classes that nobody can import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.ranks.runs import Runs

pytestmark = pytest.mark.timeout(400)

CLASSES = """
import echelon, torch
from torch import nn

print("the script runs")
SCALE = 3.0

class Dots(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        self.points = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    def __len__(self):
        return len(self.points)
    def __getitem__(self, index):
        return self.points[index], int(self.points[index].sum() > 0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
        self.scaled = lambda x: x * SCALE
    def forward(self, x):
        return self.scaled(self.layer(x))

torch.manual_seed(0)
my_module, my_train_set, my_test_set = Net(), Dots(400, 0), Dots(100, 1)
"""
TRAIN = """
data = my_train_set, my_test_set
outcome = echelon.train(model=my_module, data=data, epochs=3, workers={workers}, lr=0.05, device="cpu")
print("ended", outcome.status, outcome.summary["metrics"]["top1"] > 0.7, outcome.folder / "report.html")
"""
ENDED = "ended completed True runs/Dots-Net-1/report.html"


OUTCOME = """
model, history = outcome.model(), outcome.history
assert type(model) is Net and not model.training and model is not my_module
points, targets = my_test_set.points, (my_test_set.points.sum(1) > 0).long()
assert int((model(points).argmax(1) == targets).sum()) == round(100 * outcome.summary["best_top1"])
assert list(history["epoch"]) == [1, 2, 3] and history["eval_loss"].iloc[-1] < history["eval_loss"].iloc[0]
assert outcome.metrics["top1"] == history["top1"].iloc[-1] and (history["seconds"] > 0).all()
assert repr(outcome).startswith(f"Outcome(completed, top1 {outcome.metrics['top1']:.4g}, ")
assert outcome._repr_html_().startswith("<table>") and "runs/Dots-Net-1/report.html" in outcome._repr_html_()
again = echelon.resume(outcome.folder, epochs=4, model=my_module, data=data)
assert (again.status, list(again.history["epoch"]), type(again.model())) == ("completed", [1, 2, 3, 4], Net)
print("all of it holds")
"""


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param('parallel="fsdp=2"', marks=pytest.mark.long),
        # `tests/ranks/test_own_optimizer.py` gives servers a script's objects, at the start and the resume.
        pytest.param('sync="ps(mode=async)"', marks=pytest.mark.slow),
    ],
)
def test_a_script_without_a_guard_has_what_came_of_a_run_of_its_own_model_and_its_resume(
    tmp_path: Path, settings: str
) -> None:
    (tmp_path / "script.py").write_text(CLASSES + TRAIN.format(workers=f"2, {settings}") + OUTCOME)
    with Runs(tmp_path) as runs:
        run = runs.start(program=[sys.executable, "script.py"])
        assert run.end() == 0 and ENDED in run.text() and "all of it holds" in run.text(), run.text() + run.errors()
        assert run.text().count("the script runs") == 1, run.text()


@pytest.mark.long
def test_a_repl_trains(tmp_path: Path) -> None:
    typed = "".join(f"{line}\n" for line in _as_typed(CLASSES + TRAIN.format(workers=2)))
    done = _run([sys.executable, "-i"], tmp_path, typed)
    assert ENDED in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("the script runs") == 1


def _as_typed(code: str) -> list[str]:
    """Return lines with an empty one after each block, as a REPL wants them."""
    lines = [line for line in textwrap.dedent(code).splitlines() if line]
    following = [*lines[1:], ""]
    typed = []
    for line, after in zip(lines, following, strict=True):
        typed += [line, ""] if line.startswith(" ") and not after.startswith(" ") else [line]
    return typed


def _run(command: list[str], folder: Path, typed: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # kernels ask it
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        command, input=typed, capture_output=True, text=True, timeout=300, cwd=folder, env=environment
    )


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.slow)])
def test_a_notebook_cell_trains(tmp_path: Path, workers: int) -> None:
    cells = [_cell("0", CLASSES), _cell("1", TRAIN.format(workers=workers))]
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": spec}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "first.ipynb").write_text(json.dumps(notebook))
    execute = [str(Path(sys.executable).parent / "jupyter-execute"), "--inplace", "--timeout", "200", "first.ipynb"]
    done = _run(execute, tmp_path)
    assert done.returncode == 0, done.stderr
    outputs = json.loads((tmp_path / "first.ipynb").read_text())["cells"][1]["outputs"]
    text = "".join("".join(o.get("text", o.get("data", {}).get("text/plain", ""))) for o in outputs)
    assert ENDED in text and "epoch 3/3" in text, text


def _cell(name: str, source: str) -> dict[str, object]:
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    return cell | {"id": name, "source": source}


HERE = """
import logging, os, signal, sys, threading
pids, depths = set(), []

class Watched(Net):
    def forward(self, x):
        pids.add(os.getpid())
        breakpoint()
        return super().forward(x)

logging.basicConfig(stream=sys.stdout)
model = Watched()
weights = [p.detach().clone() for p in model.parameters()]
before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], torch.get_num_threads()
before += logging.getLogger().handlers[:], torch.get_rng_state().tolist()
sys.breakpointhook = lambda: depths.append(sys._getframe(1).f_code.co_name)
outcome = echelon.train(model, (my_train_set, my_test_set), epochs=1, workers=1, lr=0.05, device="cpu", threads=1)
after = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], torch.get_num_threads()
after += logging.getLogger().handlers[:], torch.get_rng_state().tolist()
"""


@pytest.mark.long
def test_one_worker_trains_in_the_process_itself_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        CLASSES + HERE + "assert outcome.status == 'completed'\n"
        "assert pids == {os.getpid()} and set(depths) == {'forward'}, (pids, depths)\n"
        "assert before == after and threading.active_count() == 1, threading.enumerate()\n"
        "assert all(map(torch.equal, weights, model.parameters()))\nprint('as it was')\n"
    )
    with Runs(tmp_path) as runs:
        run = runs.start(program=[sys.executable, "script.py"])
        assert run.end() == 0 and "as it was" in run.text(), run.text()
        assert "no restarts" in run.errors()


@pytest.mark.long
def test_what_own_code_raises_in_the_process_itself_ends_the_run_and_is_seen(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        CLASSES + "class Broken(Net):\n    def forward(self, x):\n"
        "        if len(x) > 2:  # not those that it is tried with\n            raise ValueError('too deep')\n"
        "        return super().forward(x)\n"
        "echelon.train(Broken(), (my_train_set, my_test_set), run='run', workers=1, device='cpu')\n"
    )
    with Runs(tmp_path) as runs:
        run = runs.start(program=[sys.executable, "script.py"], folder="run")
        assert run.end() == 1
        assert "ValueError: too deep" in run.errors() and "raise ValueError('too deep')" in run.errors()
        assert run.records("end")[-1]["status"] == "failed"
        assert (tmp_path / "run" / "report.html").exists()


FAILS = """
class Fails(Net):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + self.training
        if self.calls == 12:
            raise ValueError("cannot go on")  # in line {line}
        return super().forward(x)

try:
    data = my_train_set, my_test_set
    echelon.train(Fails(), data, epochs=2, batch_size=16, workers={workers}, device="cpu")
except echelon.RunFailed as failure:
    print("failed", failure)
"""


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_error_of_the_callers_code_is_told_with_its_line_and_not_tried_three_times(
    tmp_path: Path, workers: int
) -> None:
    line = 1 + (CLASSES + FAILS).partition("raise ValueError")[0].count("\n")
    (tmp_path / "script.py").write_text(CLASSES + FAILS.format(workers=workers, line=line))
    with Runs(tmp_path) as runs:
        run = runs.start(program=[sys.executable, "script.py"], folder="runs/Dots-Fails-1")
        assert run.end() == 0, run.text() + run.errors()
        told = f"ValueError: cannot go on (in step 12, {tmp_path / 'script.py'}:{line})"
        (words,) = [text for text in run.text().splitlines() if text.startswith("failed")]
        assert told in words, words
        log = (run.folder / "logs" / "rank0.log").read_text()
        assert "Traceback" in log and f'script.py", line {line}, in forward' in log
        assert len(run.events("worker_died")) == (0 if workers == 1 else 2)
        assert workers == 1 or "no restart: it failed in the same way twice" in words
