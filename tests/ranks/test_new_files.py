"""Each seam is one file: a copy of the package with one more file in the folder of each uses them all in one run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import echelon
from tests.laws.test_places import SHELL
from tests.ranks import toy_task
from tests.ranks.runs import SMALL, Runs
from tests.unit.collectives.test_new_path import STAR

STRATEGY = '''"""now_and_then: replicas average every few steps."""

from dataclasses import dataclass
from typing import ClassVar

from echelon.sync.averaging.engine import Averaging
from echelon.sync.averaging.plan import AveragingPlan, MeanRule, check_deltas
from echelon.sync.settings import SyncSettings
from echelon.sync.state_bytes import by_averaging


@dataclass(frozen=True)
class NowAndThen(SyncSettings):
    """When replicas average.

    Attributes:
        every: steps between averages.
    """

    name: ClassVar[str] = "now_and_then"
    encodes_gradients: ClassVar[bool] = False
    every: int

    def check(self, compression):
        check_deltas(compression)

    def state_bytes(self, compression, piece):
        return by_averaging(AveragingPlan(self.every), compression, piece)

    def build(self, context):
        return Averaging(context, AveragingPlan(self.every), lambda replicas: MeanRule())


STRATEGY = NowAndThen
'''
CODEC = '''"""halves: every element in 16 bits; the sum of two such is one too, so that any path takes it."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from echelon.compression.base import Codec, Meta


@dataclass(frozen=True)
class Halves(Codec):
    """Every element in 16 bits."""

    name: ClassVar[str] = "halves"
    linear: ClassVar[bool] = True

    def layout(self, numel):
        return ((torch.float16, numel),)

    def compress(self, tensor, state):
        state.numbers["step"] += 1
        return self.payload((tensor.detach().reshape(-1).to(torch.float16, copy=True),), Meta.of(tensor))

    def extract(self, payload, out=None):
        values = payload.tensors[0].to(payload.meta.dtype)
        return values.view(payload.meta.shape) if out is None else out.copy_(values.view(out.shape))

    def reduce_rounds(self, tensor, state):
        state.numbers["step"] += 1
        mean = yield tensor.detach().reshape(-1).to(torch.float16)
        return mean.to(tensor.dtype).view(tensor.shape)


CODEC = Halves
'''
SOURCE = '''"""Pairs of numbers."""

from typing import ClassVar

from echelon.data import from_datasets
from echelon.data.sources.base import SourceKind
from echelon.tasks.toy_regression import load


class PairsOfNumbers(SourceKind):
    """`pairs`: pairs of vectors, and a number of each."""

    names: ClassVar[tuple[str, ...]] = ("pairs",)

    def open(self, request):
        return from_datasets(*load())


SOURCE = PairsOfNumbers
'''
TUNING = '''"""weights: all but biases."""

from dataclasses import dataclass

from echelon.models.tuning.base import TuningKind


@dataclass(frozen=True)
class Weights(TuningKind):
    """Settings of `weights`."""

    def trained(self, model):
        return {n for n, _ in model.named_parameters() if n.endswith("weight")}


TUNING = Weights
'''
MODEL = '''"""Two inputs that are mixed."""

from echelon.tasks.toy_regression import TwoInputs


def build(data):
    return TwoInputs()
'''


def _with_new_files(folder: Path) -> Path:
    """Copy the package below a folder, with one more file in the folder of each seam."""
    package = folder / "echelon"
    shutil.copytree(Path(str(echelon.__file__)).parent, package)
    shell = SHELL.replace(
        "env -i ", f"env -i PYTHONPATH={folder} "
    )  # its processes take the copy, not what is installed
    task = Path(toy_task.__file__).read_text().replace('"""Regression', '"""toy_regression: regression', 1)
    for file, text in {
        "sync/now_and_then.py": STRATEGY,
        "compression/codecs/halves.py": CODEC,
        "collectives/paths/star.py": STAR,
        "data/sources/pairs.py": SOURCE,
        "models/tuning/weights.py": TUNING,
        "models/builtin/mixed.py": MODEL,
        "launch/places/shell.py": f'"""shell: each process in a shell of its own."""\n{shell}\n\nPLACE = Shell\n',
        "tasks/toy_regression.py": f"{task}\n\nTASK = Regression\n",
    }.items():
        assert not (package / file).exists()
        (package / file).write_text(text)
    return package


@pytest.mark.long
def test_one_more_file_in_each_folder_is_all_that_it_takes(tmp_path: Path) -> None:
    _with_new_files(tmp_path)
    settings = ("--task", "toy-regression", "--model", "mixed", "--sync", "now_and_then(every=3)", "--compression",
                "halves", "--collective", "star(centre=1)", "--tune", "weights", "--on", "shell", "--workers", "2",
                "--epochs", "2", "--batch-size", "32", "--lr", "0.02", "--loaders", "0")  # fmt: skip
    with Runs(tmp_path) as runs:
        environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
        run = runs.start("train", "pairs", *SMALL, *settings, "--max-steps", "9", folder="run", environment=environment)
        listed = runs.start("list", environment=environment)
        assert run.end() == 0, run.text()
        again = runs.start("resume", str(run.folder), "--max-steps", "0", environment=environment)
        assert again.end() == 0, again.text()
        evaluated = runs.start("evaluate", str(run.folder), environment=environment)
        assert evaluated.end() == 0 and "RMSE" in evaluated.text(), evaluated.text()
        assert listed.end() == 0
        for name in ("now_and_then", "halves", "star", "toy-regression", "shell", "mixed", "weights", "pairs"):
            assert name in listed.text(), f"{name} is not listed:\n{listed.text()}"
    assert len(run.records("start")) == 2 and "now_and_then(every=3)" in (run.folder / "config.yaml").read_text()
    assert run.summary()["metrics"]["rmse"] < 1.5 and run.summary()["status"] == "completed"
    page = (run.folder / "report.html").read_text()
    assert "Errors of the toy" in page and "now_and_then" in page and "halves" in page
