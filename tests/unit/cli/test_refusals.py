"""A misspelt choice is refused at once: no torch is imported, and nothing is left behind."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from echelon.cli import _run as _run_command
from tests.machine import slowness
from tests.unit.cli.conftest import Here

LONGEST_S = 0.5  # of the processor's time, for the same reason on a busy machine
REFUSED = [
    ("--sync", "allreduc", "did you mean allreduce?"),
    ("--sync", "local(8, ovrlap=2)", "did you mean overlap?"),
    ("--sync", "ps(mod=async)", "did you mean mode?"),
    ("--compression", "topk(densty=0.1)", "did you mean density?"),
    ("--compression", "int8+hufman", "did you mean huffman?"),
    ("--collective", "hierarchical(grup=2)", "did you mean group?"),
    ("--sync", "local(0)", "period must be at least 1"),
    ("--sync", "ps(mode=asyn)", "did you mean async?"),
    ("--compression", "topk(2)", "density must be above 0 and at most 1, the nearest is 1"),
    ("--tune", "lora(r=0)", "r must be at least 1"),
    ("--parallel", "dp=2,tpp=2", "did you mean tp?"),
    ("--task", "image-clasification", "did you mean image-classification?"),
    ("--task", "regresion", "known: auto"),
    ("--model", "smal_cnn", "did you mean small_cnn?"),
    ("--model", "vit", "did you mean small_vit, timm/vit_"),
    ("--model", "resnet18", "did you mean timm/resnet18 or torchvision/resnet18?"),
    ("--model", "timm/resnet5O", "did you mean resnet50? timm has "),
    ("--on", "locl", "did you mean local?"),
    ("--on", "slrm", "did you mean slurm?"),
]


STUDIES = [
    (["digits", "--try", "sync=local(8)", "--try", "sync=allreduc"], "sync=allreduc: --sync: ", "mean allreduce?"),
    (["digits", "--try", "compression=topkk(0.1)"], "--compression: ", "did you mean topk?"),
    (["digits", "--optimizer", "sgdd", "--try", "sync=allreduce"], "--optimizer ", "did you mean sgd?"),
    (["digits", "--try", "model=smal_cnn"], "unknown model 'smal_cnn'", "did you mean small_cnn?"),
    (["digitss", "--try", "sync=allreduce"], "unknown data 'digitss'", "did you mean digits?"),
]


def _run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run `echelon ...`; returns how it went, with its imports, and the seconds that it computed."""
    command = [sys.executable, "-X", "importtime", "-m", "echelon", *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_host_that_nobody_knows_is_refused_without_torch(tmp_path: Path) -> None:
    there = "no-such-host.invalid:29500"
    done, _ = _run(tmp_path, "train", "digits", "--nodes", "2", "--rendezvous", there)
    (said,) = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2 and there in said and "cannot be reached" in said
    assert " torch\n" not in done.stderr and not list(tmp_path.iterdir())


GIVE_ALL = """
import contextlib, io, json, os, sys
from echelon.cli import _run

for arguments in json.load(sys.stdin):
    sys.argv, said = ["echelon", *arguments], io.StringIO()
    with contextlib.redirect_stderr(said):
        code = _run()
    imported = [name for name in ("torch", "timm", "numpy", "yaml", "http.client") if name in sys.modules]
    print(json.dumps([code, said.getvalue().splitlines(), imported, os.listdir()]))
"""


@dataclass(frozen=True)
class Refusal:
    """The exit code of a command, its lines on stderr, which packages it needed not import, and files it left."""

    code: int
    lines: list[str]
    imported: list[str]
    files: list[str]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refusal]:
    """Give all misspelt choices to one process, one after the other; returns what became of each, by its words."""
    commands = [["train", "digits", flag, spec] for flag, spec, _ in REFUSED]
    commands += [["compare", *arguments] for arguments, *_ in STUDIES]  # last: these may import numpy
    done = subprocess.run(
        [sys.executable, "-c", GIVE_ALL],
        cwd=tmp_path_factory.mktemp("refusals"), input=json.dumps(commands), capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    found = [Refusal(*json.loads(line)) for line in done.stdout.splitlines()]
    return {" ".join(command): each for command, each in zip(commands, found, strict=True)}


@pytest.mark.parametrize(("flag", "spec", "words"), REFUSED)
def test_a_misspelt_choice_is_refused_without_torch(
    flag: str, spec: str, words: str, refusals: dict[str, Refusal]
) -> None:
    refusal = refusals[f"train digits {flag} {spec}"]
    _is_refused(refusal, "unknown model" if flag == "--model" else flag, words)
    assert not refusal.imported


@pytest.mark.parametrize("arguments", [["train", "digits", "--run", "a" * 256], ["report", "a/" * 2100]])
def test_a_name_that_no_disk_takes_is_refused_in_one_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["echelon", *arguments])
    assert _run_command() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(": a name in a path may have 255 bytes, a path 4095")


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("p.txt", "predictions are written as .jsonl"),
        ("none/p.csv", "there is no folder none"),
        ("folder.csv", "it is a folder: name a file"),
        ("/sys/p.csv", "cannot be written ("),  # where not even root makes a file
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_predicted(
    here: Here, tmp_path: Path, out: str, words: str
) -> None:
    (tmp_path / "folder.csv").mkdir()
    done = here("predict", "no-run", "rows.csv", "--out", out)
    assert done.returncode == 2 and f"--out {out}: {words}" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["folder.csv"]


@pytest.mark.parametrize(("arguments", "named", "words"), STUDIES)
def test_a_study_of_misspelt_candidates_is_refused_without_torch(
    arguments: list[str], named: str, words: str, refusals: dict[str, Refusal]
) -> None:
    refusal = refusals[" ".join(["compare", *arguments])]
    _is_refused(refusal, named, words)
    assert not {"torch", "timm"} & set(refusal.imported)


def _is_refused(refusal: Refusal, *words: str) -> None:
    assert refusal.code == 2 and len(refusal.lines) == 1, refusal
    assert all(each in refusal.lines[0] for each in words), refusal
    assert not refusal.files


def test_a_misspelt_choice_is_refused_in_half_a_second(tmp_path: Path) -> None:
    """The least of a few: what else the machine does makes the same work take longer."""
    assert min(_run(tmp_path, "train", "digits", "--sync", "allreduc")[1] for _ in range(5)) < LONGEST_S * slowness()
