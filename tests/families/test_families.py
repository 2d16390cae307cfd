"""The matrix of families: each drawn one trains as one process in every layout, or is refused before the start."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.families import page, trial, zoo
from tests.families.__main__ import COUNT, SEED

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: it is an extra"
)
PAGE = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_all_that_is_drawn_is_on_the_page() -> None:
    drawn = zoo.draw(SEED, COUNT).names
    assert len(set(drawn)) == COUNT
    assert set(drawn) == page.names_on(PAGE.read_text())


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_families_train_as_one_process_or_are_refused() -> None:
    failures = []
    for name in zoo.draw(SEED, COUNT).names:
        expected = trial.reference(name)
        verdicts = {layout: trial.compare(name, layout, expected) for layout in trial.LAYOUTS}
        failures += [f"{name} {layout}: {v.words}" for layout, v in verdicts.items() if v.outcome == "failed"]
    assert not failures, "\n".join(failures)
