"""What a scenario is, and where they are found."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.attack import scenarios


class CannotRunHere(Exception):
    """This machine lacks what a scenario needs; the message says what."""


@dataclass(frozen=True)
class Scenario:
    """A promise, and what tries to break it.

    Attributes:
        name: of one word or a few joined by hyphens; unique in its file.
        promise: one sentence, as a user would read it.
        run: tries to break the promise in an empty folder; returns the outcome in words, with its figures. It raises
            AssertionError where the promise is broken, and CannotRunHere where it cannot be tried.
        short: under about half a minute, and no other short one or test shows as much; continuous integration runs it.
    """

    name: str
    promise: str
    run: Callable[[Path], str]
    short: bool = True


def all_scenarios() -> dict[str, Scenario]:
    """Return the scenarios of all files, by `file/name`."""
    found: dict[str, Scenario] = {}
    for module in sorted(pkgutil.iter_modules(scenarios.__path__), key=lambda m: m.name):
        for scenario in importlib.import_module(f"{scenarios.__name__}.{module.name}").SCENARIOS:
            found[f"{module.name}/{scenario.name}"] = scenario
    return found
