"""What is typed in a first hour, in order, and what can be checked of it without a reader."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.first_hour.browser import CHROMIUM, WIDTHS, photograph
from tests.first_hour.terminal import Terminal
from tests.first_hour.transcript import Transcript

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 280.0
CLOSE, CLOSE_S = (
    0.02,
    0.25,
)  # of what `time` says: a share, for a busy machine on which a process ends late, and seconds
BESIDE = ("nbclient", "ipykernel", "jupyter-core")
SMALL = "--threads 1 --device cpu"

LOOK_AROUND = (
    "echelon", "echelon --version", "echelon train --help", "echelon list", "echelon list codecs",
    "echelon explain topk", "echelon train digits --dry-run", 'echelon completion bash | head -5',
)  # fmt: skip
AFTER_IT = (
    "ls FIRST", "echelon evaluate FIRST --json", "echelon report FIRST",
    "echelon export FIRST weights.safetensors", "echelon watch FIRST --once",
    "echelon resume FIRST",
    "echelon train --config FIRST/config.yaml --epochs 1 | cat",
)  # fmt: skip
MISTAKES = (
    "echelon trian digits", "echelon train digitz", "echelon train ./nowhere", "echelon train digits --epoch 3",
    "echelon train digits --epochs 0", "echelon train digits --compression tpk", "echelon train digits --lr fast",
    'echelon train digits --sync "local(perod=3)"', "echelon train digits --parallel dp=3 --workers 2",
    "echelon train digits --run FIRST", "echelon resume runs/nothing",
    "echelon resume FIRST --epochs 1", "echelon export FIRST x.txt",
)  # fmt: skip
COMPARE = (
    f"echelon compare digits --workers 2 --epochs 4 --seeds 2 {SMALL} --run studies/first --try sync=allreduce "
    '--try compression=int8 --try "sync=local(period=4)" | cat'
)
MINE = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
my_train_set, my_test_set = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])
my_module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
"""


def readme_snippet() -> str:
    """Return README's first program."""
    found = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


