"""`python -m tests.families.page RESULTS.jsonl docs/families.md`: writes the matrix of families as a page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.families import trial
from tests.families.trial import Row

SHOWN = {"same": "as one process", "refused": "refused", "failed": "FAILED", "alone": "FAILED alone"}
DRAWN = "*"
INTRODUCTION = f"""# Families of models

Which models train in which layout? This table shows models of timm, torchvision and transformers, small and without
dropout, in six layouts. Those with a star were drawn at random (`python -m tests.families FILE`); the others were drawn
before, or failed once.

- *As one process*: the first three losses on two processes are those of one, within a millionth (some models compute
  in float32 inside). int8 rounds, so there this holds for the first loss; the second is within {trial.LOSSY[1]:.0%}
  of the largest loss, the third within {trial.LOSSY[2]:.0%}. Models with BatchNorm use `--sync-batchnorm`.
- *Refused*: in one line, before the start.

No other outcome is allowed.
"""


def page(rows: Sequence[Row]) -> str:
    """Return the page of a file of verdicts."""
    trials = [row for row in rows if row.layout in trial.LAYOUTS]
    names = sorted({row.name for row in trials})
    outcomes = {(row.name, row.layout): row.outcome for row in trials}
    drawn = {row.name for row in rows if row.outcome == "drawn"}
    header = ["model", *(f"`{layout}`" for layout in trial.LAYOUTS)]
    table = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for name in names:
        cells = [SHOWN.get(outcomes.get((name, layout), ""), "not tried") for layout in trial.LAYOUTS]
        table.append(f"| {name}{DRAWN if name in drawn else ''} | {' | '.join(cells)} |")
    return "\n".join([INTRODUCTION, _count(names, trials), "", *table, *_refusals(trials), *_passed_over(rows), ""])


def names_on(text: str) -> set[str]:
    """Return the models of a page that are marked as drawn."""
    cells = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    return {cell.removesuffix(DRAWN) for cell in cells if cell.endswith(DRAWN)}


def _count(names: Sequence[str], trials: Sequence[Row]) -> str:
    dates = sorted({row.date for row in trials})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return (
        f"{len(names)} models, {len(trials)} trials, {when}, with {' and '.join(sorted({r.versions for r in trials}))}."
    )


def _refusals(trials: Sequence[Row]) -> list[str]:
    """Return the reasons, each with its models."""
    reasons: dict[str, list[str]] = {}
    for row in trials:
        if row.outcome == "refused":
            reasons.setdefault(_plain(row.words), []).append(row.name.rpartition("/")[2])
    return ["", "What was refused, and why:", "", *sorted(f"- {', '.join(reasons[each])}: {each}" for each in reasons)]


def _passed_over(rows: Sequence[Row]) -> list[str]:
    found = [f"- {row.name}: {row.words}" for row in rows if row.outcome == "passed over"]
    said = "Families that were drawn and are not in the table, by the shortest name of each, and why:"
    return ["", said, "", *sorted(found)] if found else []


def _plain(reason: str) -> str:
    for advice in (": write --tensor-plan", ": make the model an nn.Sequential", "; use fsdp=N", ": use fsdp=N"):
        reason = reason.partition(advice)[0]
    return reason


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(page(trial.read_rows(Path(sys.argv[1]))))
