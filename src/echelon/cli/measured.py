"""What the project's own benchmarks measured of a choice, in sentences: rows of tables of `benchmarks/RESULTS.md`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_RESULTS = (_PACKAGE / "cli" / "RESULTS.md", _PACKAGE.parents[1] / "benchmarks" / "RESULTS.md")  # of a wheel, a clone
_MOST_MEASURED = 3
_MEASURED_ON = "measured on"  # a column of tables
_LINK = re.compile(r"Slow link (\d+)([kmg])bit")
_SAYS = {
    "Codecs": (
        "encodes {encode GB/s} GB/s and decodes {decode GB/s} GB/s of float32, both together in "
        "{encode + decode, times memcpy} times the time of a copy; a message has {bits} bits "
        "an element, and its error is {error} of what was encoded"
    ),
    "Slow link": (
        "{samples/s} samples/s, {x plain DDP} times plain DDP's and {x itself on loopback} times its own without the "
        "link; a rank sends {MB/step a rank sends (kernel)} MB a step"
    ),
    "A straggler": "{samples/s} samples/s, {of the workers alone} of what the workers reach alone",
    "Layouts": (
        "{Echelon} samples/s, {Echelon / hand-written} of a loop written by hand and {Echelon / one process} times one "
        "process"
    ),
    "Memory": "{outcome} where each process may take {limit MB} MB; the most that one took was {most MB} MB",
}
"""What a row of a table says, by how the table's heading begins; a row of another lists its columns."""
_TELLING = ("Codecs", "Layouts", "Memory")


def measured(name: str) -> Iterator[str]:
    """Yield what was measured of a choice: a sentence on a row of each of a few tables."""
    file = next((file for file in _RESULTS if file.exists()), None)
    lines = file.read_text(encoding="utf-8").splitlines() if file else []
    heading, machine, header, told = "", "", [""], set[str]()
    for line, following in itertools.pairwise(lines):
        if line.startswith("## "):
            heading = line.removeprefix("## ").removesuffix(": samples/s")
        elif re.match(r"20\d\d-\d\d-\d\d · ", line):
            machine = ", ".join(line.split(" · ")[:2])
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            spec = re.sub(r"^(echelon|sync):", "", cells[0].strip("`"))
            if following.startswith("|---"):
                header = cells
            elif re.match(rf"{re.escape(name)}($|\W)", spec) and heading not in told and len(told) < _MOST_MEASURED:
                told.add(heading)
                values = {title: value for title, value in zip(header[1:], cells[1:], strict=False) if value}
                where = values.pop(_MEASURED_ON, machine)  # of the row, where its table has rows of several machines
                yield f"{spec}{_place(heading)}: {_says(heading, values)} ({where})."


def _place(heading: str) -> str:
    """Say where a table was measured, after a name: nothing where what its rows say tells already."""
    link = _LINK.match(heading)
    if link is not None:
        return f" over a link of {link[1]} {link[2].upper() if link[2] != 'k' else 'k'}bit/s"
    return "" if heading.startswith(_TELLING) else f", {heading[:1].lower()}{heading[1:]}"


def _says(heading: str, values: Mapping[str, str]) -> str:
    text = next((text for begins, text in _SAYS.items() if heading.startswith(begins)), None)
    wanted = re.findall(r"{([^}]+)}", text or "")
    if text is None or not set(wanted) <= values.keys():
        return ", ".join(f"{title}: {value}" for title, value in values.items())
    for title in wanted:
        text = text.replace(f"{{{title}}}", re.sub(r"\d{4,}(?![\d.])", lambda n: f"{int(n[0]):,}", values[title]))
    return text
