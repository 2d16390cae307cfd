"""`python -m tests.families RESULTS.jsonl [NAME ...]`: fills a matrix of families and layouts; goes on where it was."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tests.families import trial, zoo
from tests.ranks import spawn
from tests.ranks.spawn import RanksFailed

SEED, COUNT = 27, 40
LIBRARIES = ("torch", "timm", "torchvision", "transformers")
FAILED_ONCE = (
    *(
        "timm/efficientnet_b0",
        "timm/mobilenetv3_small_050",
        "timm/mobilevit_xxs",
        "timm/resnet10t",
        "torchvision/swin_t",
    ),
    *(f"transformers/{name}ForCausalLM" for name in ("Cohere2", "Emu3", "Flint", "GPTNeoXJapanese", "HyperCLOVAX")),
    *(f"transformers/{name}ForCausalLM" for name in ("Jais2", "JetMoe", "Mamba", "Mistral", "Mpt", "Phi", "Qwen3")),
    "torchvision/swin_t",
    "transformers/SmolLM3ForCausalLM",
    *(f"transformers/{name}ForSequenceClassification" for name in ("DistilBert", "EuroBert", "GPT2", "Gte")),
    *(f"transformers/{name}ForSequenceClassification" for name in ("Persimmon", "Phi3", "Roberta", "T5")),
    "transformers/XLMRobertaXLForSequenceClassification",
    *(f"transformers/{name}ForImageClassification" for name in ("FocalNet", "ViT", "ViTMSN")),
)
"""Models that were drawn before, or failed once."""


def main(file: Path, names: Sequence[str]) -> None:
    """Try every family in every layout, and append each verdict as it comes; without names of what is drawn."""
    spawn.PRELOAD += [
        "timm",
        "torchvision",
        "transformers.modeling_utils",
        "transformers.masking_utils",
        "tests.families.trial",
    ]
    rows = trial.read_rows(file)
    if not names and not any(row.outcome == "drawn" for row in rows):
        drawn = zoo.draw(SEED, COUNT)
        _write(file, [(name, "", trial.Verdict("drawn", "")) for name in drawn.names])
        _write(file, [(name, "", trial.Verdict("passed over", reason)) for name, reason in drawn.passed_over.items()])
        rows = trial.read_rows(file)
    done = {(row.name, row.layout) for row in rows}
    for name in names or dict.fromkeys((*(row.name for row in rows if row.outcome == "drawn"), *FAILED_ONCE)):
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
        _write(file, [(name, layout, verdict) for layout, verdict in verdicts.items()])
        shown = " ".join(f"{layout}:{verdict.outcome}" for layout, verdict in verdicts.items())
        print(f"{time.monotonic() - began:5.1f} s  {name}  {shown}", flush=True)


def _write(file: Path, found: Sequence[tuple[str, str, trial.Verdict]]) -> None:
    today = datetime.now(UTC).date().isoformat()
    versions = ", ".join(f"{each} {version(each).partition('+')[0]}" for each in LIBRARIES)
    with file.open("a") as lines:
        for name, layout, verdict in found:
            row = trial.Row(name, layout, verdict.outcome, verdict.words, today, versions)
            lines.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
