"""Descriptions, data folders and run folders that are someone else's, or not what they were."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from PIL import Image

from tests.attack.scenario import Scenario
from tests.ranks.run_many import Result, run_many
from tests.ranks.runs import SMALL, Runs

MANY = 10
MOST_BYTES = 300_000_000
TINY = (*SMALL, "--workers", "1", "--batch-size", "100", "--model", "mlp")
MINE = """
from torch import nn


def build(classes: int, channels: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, classes))
"""


@dataclass(frozen=True)
class _Done:
    code: int
    out: str
    err: str
    seconds: float


def _echelon(folder: Path, *arguments: str, most_bytes: int | None = None) -> _Done:
    """Run a command to its end, which may hold so many bytes; `seconds` are the processor's."""
    limit = [] if most_bytes is None else ["prlimit", f"--data={most_bytes}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*limit, sys.executable, "-m", "echelon", *arguments],
        cwd=folder, env={**os.environ, "XDG_STATE_HOME": str(folder / "state")},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _Done(done.returncode, done.stdout, done.stderr, seconds)


def _assert_one_line(done: _Done | Result, *words: str) -> None:
    lines = done.err.strip().splitlines()
    assert done.code == 2 and len(lines) == 1, f"exit code {done.code}: {done.err[-500:]}"
    assert all(word in lines[0] for word in words), f"{words} not in {lines[0]}"


def _foreign(folder: Path) -> None:
    """Write the folder of a run, a file of settings and a study, each naming code that notes that it was imported."""
    (folder / "theirs.py").write_text("from pathlib import Path\nPath('imported').touch()\n" + MINE)
    for setting in ("model", "data", "task", "on"):
        described = {"launch": {"on": "theirs:build"}} if setting == "on" else {setting: "theirs:build"}
        run = folder / f"run-{setting}"
        (run / "checkpoints" / "step-00000001").mkdir(parents=True)
        (run / "config.yaml").write_text(yaml.safe_dump(described))
        study = {"base": {setting: "theirs:build"}, "candidates": ["sync=allreduce"]}
        (folder / f"study-{setting}.yaml").write_text(yaml.safe_dump(study))
    (folder / "study").mkdir()
    shutil.copy(folder / "study-model.yaml", folder / "study" / "study.yaml")


def foreign_code(folder: Path) -> str:
    """Try every command on a folder whose descriptions name its own code."""
    _foreign(folder)
    commands = [
        ("evaluate", "run-model"), ("evaluate", "run-data"), ("evaluate", "run-task"), ("resume", "run-model"),
        ("resume", "run-on"), ("train", "--config", "run-model/config.yaml"),
        ("train", "--config", "run-data/config.yaml", "--dry-run"), ("compare", "study-model.yaml"),
        ("compare", "study-data.yaml", "--dry-run"), ("compare", "--run", "study"),
        ("predict", "run-model", "theirs.py"), ("predict", "run-data", "theirs.py"), ("serve", "run-model"),
        ("finetune", "run-model", "digits"), ("export", "run-model", "model.onnx"),
        ("plan", "run-model", "--at", "workers=4"), ("plan", "--config", "run-model/config.yaml", "--at", "workers=4"),
    ]  # fmt: skip
    without = [("report", "run-model"), ("export", "run-model", "weights.safetensors"), ("runs", ".")]
    flow = {"steps": {"e": {"evaluate": "run-model"}, "f": {"finetune": ["run-model", "digits"]}}}
    (folder / "flow.yaml").write_text(yaml.safe_dump(flow))
    *results, ended = run_many(folder, [*commands, *without, ("flow", "flow.yaml")])
    for result in results[: len(commands)]:
        _assert_one_line(result, "theirs:build", str(folder.resolve() / "theirs.py"), "--trust")
    assert not [result for result in results if "Traceback" in result.err]  # `without` need the code for nothing
    said = ended.out + ended.err  # a script, but what it reads is another's
    assert ended.code == 1 and said.count("theirs:build would import") == 2, said
    assert not (folder / "imported").exists(), "it was imported"
    told = _echelon(folder, "evaluate", "run-model", "--trust").err.splitlines()
    assert "importing" in told[0] and "theirs.py" in told[0], told
    return (
        f"{len(commands)} commands and two steps of a flow refused in one line, report and export import nothing, "
        "--trust says what it does"
    )


def own_code(folder: Path) -> str:
    """Train with a model of one's own, then evaluate, resume and move the run."""
    (folder / "mine.py").write_text(MINE)
    run = ["train", "digits", *TINY[:-2], "--model", "mine:build", "--epochs", "1", "--run", "first"]
    for command in (run, ["evaluate", "first"], ["resume", "first", "--epochs", "2"]):
        done = _echelon(folder, *command)
        assert done.code == 0 and "trust" not in done.out + done.err, done.err[-500:]
    (folder / "first").rename(folder / "moved")
    done = _echelon(folder, "evaluate", "moved")
    assert done.code == 0, done.err[-500:]
    return "train, evaluate, resume and evaluate under another name: nothing was asked"


def yaml_bombs(folder: Path) -> str:
    """Give descriptions and studies that expand, refer to themselves, name Python's objects or do not end."""
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    bombs = {
        "billion": "\n".join([*rows, "optimizer: *a11"]),
        "itself": "optimizer: &a {lr: *a}",
        "python": "model: !!python/object/apply:os.system ['touch imported']",
        "huge": "# " + "x" * 300_000_000,
        "deep": "optimizer: {lr: " + "[" * 25_000,
        "twice": "task: auto\ntask: auto",
    }
    slowest = 0.0
    idle = _echelon(folder, "train", "--config", "none.yaml", "--dry-run")
    for name, text in bombs.items():
        file = folder / f"{name}.yaml"
        file.write_text(text)
        (folder / name).mkdir()
        file.rename(folder / name / "config.yaml")
        (folder / name / "study.yaml").hardlink_to(folder / name / "config.yaml")
        for command in (
            ["train", "--config", f"{name}/config.yaml"], ["compare", f"{name}/study.yaml"], ["evaluate", name],
            ["compare", "--run", name],
        ):  # fmt: skip
            done = _echelon(folder, *command, most_bytes=MOST_BYTES)
            _assert_one_line(done, "yaml")
            slowest = max(slowest, done.seconds)
    assert not (folder / "imported").exists()
    assert slowest < idle.seconds + 1, f"{slowest:.1f} s, and {idle.seconds:.1f} s for a file that is not there"
    return (
        f"{4 * len(bombs)} commands refused in one line, the slowest {slowest:.1f} s of the processor "
        f"({idle.seconds:.1f} s for a file that is not there), with at most {MOST_BYTES / 1e6:.0f} MB of data"
    )


def link_loops(folder: Path) -> str:
    """Give a data folder with a link to itself, and one with links that lead out of it."""
    for name in ("cat", "dog"):
        (folder / "data" / name).mkdir(parents=True)
        for i in range(20):
            Image.new("RGB", (8, 8), (10 * i, 0, 0)).save(folder / "data" / name / f"{i}.png")
    loop = folder / "data" / "cat" / "again"
    loop.symlink_to("..")
    command = ["train", "data", *SMALL, "--workers", "1", "--epochs", "1", "--batch-size", "8", "--model", "mlp"]
    _assert_one_line(_echelon(folder, *command), "leads back")
    loop.unlink()
    (folder / "secret.png").write_bytes((folder / "data" / "dog" / "0.png").read_bytes())
    (folder / "data" / "cat" / "a.png").symlink_to(folder / "secret.png")
    _assert_one_line(_echelon(folder, *command), "1 link leads out of the folder", "cat/a.png", "--follow-links")
    done = _echelon(folder, *command, "--follow-links")
    assert done.code == 0 and "1 link leads out of the folder" in done.out, done.err[-500:]
    return "a loop and a link out of the folder are one line each; --follow-links follows it and says so"


def step_back(folder: Path) -> str:
    """Take the checkpoints of a run away, damage the newest, and kill one before its first."""
    options = ("digits", *TINY, "--checkpoint-every", "5", "--epochs", "2")
    with Runs(folder) as runs:
        run = runs.start("train", *options, folder="run")
        assert run.end() == 0
        (run.folder / "checkpoints").rename(folder / "away")
        refused = runs.start("resume", "run", "--epochs", "3")
        assert refused.end() == 2 and "was saved here, and there is none" in refused.errors(), refused.text()
        (folder / "away").rename(run.folder / "checkpoints")
        newest = max((run.folder / "checkpoints").glob("step-*"))
        (newest / "tree.json").write_text("{}")
        resumed = runs.start("resume", "run", "--epochs", "3")
        assert resumed.end() == 0 and f"{newest.name} is damaged and was passed over" in resumed.text(), resumed.text()
        shutil.rmtree(run.folder / "checkpoints")
        again = runs.start("resume", "run", "--from-scratch")
        assert again.end() == 0, again.text()
        early = runs.start("train", "digits", *TINY, "--epochs", "3000", "--eval-every", "0", folder="early")
        early.wait_for(lambda: early.records("start"), "the start")
        os.killpg(early.process.pid, signal.SIGKILL)
        early.end()
        assert not early.left_behind()
        last = runs.start("resume", "early", "--epochs", "1")
        assert last.end() == 0 and "no checkpoint was saved so far" in last.text(), last.text()
    return "gone: refused; damaged: said and passed over; --from-scratch: trained again; killed before any: said"


def ten_names(folder: Path) -> str:
    """Start ten runs at the same moment, none with a name."""
    began = time.monotonic()
    with Runs(folder) as runs:
        started = [runs.start("train", "digits", *TINY, "--epochs", "1") for _ in range(MANY)]
        codes = [run.end() for run in started]
        assert codes == [0] * MANY, [run.errors()[-300:] for run in started]
    names = sorted(path.name for path in (folder / "runs").iterdir())
    assert names == sorted(f"digits-mlp-{i + 1}" for i in range(MANY)), names
    return f"{MANY} runs completed in {MANY} folders, in {time.monotonic() - began:.0f} s"


SCENARIOS = [
    Scenario("foreign-code", "code that a foreign folder names is not imported without --trust", foreign_code),
    Scenario("own-code", "nobody is asked about code that they named themselves", own_code, short=False),
    Scenario("yaml-bombs", "a hostile description is refused in one line, under a second, without memory", yaml_bombs),
    Scenario("link-loops", "links in data neither loop nor leave the folder unsaid", link_loops, short=False),
    Scenario("step-back", "resume never steps back in silence", step_back, short=False),
    Scenario("ten-names", "ten runs started at the same moment all run", ten_names, short=False),
]
