"""`python -m tests.families.page RESULTS.jsonl docs/families.md`: writes the matrix of families as a page."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.families import trial

SHOWN = {"same": "as one process", "refused": "refused", "failed": "FAILED", "alone": "FAILED alone"}
INTRODUCTION = """# Families of models

Which models train in which layout? This table shows models of timm, torchvision and transformers, small and without
dropout, in five layouts. 40 of them were drawn at random (`python -m tests.families FILE`); the others are models
that failed once.

- *As one process*: the first three losses on two processes are those of one, within a millionth (some models compute
  in float32 inside). int8 rounds, so there this holds for the first loss; the second is within a twentieth, and the
  third is finite. Models with BatchNorm use `--sync-batchnorm`.
- *Refused*: in one line, before the start.

No other outcome is allowed.
{missing}
"""


def page(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the page of a file of verdicts."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        found.setdefault(row["name"], {})[row["layout"]] = row["outcome"]
    layouts = list(trial.LAYOUTS)
    table = [f"| model | {' | '.join(f'`{each}`' for each in layouts)} |", "|---" * (len(layouts) + 1) + "|"]
    for name in sorted(found):
        cells = [SHOWN.get(found[name].get(layout, ""), "not tried") for layout in layouts]
        table.append(f"| {name} | {' | '.join(cells)} |")
    reasons = {row["words"] for row in rows if row["outcome"] == "refused"}
    said = ["", "What was refused, and why:", "", *sorted(f"- {_plain(reason)}" for reason in reasons)]
    count = f"\n{len(found)} families, {sum(len(each) for each in found.values())} trials."
    return "\n".join([INTRODUCTION.format(missing=count), *table, *said, ""])


def _plain(reason: str) -> str:
    return reason.partition(": write --tensor-plan")[0].partition(": make the model an nn.Sequential")[0]


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()
    Path(sys.argv[2]).write_text(page([json.loads(line) for line in lines]))
