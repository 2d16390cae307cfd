"""The commands and the programs of README and the pages, run as they stand there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.docs.pages import Block, blocks, commands

DEADLINE_S = 280.0
SMALL = ["--threads", "1", "--device", "cpu"]
NAMES = {
    "DATA": "digits",
    "PATH/cifar10": "digits",
    "PATH/imagenet": "digits",
    "timm/vit_base_patch16_224": "small_vit",
}
"""What stands for data of the reader's, and for a model that takes larger images."""
DRY = [c for c in commands() if c[:1] == ["train"] and not {"--dry-run", "--config", "--weights"} & set(c)]
PROGRAMS = [block for block in blocks("python") if '__name__ == "__main__"' in block.text]
MINE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data_sets():
    data = TensorDataset(torch.rand(64, 1, 8, 8), torch.arange(64) % 10)
    return data, data, tuple("0123456789")

"""


def dry(command: list[str]) -> list[str]:
    """Return a command's arguments for a dry run on digits, without `--link`, which needs root and its modules."""
    words = [NAMES.get(word, word) for word in command]
    if "--link" in words:
        del words[words.index("--link") : words.index("--link") + 2]
    return [*words, "--dry-run"]


def run(arguments: list[str], folder: Path, deadline_s: float = DEADLINE_S) -> str:
    """Run Python with arguments, to its end; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}"
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the module `mine` that the pages show."""
    shown = next(block.text for block in blocks("python") if block.text.startswith("# mine.py"))
    (tmp_path / "mine.py").write_text(MINE + shown)
    return tmp_path


def run_commands(listed: list[list[str]], folder: Path) -> str:
    """Run commands one after the other in one process; returns a line for each that was refused or failed."""
    program = (
        "import sys, json, contextlib, io\n"
        "from echelon.cli.app import app\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        with contextlib.redirect_stdout(io.StringIO()):\n"
        "            code = app(standalone_mode=False, args=arguments)\n"
        "    except BaseException as error:\n"
        "        code = error\n"
        "    if code not in (None, 0):\n"
        "        print('REFUSED', ' '.join(arguments), '|', code)\n"
    )
    printed = run(["-c", program, json.dumps(listed)], folder)
    return "\n".join(line for line in printed.splitlines() if line.startswith("REFUSED"))


@pytest.mark.long
def test_what_the_pages_train_could_start(folder: Path) -> None:
    """Each dry run plans its run to the end, and refuses what could not start."""
    assert len(DRY) > 20
    assert run_commands([dry(command) for command in DRY], folder) == ""


@pytest.mark.long
@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.name)
def test_a_program_of_the_pages_runs(block: Block, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(block.text)
    printed = run(["program.py"], tmp_path)
    assert float(printed.split()[-2 if printed.rstrip().endswith(".html") else -1]) > 0.3, printed


@pytest.mark.long
def test_the_first_commands_of_the_pages_run(folder: Path) -> None:
    run(["-m", "echelon", "train", "digits", *SMALL, "--epochs", "1", "--workers", "2", "--run", "runs/NAME"], folder)
    after = [c for c in commands() if c[0] in ("evaluate", "report", "export") and "runs/NAME" in c]
    weights = ["train", "digits", "--dry-run", "--weights", "weights.safetensors"]
    assert len(after) >= 3
    assert run_commands([*after, ["watch", "runs/NAME", "--once"], weights], folder) == ""
    assert (folder / "weights.safetensors").exists()
