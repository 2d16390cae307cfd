"""The public functions stay what they are, whatever was imported before."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import echelon
from echelon.core.errors import UserError


def test_train_is_the_function_also_after_its_package_was_imported() -> None:
    importlib.import_module("echelon.trainer.folder")  # sets the package as an attribute of `echelon`
    with pytest.raises(UserError, match="sync"):
        echelon.train(data="digits", sync="nonsense")


@pytest.mark.parametrize("slow", ["torch", "numpy"])
def test_what_a_command_imports_before_its_first_line_is_without(slow: str) -> None:
    code = f"import sys, echelon.api, echelon.cli.app, echelon.run.start; sys.exit('{slow}' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_dir_lists_the_public_names_alone() -> None:
    code = "import echelon.trainer.folder; print(dir(echelon) == sorted(echelon.__all__))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).stdout == b"True\n"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"tries": "compression=int8"}, "tries is a list of candidates"),
        ({"tries": ["compression=int8"], "seed": 3}, "write seeds=3"),
        ({}, "nothing to compare|no candidate"),
        ({"tries": ["compresion=int8"]}, "unknown setting"),
        (
            {"data": "study.yaml", "model": "resnet20"},
            "describes the whole study: write there what model.name should be",
        ),
        (
            {"tries": ["lr=1"], "model": len},
            "model: each run of a study is a command: name code of yours as 'module:name'",
        ),
        ({"tries": ["lr=1"], "data": ([0], [1])}, "data: each run of a study is a command"),
        ({"run": "study", "model": "resnet20"}, "no candidate to compare"),
    ],
)
def test_a_study_that_cannot_be_is_refused_in_one_line(call: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        echelon.compare(**call)
    assert "\n" not in str(refusal.value)


def test_the_api_is_what_is_promised() -> None:
    promised = "train finetune resume evaluate predict report export compare flow plan ddp_hook wrap"
    assert sorted([*promised.split(), "Outcome", "RunFailed", "UserError"]) == dir(echelon)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["F1Scor"], "unknown --metrics 'F1Scor': did you mean F1Score"),
        (["F1Score", 3], "metrics: 'F1Score' is a name among objects: give names alone"),
        (3, "metric int is a int: give metrics of torchmetrics"),
    ],
)
def test_metrics_are_names_or_objects(metrics: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        echelon.train("mlp", "digits", tmp_path / "run", metrics=metrics, loss=None, callbacks=None, workers=1)  # type: ignore[arg-type]


def test_from_python_a_setting_is_called_by_its_keyword() -> None:
    with pytest.raises(echelon.UserError, match=r"^epochs \(training.epochs\) is 0"):
        echelon.train("mlp", "digits", epochs=0)
    with pytest.raises(echelon.UserError, match=r"^batch_size \(data.batch_size\) is 'many': it must be"):
        echelon.train("mlp", "digits", batch_size="many")
