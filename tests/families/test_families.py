"""The matrix of families: each drawn one trains as one process in every layout, or is refused before the start."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.families import trial, zoo
from tests.families.__main__ import COUNT, SEED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed: it is an extra"),
]


@pytest.mark.timeout(7200)
def test_families_train_as_one_process_or_are_refused() -> None:
    failures = []
    for name in zoo.draw(SEED, COUNT):
        expected = trial.reference(name)
        verdicts = {layout: trial.compare(name, layout, expected) for layout in trial.LAYOUTS}
        failures += [f"{name} {layout}: {v.words}" for layout, v in verdicts.items() if v.outcome == "failed"]
    assert not failures, "\n".join(failures)
