"""Samples that candidates took to a study's target, as plans take them, from planted truths."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from echelon.config import RunConfig, build
from echelon.core.errors import UserError
from echelon.study.base import Study
from echelon.study.file import from_tries
from echelon.study.samples import samples_for, samples_to_target
from tests.unit.study.fixtures import BATCH, EPOCHS, Planted, make_study

TRIES = ("sync=allreduce", "compression=sign", "sync=local(8)", "optimizer=adamw", "compression=int8")
TRUTHS = {
    "sync=allreduce": Planted(rate=4.0),
    "compression=sign": Planted(rate=3.0, final=1.0),  # slower, towards a value that is higher
    "sync=local(8)": Planted(final=0.5),
    "optimizer=adamw": Planted(),
}


def config(**settings: object) -> RunConfig:
    return build(
        None, {"data.source": "digits", "data.batch_size": BATCH, "training.epochs": EPOCHS, **settings}
    ).config


def study(seeds: str = "3") -> Study:
    described = from_tries({"data.source": "digits"}, TRIES, seeds, "0.5")
    labels = {candidate.label for candidate in described.candidates}
    assert set(TRUTHS) <= labels, labels
    return described


def made(folder: Path, **truths: Planted) -> Path:
    return make_study(folder, study(), {**TRUTHS, **truths})


def test_samples_are_counted_in_those_of_the_first_with_an_interval(tmp_path: Path) -> None:
    found = samples_to_target(made(tmp_path / "study"), config())
    assert (found.study, found.first, found.batch, found.workers) == ("study", "sync=allreduce", BATCH, 2)
    assert 0 < found.epochs <= EPOCHS and found.low is not None and found.high is not None
    assert found.low <= found.epochs <= found.high
    base = found.of({"strategy.parallel": "fsdp=8"})
    assert base is not None and base.ratio == 1.0, "a layout of parts trains like one process"
    sign = found.of({"strategy.compression": "sign"})
    assert sign is not None and sign.low is not None and sign.high is not None
    assert sign.low <= sign.ratio <= sign.high and sign.reached == sign.seeds == 3


def test_what_never_reaches_the_target_takes_for_ever_and_others_are_not_in_the_study(tmp_path: Path) -> None:
    found = samples_to_target(made(tmp_path / "study"), config())
    local = found.of({"strategy.sync": "local(period=8)"})
    assert local is not None and math.isinf(local.ratio) and (local.reached, local.seeds) == (0, 3)
    assert found.of({"strategy.compression": "topk(0.01)"}) is None
    assert found.of({"strategy.compression": "int8"}) is None, "it was never run"
    assert "Left out of the study, for they change more than the way: optimizer=adamw." in found.notes


def test_other_settings_are_noted_and_another_model_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "study")
    (told,) = [note for note in samples_to_target(folder, config(**{"training.epochs": 90})).notes if "differ" in note]
    assert "epochs 6 there, 90 here" in told or "epochs" in told
    with pytest.raises(UserError, match=r"a study of something else: its model.name is auto, not mlp"):
        samples_to_target(folder, config(**{"model.name": "mlp"}))
    with pytest.raises(UserError, match="holds no study"):
        samples_to_target(tmp_path, config())


def test_a_study_is_found_beside_the_run_and_by_that_it_is_in(tmp_path: Path) -> None:
    folder = made(tmp_path / "study")
    of_study = next((folder / "runs").iterdir())
    beside = tmp_path / "run"
    beside.mkdir()
    (beside / "config.yaml").write_text("data: {source: digits}\n")
    for run in (of_study, beside):
        found = samples_for("", str(run), config())
        assert found is not None and found.study == "study"
    assert samples_for("", str(beside), config(**{"data.source": "cifar10"})) is None


def test_two_seeds_give_no_interval(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", study("2"), TRUTHS)
    found = samples_to_target(folder, config())
    assert (found.low, found.high) == (None, None)
    assert any("too few seeds" in note for note in found.notes)
