"""What a checkpoint must be of, to continue a run."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from echelon.config import build
from echelon.core.errors import UserError
from echelon.data.base import DataInfo
from echelon.run.resolve import resolve
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.state import Fingerprint, OwnMarks

BEGUN = Fingerprint(data="Dots", train_size=6, samples="1", evaluation_samples="2", loss="error (3)")


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (replace(BEGUN, samples="9"), "the samples of Dots are not those that the run began with"),
        (replace(BEGUN, evaluation_samples="9"), "the evaluation samples of Dots are not those that the run began"),
        (replace(BEGUN, loss="<lambda> (9)"), r"the loss is not .*: <lambda> \(9\) in place of error \(3\)"),
    ],
)
def test_other_objects_of_the_caller_are_refused(now: Fingerprint, words: str) -> None:
    BEGUN.check(asdict(BEGUN))
    with pytest.raises(UserError, match=words):
        now.check(asdict(BEGUN))


def test_a_single_worker_and_several_continue_each_others_run() -> None:
    begun = {"strategy.compression": "topk(0.1)", "optimizer.name": "nesterov"}
    several = resolve(build(None, begun).config)
    several_print, alone = _fingerprint(several), _fingerprint(several.for_single_worker())
    alone.check(asdict(several_print))
    several_print.check(asdict(alone))
    for fingerprint in (several_print, alone):
        fingerprint.check({**asdict(alone), "optimizer": "sgd"})  # as earlier versions called it there
        with pytest.raises(UserError, match="its optimizer is 'adam'"):
            fingerprint.check({**asdict(alone), "optimizer": "adam"})


def _fingerprint(run: ResolvedRun) -> Fingerprint:
    info = DataInfo("Dots", ("a", "b"), 1, 8, 6, 2, (3, 3))
    return Fingerprint.of(run, info, run.task.fitted(info), "", OwnMarks())


def test_what_an_earlier_version_did_not_save_is_not_looked_at() -> None:
    known = {name: value for name, value in asdict(BEGUN).items() if name not in ("evaluation_samples", "loss")}
    BEGUN.check(known)
