"""The command line without torch: help, unknown words, dry runs."""

from __future__ import annotations

import resource
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.cli.app import COMMANDS
from echelon.cli.help import paragraphs
from echelon.config import RunConfig
from echelon.trainer.folder import claim
from tests.machine import slowness
from tests.unit.cli.conftest import Here

DEADLINE_S = 120.0


def echelon(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Give a command to a process of its own."""
    command = [sys.executable, "-m", "echelon", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=cwd)


def test_help_is_quick_and_imports_no_torch() -> None:
    code = "import sys\nsys.argv = ['', '--help']\nfrom echelon.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "assert 'torch' not in sys.modules"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    best = min(_processor_s() for _ in range(3))
    assert best < 0.5 * slowness(), f"--help took {best:.2f} s"


def _processor_s() -> float:
    """Return what `--help` takes of the processor: what else the machine does is none of it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    echelon("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_version_names_what_a_bug_report_needs() -> None:
    done = echelon("--version")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("echelon 0.", "torch 2.", "Python 3."))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trian"], "did you mean train?"),
        (["train", "digits", "--bach-size", "3"], "--batch-size"),
        (["train", "digits", "--batch-size", "x"], "--batch-size"),
        (["train", "digits", "--epochs", "0"], "at least 1"),
        (["train", "digits", "--precision", "bf61"], "did you mean bf16"),
        (["train", "digits", "--config", "none.yaml"], "cannot read none.yaml"),
        (["train", "digits", "--parallel", "dp=3", "--workers", "2"], "3 ranks"),
        (["train", "digits", "--workers", "2", "--sync", "local(perod=3)"], "--sync: local has no setting 'perod'"),
        (["train", "digits", "--link", "fast"], "--link"),
        (["watch", "nowhere", "--once"], "does not exist: name the folder of a run or a study"),
        (["watch", "nowhere", "--wait", "soon"], "--wait: 'soon' is not a duration"),
        (["resume", "nowhere"], "holds no run"),
        (["report", "nowhere"], "holds no run: there is no such folder"),
        (["train", "digits", "other.csv"], "unexpected argument: other.csv"),
        (["list", "--json"], "there is no option --json"),
        (["resume", "runs/a", "--lr", "0.1"], "takes no --lr, which a run has from its start"),
        (["evaluate", "nowhere"], "holds no run"),
        (["compare"], "nothing to compare"),
        (["compare", "digits"], "no candidate to compare"),
        (["compare", "digits", "--try", "snyc=allreduce"], "did you mean sync"),
        (["compare", "digits", "--try", "sync=allreduce", "--seeds", "none"], "how many"),
        (["compare", "digits", "--try", "workers=-3"], "no run of this study can start: --workers"),
        (["compare", "none.yaml"], "cannot read none.yaml"),
        (["compare", "a.yaml", "--seeds", "3"], "describes the whole study"),
        (["compare", "--run", "nowhere"], "holds no study to continue"),
        (["compare", "nowhere", "--try", "sync=allreduce"], "unknown data 'nowhere'"),
    ],
)
def test_bad_words_are_one_line_and_exit_code_2(args: list[str], words: str, tmp_path: Path, here: Here) -> None:
    """`tests/ranks/test_mistakes.py` gives such words to processes."""
    done = here(*args)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_origins_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("optimizer: {lr: 0.2}\n")
    done = echelon(
        "train", "digits", "--config", "run.yaml", "--workers", "2", "--run", "a[lr=0.2]", "--dry-run", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "run.yaml, line 1" in lines["optimizer.lr"]
    assert "command line" in lines["launch.workers"]
    assert "small_cnn" in lines["model.name"] and "chosen for auto (default)" in lines["model.name"]
    assert "optimizer.momentum" not in lines and "run folder a[lr=0.2]" in done.stdout
    assert " a[lr=0.2] " in lines["run"]
    assert "would start 2 workers" in done.stdout
    assert "predicted memory per rank" in done.stdout and "while a checkpoint is written, its copy" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["run.yaml"]


def test_a_run_says_at_once_what_and_where_it_is_and_ctrl_c_before_it_begins_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        ["echelon", "train", "digits"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    first, second = process.stdout.readline(), process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=100)[0]
    assert first.startswith("digits, model small_cnn of 98,026 parameters; ")
    assert second.startswith("run folder runs/digits-small_cnn-1; Ctrl-C stops it")
    assert rest.endswith("echelon: stopped\n")
    assert process.returncode == 130 and not any(tmp_path.iterdir())


def test_names_of_runs_are_whole_in_a_pipe(tmp_path: Path) -> None:
    name = "a-name-of-a-run-that-is-longer-than-its-column-of-a-terminal-is-wide-by-itself"
    claim(replace(RunConfig(), run=str(tmp_path / "runs" / name)))
    lines = echelon("runs", cwd=tmp_path).stdout.splitlines()
    assert len(lines) == 2 and f"runs/{name} " in lines[1]


@pytest.mark.parametrize("columns", [60, 80])
def test_help_is_not_wider_than_the_terminal(columns: int, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (("--help",), *((name, "--help") for name in COMMANDS), ("list",), ("explain", "topk")):
        said = here(*words)
        assert said.returncode == 0 and said.stdout
        wide = [line for line in said.stdout.splitlines() if len(line) > columns]
        assert not wide, (words, wide)


def test_an_example_that_is_broken_is_still_the_same_command() -> None:
    line = 'echelon plan runs/NAME --at "workers=64, link=1gbit, memory=24GB" --page plan.html      and its page'
    _, *command, comment = paragraphs(f"Examples:\n  {line}", 60)
    assert comment == "      and its page" and all(len(part) <= 60 for part in command)
    typed = "\n".join(command).replace("\\\n", "")
    assert shlex.split(typed) == shlex.split(line.partition("      ")[0])
