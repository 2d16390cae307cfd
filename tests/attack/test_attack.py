"""The short scenarios, each as a test."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.attack.scenario import CannotRunHere, Scenario, all_scenarios

SCENARIOS = all_scenarios()


@pytest.mark.long
@pytest.mark.parametrize(
    "scenario", [s for s in SCENARIOS.values() if s.short], ids=[n for n, s in SCENARIOS.items() if s.short]
)
def test_a_promise_holds(scenario: Scenario) -> None:
    with tempfile.TemporaryDirectory(prefix="echelon-attack-") as folder:  # other users may have to reach it
        try:
            print(scenario.run(Path(folder)))
        except CannotRunHere as reason:
            pytest.skip(str(reason))
