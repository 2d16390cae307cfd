"""Numbers are read on every cell of a confusion matrix: their contrast, worked out from the page's own colours."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from echelon.reporting import report
from echelon.tasks.classification_report import HEAT, on_heat

CSS = (Path(report.__file__).parent / "templates" / "page.css").read_text()
THEMES = dict(zip(("light", "dark", "print"), re.findall(r":root \{(.*?)\}", CSS, re.DOTALL), strict=True))
LEAST = 4.5
"""WCAG 2.2, level AA, for text of this size."""


def channels(colours: str, token: str) -> list[float]:
    found = re.search(rf"--{token}: #([0-9a-f]{{6}});", colours)
    assert found, token
    return [int(found[1][i : i + 2], 16) for i in (0, 2, 4)]


def cell(colours: str, share: float) -> list[float]:
    for (low, before), (high, after) in pairwise(HEAT):
        if share <= high:
            t = (share - low) / (high - low)
            a, b = channels(colours, before), channels(colours, after)
            return [x + t * (y - x) for x, y in zip(a, b, strict=True)]
    raise AssertionError(share)


def luminance(rgb: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", THEMES)
def test_numbers_of_a_confusion_matrix_are_read_on_every_cell(theme: str) -> None:
    colours = THEMES[theme]
    for percent in range(101):
        share = percent / 100
        light = sorted((luminance(cell(colours, share)), luminance(channels(colours, on_heat(share)))))
        assert (light[1] + 0.05) / (light[0] + 0.05) >= LEAST, share
