"""Which number, colour, dash and symbol stands for which candidate: the same in every chart of the page."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.study.base import Study

COLOURS = 12
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_STROKES = {"solid": "", "dash": "9 5", "dot": "2 4", "dashdot": "9 4 2 4", "longdash": "14 6"}


@dataclass(frozen=True)
class Key:
    """One candidate's looks; `token` names a colour of the page, the baseline's is the text's own."""

    number: int
    label: str
    token: str
    dash: str

    @property
    def stroke(self) -> str:
        """The dash as SVG writes it."""
        return _STROKES[self.dash]

    @property
    def width(self) -> float:
        """The width of its lines in pixels."""
        return 3.0 if self.token == "ink" else 2.0


def keys_of(study: Study) -> dict[str, Key]:
    """Give each candidate its looks. Neighbours differ in dash too, so that colour is not all that tells them apart."""
    keys = {}
    for i, candidate in enumerate(study.candidates):
        token = "ink" if i == 0 else f"c{(i - 1) % COLOURS + 1}"
        dash = _DASHES[(i + i // COLOURS) % len(_DASHES)] if i else "solid"
        keys[candidate.label] = Key(i + 1, candidate.label, token, dash)
    return keys
