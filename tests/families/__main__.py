"""`python -m tests.families RESULTS.jsonl [NAME ...]`: fills a matrix of families and layouts; goes on where it was."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.families import trial, zoo
from tests.ranks import spawn
from tests.ranks.spawn import RanksFailed

SEED, COUNT = 27, 40


def main(file: Path, names: list[str]) -> None:
    """Try every family in every layout, and append each verdict as it comes."""
    spawn.PRELOAD += [
        "timm",
        "torchvision",
        "transformers.modeling_utils",
        "transformers.masking_utils",
        "tests.families.trial",
    ]
    done = (
        {(r["name"], r["layout"]) for r in map(json.loads, file.read_text().splitlines())} if file.exists() else set()
    )
    for name in names or zoo.draw(SEED, COUNT):
        todo = [layout for layout in trial.LAYOUTS if (name, layout) not in done]
        if not todo:
            continue
        began = time.monotonic()
        try:
            expected = trial.reference(name)
        except RanksFailed as failure:
            verdicts = {layout: trial.Verdict("alone", str(failure)[-1500:]) for layout in todo}
        else:
            verdicts = {layout: trial.compare(name, layout, expected) for layout in todo}
        with file.open("a") as lines:
            for layout, verdict in verdicts.items():
                row = {"name": name, "layout": layout, "outcome": verdict.outcome, "words": verdict.words}
                lines.write(json.dumps(row) + "\n")
        shown = " ".join(f"{layout}:{verdict.outcome}" for layout, verdict in verdicts.items())
        print(f"{time.monotonic() - began:5.1f} s  {name}  {shown}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
