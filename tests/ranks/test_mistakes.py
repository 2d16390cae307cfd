"""Mistakes of a first day: each is one line and exit code 2, leaves no folder and no process; most need no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.machine import slowness
from tests.ranks.run_many import run_many
from tests.ranks.runs import LEAVE_S, MARK, POLL_S, marked_processes

LONGEST_S = 0.5  # of the processor's time, user and system, where no torch is needed; the least of a few
DEADLINE_S = 120.0
AT_A_TIME = 4
TRIES = 6
HEAVY = ("torch", "numpy", "timm")
FILES = {
    "mine.py": """
import torch

class Good:
    def on_step(self, step): pass

class NoHook: pass

class Opt(torch.optim.SGD): pass

def loss(outputs, targets): return outputs.sum()
""",
    "lr.yaml": "training: {lr: 0.1}\n",
    "epochs.yaml": "epochs: 3\n",
    "list.yaml": "- 1\n",
    "scalar.yaml": "training: 3\n",
    "twice.yaml": "run: a\nrun: b\n",
    "broken.yaml": "training: {epochs: [\n",
    "tag.yaml": "run: !!python/object:os.system {}\n",
    "words.yaml": "training:\n  epochs: many\n",
}
AT_ONCE = [
    (["trian"], "did you mean train?"),
    (["tain", "digits"], "did you mean train?"),
    (["train", "digits", "--epoch", "3"], "did you mean --epochs"),
    (["train", "digits", "--epochs"], "--epochs"),
    (["train", "digits", "extra"], "extra"),
    (["train", "digits", "--epochs", "0"], "at least 1"),
    (["train", "digits", "--epochs", "many"], "--epochs"),
    (["train", "digits", "--epochs", "1.5"], "--epochs"),
    (["train", "digits", "--bach-size", "3"], "--batch-size"),
    (["train", "digits", "--batch-size", "-1"], "at least 0"),
    (["train", "digits", "--batch-size", "1e3"], "--batch-size"),
    (["train", "digits", "--lr", "fast"], "--lr"),
    (["train", "digits", "--lr", "-1"], "at least 0"),
    (["train", "digits", "--lr", "nan"], "finite"),
    (["train", "digits", "--training.lr", "1"], "did you mean --lr?"),
    (["train", "digits", "--momentum", "2"], "between 0 and 1"),
    (["train", "digits", "--seed", "-1"], "at least 0"),
    (["train", "digits", "--precision", "bf61"], "did you mean bf16"),
    (["train", "digits", "--precision", "fp8", "--device", "cpu"], "--precision fp8"),
    (["train", "digits", "--device", "gpu"], "--device"),
    (["train", "digits", "--schedule", "cosin"], "did you mean cosine?"),
    (["train", "digits", "--warmup-epochs", "20"], "leaves nothing"),
    (["train", "digits", "--accumulate", "1000"], "empty micro-batches"),
    (["train", "digits", "--augment", "flip"], "--augment"),
    (["train", "digits", "--holdout", "1"], "between"),
    (["train", "digits", "--workers", "-1"], "at least 0"),
    (["train", "digits", "--workers", "4", "--batch-size", "2"], "4 workers"),
    (["train", "digits", "--parallel", "dp=3", "--workers", "2"], "3 ranks"),
    (["train", "digits", "--parallel", "ddp=2"], "did you mean dp?"),
    (["train", "digits", "--parallel", "dp=two"], "--parallel"),
    (["train", "digits", "--sync", "allreduc"], "did you mean allreduce?"),
    (["train", "digits", "--sync", "local"], "period"),
    (["train", "digits", "--sync", "local(perod=3)"], "did you mean period?"),
    (["train", "digits", "--sync", "local(8"], "cannot read spec"),
    (["train", "digits", "--sync", "ps(mod=async)"], "did you mean mode?"),
    (["train", "digits", "--compression", "tpk(0.01)"], "did you mean topk?"),
    (["train", "digits", "--compression", "topk"], "density"),
    (["train", "digits", "--compression", "int8+hufman"], "did you mean huffman?"),
    (["train", "digits", "--collective", "rng"], "did you mean ring?"),
    (["train", "digits", "--task", "regresion"], "known: auto"),
    (["train", "digitz"], "did you mean digits?"),
    (["train", "CIFAR-10"], "did you mean cifar10?"),
    (["train", "digits", "--on", "locl"], "did you mean local?"),
    (["train", "digits", "--nodes", "2"], "--rendezvous"),
    (["train", "digits", "--nodes", "3:1", "--rendezvous", "a:1"], "comes first"),
    (["train", "digits", "--nodes", "2", "--rendezvous", "a"], "a"),
    (["train", "digits", "--nodes", "2", "--rendezvous", "a:port"], "a:port"),
    (["train", "digits", "--trusted-network"], "--nodes"),
    (["train", "digits", "--timeout", "soon"], "--timeout"),
    (["train", "digits", "--checkpoint-every", "often"], "--checkpoint-every"),
    (["train", "digits", "--keep-checkpoints", "0"], "at least 1"),
    (["train", "digits", "--config", "none.yaml"], "cannot read none.yaml"),
    (["train", "--config", "lr.yaml"], "did you mean optimizer.lr?"),
    (["train", "--config", "epochs.yaml"], "did you mean training.epochs?"),
    (["train", "--config", "list.yaml"], "expected settings"),
    (["train", "--config", "scalar.yaml"], "group of settings"),
    (["train", "--config", "twice.yaml"], "stands twice"),
    (["train", "--config", "broken.yaml"], "not YAML"),
    (["train", "--config", "tag.yaml"], "not used in descriptions"),
    (["train", "--config", "words.yaml"], "training.epochs"),
    (["explain", "toppk"], "did you mean topk?"),
    (["list", "codec"], "did you mean codecs?"),
    (["completion", "tcsh"], "known: bash"),
]  # fmt: skip
WITH_IMPORTS = [
    (["train", "digits", "--link", "fast"], "--link"),
    (["train", "./nowhere"], "no such folder"),
    (["train", "digits", "--sample-weights", "inverse"], "no such file"),
    (["train", "digits", "--callbacks", "mine:Goo", "--trust"], "did you mean Good?"),
    (["train", "digits", "--callbacks", "mine:NoHook", "--trust"], "has none of on_start"),
    (["train", "digits", "--loss", "CrossEntropy"], "did you mean CrossEntropyLoss?"),
    (["train", "digits", "--loss", "mine:los", "--trust"], "did you mean loss?"),
    (["train", "digits", "--optimizer", "adamww"], "did you mean adamw"),
    (["train", "digits", "--optimizer", "mine:Op", "--trust"], "did you mean Opt?"),
    (["resume", "nowhere"], "holds no run"),
    (["resume"], "RUN"),
    (["evaluate", "nowhere"], "holds no run"),
    (["report", "nowhere"], "holds no run"),
    (["export", "nowhere", "x.txt"], ".safetensors"),
    (["export", "nowhere", "x.safetensors"], "holds no run"),
    (["watch", "nowhere", "--once"], "does not exist"),
    (["compare"], "nothing to compare"),
]
LIGHT = [arguments for arguments, _ in AT_ONCE]


@dataclass(frozen=True)
class Refusal:
    """What a command did that is refused: its exit code and lines on stderr, and what it left behind.

    Attributes:
        cpu_s: of the processor's time, user and system.
    """

    code: int
    lines: list[str]
    files: set[str]
    processes: list[int]
    cpu_s: float


def _with_files(folder: Path) -> None:
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)


def _command(folder: Path, arguments: list[str]) -> Refusal:
    """Give a command in a new folder, where torch and its like cannot be imported."""
    _with_files(folder)
    mark = f"{os.getpid()}-{folder}"
    environment = {**os.environ, MARK: mark, "XDG_STATE_HOME": str(folder.parent / "state")}
    environment["PYTHONPATH"] = str(folder.parent / "absent")
    with (folder.parent / f"{folder.name}.err").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "echelon", *arguments], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
        deadline = threading.Timer(DEADLINE_S, process.kill)
        deadline.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
        finally:
            deadline.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        lines = errors.read().splitlines()
    files, ends_s = {path.name for path in folder.iterdir()}, time.monotonic() + LEAVE_S
    while (left := marked_processes(mark)) and time.monotonic() < ends_s:  # the kernel ends them with their parent
        time.sleep(POLL_S)
    return Refusal(process.returncode, lines, files, left, used.ru_utime + used.ru_stime)


def _in_one_process(folder: Path, commands: list[list[str]]) -> list[Refusal]:
    """Give commands in a new folder one after the other, so that torch is imported once; they have its files in common.

    `run_many` fails where a process is left.
    """
    _with_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # beside mine.py
        results = run_many(folder, commands) if commands else []
    own = ("command", "results", "state")  # of `run_many`
    files = {path.name for path in folder.iterdir() if not path.name.startswith(own)}
    return [Refusal(result.code, result.err.splitlines(), files, [], 0.0) for result in results]


@pytest.fixture(scope="module")
def refusals(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refusal]:
    """Give the commands of all tests that are to run here; returns what each did, by its words.

    Those that need no torch are processes of their own, several at a time.
    """
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    chosen = [item.callspec.params["arguments"] for item in items]
    light = [arguments for arguments in chosen if arguments in LIGHT]
    folder = tmp_path_factory.mktemp("mistakes")
    for name in HEAVY:
        (folder / "absent" / name).mkdir(parents=True)
        (folder / "absent" / name / "__init__.py").write_text(f"raise ImportError('{name} takes long to import')")

    def give(number: int, attempt: int = 0) -> Refusal:
        return _command(folder / f"{number}-{attempt}", light[number])

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        made = list(pool.map(give, range(len(light))))
    for number in range(len(light)):  # alone, where it had to share the cores before
        for attempt in range(1, TRIES):
            if made[number].cpu_s < LONGEST_S * slowness():
                break
            made[number] = give(number, attempt)
    heavy = [arguments for arguments in chosen if arguments not in LIGHT]
    refused = [*zip(light, made, strict=True), *zip(heavy, _in_one_process(folder / "heavy", heavy), strict=True)]
    return {" ".join(arguments): refusal for arguments, refusal in refused}


def _check(refusal: Refusal, words: str) -> None:
    assert refusal.code == 2 and len(refusal.lines) == 1, (refusal.code, refusal.lines)
    assert refusal.lines[0].startswith("echelon: ") and words in refusal.lines[0]
    assert refusal.files == set(FILES) and not refusal.processes


@pytest.mark.long
@pytest.mark.parametrize(("arguments", "words"), AT_ONCE, ids=[" ".join(a) for a, _ in AT_ONCE])
def test_a_mistake_in_words_is_refused_at_once(arguments: list[str], words: str, refusals: dict[str, Refusal]) -> None:
    refusal = refusals[" ".join(arguments)]
    _check(refusal, words)
    assert refusal.cpu_s < LONGEST_S * slowness()


@pytest.mark.long
@pytest.mark.parametrize(("arguments", "words"), WITH_IMPORTS, ids=[" ".join(a) for a, _ in WITH_IMPORTS])
def test_a_mistake_about_files_is_one_line(arguments: list[str], words: str, refusals: dict[str, Refusal]) -> None:
    _check(refusals[" ".join(arguments)], words)
