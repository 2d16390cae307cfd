"""What a checkpoint must be of, to continue a run."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from echelon.core.errors import UserError
from echelon.trainer.state import Fingerprint

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


def test_what_an_earlier_version_did_not_save_is_not_looked_at() -> None:
    known = {name: value for name, value in asdict(BEGUN).items() if name not in ("evaluation_samples", "loss")}
    BEGUN.check(known)
