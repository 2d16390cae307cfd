"""What a command says of a run before it begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config import RunConfig
from echelon.run.foretold import Foretold
from echelon.run.opening import Opening
from echelon.run.resolve import launch_request
from echelon.run.start import plan_of

NAMED = replace(RunConfig(), run="runs/mine")


def _opening(told: Foretold, resumes: bool = False) -> Opening:
    return Opening(NAMED, plan_of(launch_request(NAMED), Path(NAMED.run)), told, resumes)


def test_model_parameters_and_folder_are_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    with _opening(Foretold("small_cnn", 98_026)) as opening:
        opening.runs_in(Path(NAMED.run))
    said = "".join(capsys.readouterr()).splitlines()
    assert said[0].startswith("digits, model small_cnn of 98,026 parameters; ")
    assert said[1].startswith("run folder runs/mine; Ctrl-C stops it") and len(said) == 2
    with _opening(Foretold("auto")):
        pass
    assert "".join(capsys.readouterr()).startswith("digits, model auto; ")


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("resumes", [False, True])
def test_ctrl_c_before_a_new_run_begins_says_that_nothing_is_kept(
    capsys: pytest.CaptureFixture[str], begins: bool, resumes: bool
) -> None:
    with pytest.raises(KeyboardInterrupt), _opening(Foretold("mlp"), resumes) as opening:
        if begins:
            opening.runs_in(Path(NAMED.run))
        raise KeyboardInterrupt
    said = "".join(capsys.readouterr())
    assert ("echelon: stopped before it began: runs/mine is not kept\n" in said) != (begins or resumes)