class Hour:
    """A new user's folder, environment and transcript."""

    def __init__(self, out: Path, scratch: Path, python: Path | None) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.transcript, self.scratch = Transcript(out), scratch
        self.transcript.file.unlink(missing_ok=True)
        self.work = scratch / "work"
        self.work.mkdir()
        self.first = "runs/first"  # the folder that the first run chooses
        self.python = python or self._fresh_python()
        home = scratch / "home"
        home.mkdir()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "PYTEST"))},
            "PATH": f"{self.python.parent}:{os.environ['PATH']}", "HOME": str(home), "COLUMNS": "80",
        }  # fmt: skip

    def _fresh_python(self) -> Path:
        """Build the wheel and install it into an environment of its own, from what uv has cached."""
        self.transcript.heading("Install")
        environment, wheels = self.scratch / "env", self.scratch / "wheels"
        for command in (
            f"uv build -q --wheel --out-dir {wheels} {ROOT}",
            f"uv venv -q --python {sys.executable} {environment}",
            f"uv pip install -q --python {environment} {wheels}/*.whl {' '.join(BESIDE)}",
        ):
            began = time.monotonic()
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=900)
            said = f"{done.stdout}{done.stderr}[exit {done.returncode} after {time.monotonic() - began:.1f} s]"
            shown = command.replace(str(self.scratch), "SCRATCH").replace(str(ROOT), "CLONE")
            self.transcript.block(f"`{shown}`", said)
            assert done.returncode == 0, said
        return environment / "bin" / "python"

    def piped(self, command: str, code: int = 0, deadline_s: float = DEADLINE_S, traces: bool = False) -> str:
        """Give a command whose output is no terminal; returns what it printed.

        Args:
            traces: whether a traceback is what it should show, as a REPL does.
        """
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], cwd=self.work, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=deadline_s,
        )  # fmt: skip
        took_s = time.monotonic() - began
        self.transcript.block(f"`{command}`", f"{done.stdout.rstrip()}\n[exit {done.returncode} after {took_s:.1f} s]")
        self._check(command, done.returncode, code, "" if traces else done.stdout)
        return done.stdout

    def typed(self, terminal: Terminal, command: str, code: int = 0, stop_at: str = "") -> str:
        """Type a command in the terminal; returns the screen at its end."""
        ended, screens = terminal.run(command, DEADLINE_S, stop_at)
        for seconds, screen in screens[:-1]:
            self.transcript.block(f"`{command}` after {seconds:.0f} s:", screen)
        seconds, screen = screens[-1]
        self.transcript.block(f"`{command}` at its end:", f"{screen}\n[exit {ended} after {seconds:.1f} s]")
        self._check(command, ended, code, screen)
        return screen

    def _check(self, command: str, ended: int, code: int, text: str) -> None:
        self.transcript.expect(ended == code, f"{command}: exit code {ended}, not {code}")
        self.transcript.expect("Traceback" not in text, f"{command}: a traceback")

    def agrees_with_time(self, screen: str, run: str) -> None:
        """Hold the run's own clock against that of `time`."""
        minutes, seconds = re.findall(r"real\s+(\d+)m([\d.,]+)s", screen)[-1]
        real_s = 60 * int(minutes) + float(seconds.replace(",", "."))
        told_s = json.loads((self.work / run / "summary.json").read_text())["seconds"]
        problem = f"{run}: {told_s:.2f} s by its summary, {real_s:.2f} s by the clock"
        self.transcript.expect(abs(real_s - told_s) < CLOSE_S + CLOSE * real_s, problem)

    def pictures(self, name: str, address: str) -> None:
        """Take pictures of a page in both widths."""
        for width in WIDTHS:
            for tile in photograph(address, width, self.transcript.folder, name):
                self.transcript.picture(f"{name}, {width} px", tile)


def spend_an_hour(out: Path, python: Path | None = None) -> list[str]:
    """Go through the first hour; returns the problems that are seen without a reader.

    Args:
        out: a folder for the transcript and its pictures.
        python: of an environment with Echelon and what notebooks need; None: a fresh one is made from a built wheel.
    """
    with tempfile.TemporaryDirectory(prefix="echelon-hour-") as scratch:
        hour = Hour(out, Path(scratch), python)
        _look_around(hour)
        if shutil.which("tmux"):
            with Terminal(hour.work, hour.scratch, hour.environment) as terminal:
                _in_a_terminal(hour, terminal)
        else:
            hour.transcript.expect(False, "no tmux here: nothing was tried in a terminal")
        _in_a_pipe(hour)
        _from_python(hour)
        _study(hour)
        if CHROMIUM:
            _in_a_browser(hour)
        else:
            hour.transcript.expect(False, "no Chromium here: no page was looked at")
        shutil.rmtree(out / "profile", ignore_errors=True)
        return hour.transcript.problems


def _look_around(hour: Hour) -> None:
    hour.transcript.heading("Looking around")
    for command in LOOK_AROUND:
        hour.piped(command)


def _in_a_terminal(hour: Hour, terminal: Terminal) -> None:
    hour.transcript.heading("In a terminal of 80 columns")
    screen = hour.typed(terminal, f"time echelon train digits --epochs 4 {SMALL}")
    (first,) = (hour.work / "runs").iterdir()
    hour.first = f"runs/{first.name}"
    hour.agrees_with_time(screen, hour.first)
    hour.typed(terminal, f"echelon train digits --epochs 500 --run runs/stopped {SMALL}", 130, "epoch 3")
    hour.typed(terminal, "echelon resume runs/stopped --epochs 4")
    hour.typed(terminal, f'echelon train digits --epochs 3 --sync "ps(mode=async)" --run runs/served {SMALL}')
    hour.typed(terminal, f"echelon evaluate {hour.first}")


