"""Runs with an optimizer of a user's own go on as they were, on replicas and on servers, by name and from Python."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from tests.ranks.run_many import run_many
from tests.ranks.runs import SMALL, Runs, losses_of
from tests.unit.optim import own_optimizers

pytestmark = pytest.mark.timeout(400)

NAME = "mine:Plain(beta=0.8)"
TRAIN = ("train", "digits", "--model", "mlp", "--batch-size", "250", "--schedule", "constant", "--workers", "2")
TRAIN = (*TRAIN, "--lr", "0.05", "--optimizer", NAME, *SMALL)
SCRIPT = """
import functools
import echelon
from echelon.core.errors import UserError
{classes}
mine = functools.partial(Plain, beta=0.8)
settings = dict(batch_size=250, schedule="constant", workers=2, lr=0.05, threads=1, device="cpu", sync="{sync}")
first = echelon.train("mlp", "digits", run="run", epochs=1, optimizer=mine, **settings)
again = echelon.resume("run", epochs=3, optimizer=mine)
print("ended", again.status, again.metrics["top1"] > 0.6)
try:
    echelon.resume("run", epochs=4, optimizer=Normed)
except UserError as refusal:
    print(refusal)
"""


@pytest.mark.long
def test_replicas_go_on_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(inspect.getsource(own_optimizers))
    commands = [
        [*TRAIN, "--epochs", "2", "--run", "whole"],
        [*TRAIN, "--epochs", "1", "--run", "parts"],
        ["resume", "parts", "--epochs", "2"],
    ]
    results = run_many(tmp_path, commands)
    assert [result.code for result in results] == [0, 0, 0], results
    losses = losses_of(tmp_path / "whole")
    assert losses_of(tmp_path / "parts") == losses and losses[max(losses)] < losses[1]
    assert f"name: {NAME}" in (tmp_path / "whole" / "config.yaml").read_text()


@pytest.mark.parametrize(
    "sync", [pytest.param("local(8)", marks=pytest.mark.slow), pytest.param("ps(mode=async)", marks=pytest.mark.long)]
)
def test_a_class_of_a_script_goes_to_replicas_and_servers(tmp_path: Path, sync: str) -> None:
    classes = inspect.getsource(own_optimizers).replace("from __future__ import annotations\n", "")
    (tmp_path / "script.py").write_text(SCRIPT.format(classes=classes, sync=sync))
    with Runs(tmp_path) as runs:
        run = runs.start(program=[sys.executable, "script.py"])
        assert run.end() == 0, run.text()
    assert "ended completed True" in run.text(), run.text()
    assert (
        "the run's optimizer is 'object:Plain(beta=0.8)', and the one given from Python is 'object:Normed'"
        in run.text()
    )
