"""The short scenarios, each as a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attack.scenario import CannotRunHere, Scenario, all_scenarios

SCENARIOS = all_scenarios()


@pytest.mark.long
@pytest.mark.parametrize(
    "scenario", [s for s in SCENARIOS.values() if s.short], ids=[n for n, s in SCENARIOS.items() if s.short]
)
def test_a_promise_holds(scenario: Scenario, tmp_path: Path) -> None:
    try:
        print(scenario.run(tmp_path))
    except CannotRunHere as reason:
        pytest.skip(str(reason))