def _in_a_pipe(hour: Hour) -> None:
    hour.transcript.heading("In a pipe")
    screen = hour.piped(f"time echelon train digits --epochs 3 --compression int8 --run runs/piped {SMALL} 2>&1 | cat")
    hour.agrees_with_time(screen, "runs/piped")
    hour.transcript.heading("After a run")
    for command in AFTER_IT:
        hour.piped(command.replace("FIRST", hour.first))
    hour.transcript.heading("Mistakes")
    for command in MISTAKES:
        before = {path.name for path in (hour.work / "runs").iterdir()}
        hour.piped(command.replace("FIRST", hour.first), 2)
        new = {path.name for path in (hour.work / "runs").iterdir()} - before
        hour.transcript.expect(not new, f"{command} left {new}")


def _from_python(hour: Hour) -> None:
    hour.transcript.heading("From Python")
    program = MINE + readme_snippet()
    (hour.work / "script.py").write_text(program)
    hour.transcript.block("script.py, README's program behind data of one's own:", program)
    hour.piped("python script.py")
    lines = ["import echelon", "dir(echelon)", "help(echelon.train)", "echelon.train('small_cnn', 'digits', epochs=0)"]
    lines += ["outcome = echelon.train('small_cnn', 'digits', epochs=2, workers=1, device='cpu')", "outcome"]
    hour.piped(f"printf '%s\\n' {shlex.join(lines)} | PAGER=cat python -i", traces=True)
    cells = [MINE.strip(), readme_snippet(), "outcome", "outcome.summary['words']"]
    notebook = hour.work / "first.ipynb"
    notebook.write_text(json.dumps({
        "cells": [{"cell_type": "code", "id": f"cell{i}", "execution_count": None, "metadata": {}, "outputs": [],
                   "source": cell} for i, cell in enumerate(cells)],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4, "nbformat_minor": 5,
    }))  # fmt: skip
    hour.piped("jupyter execute --inplace first.ipynb")
    for cell in json.loads(notebook.read_text())["cells"]:
        below = []
        for output in cell["outputs"]:
            kinds = output.get("data") or {output.get("name", output["output_type"]): output.get("text", output)}
            below += [f"[{kind}] {''.join(text)}" for kind, text in kinds.items()]
        hour.transcript.block("a cell and what stands below it:", "\n".join(["".join(cell["source"]), "---", *below]))


def _study(hour: Hour) -> None:
    hour.transcript.heading("A study")
    hour.piped(COMPARE, deadline_s=580.0)
    hour.piped("echelon watch studies/first --once")
    hour.piped("du -sh studies/first; ls -l studies/first studies/first/runs/*/report.html")


def _in_a_browser(hour: Hour) -> None:
    hour.transcript.heading("In a browser")
    for name in (hour.first, "runs/served", "studies/first"):
        page = hour.work / name / "report.html"
        hour.transcript.expect(page.stat().st_size < 1_300_000, f"{name}: a page of {page.stat().st_size} bytes")
        hour.pictures(Path(name).name, page.as_uri())
    command = f"echelon train digits --epochs 5000 --serve --run runs/live {SMALL}"
    output = hour.scratch / "live.txt"
    with output.open("w") as out:
        process = subprocess.Popen(
            shlex.split(command), cwd=hour.work, env=hour.environment, stdout=out, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            ends = time.monotonic() + DEADLINE_S
            while "epoch 5" not in output.read_text():
                assert process.poll() is None and time.monotonic() < ends, output.read_text()
                time.sleep(0.2)
            address = re.search(r"live: (http\S+)", output.read_text())
            assert address is not None, output.read_text()
            hour.pictures("live", address[1])
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(60)
    hour.transcript.block(f"`{command}`, and Ctrl-C", f"{output.read_text()[-3000:]}\n[exit {code}]")
    hour.transcript.expect(code == 130, f"{command}: exit code {code}, not 130")
