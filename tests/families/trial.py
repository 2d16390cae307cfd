"""One family in one layout: trained for some steps on real ranks, and compared with one process."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.config import build
from echelon.core.errors import UserError
from echelon.data.base import DataInfo
from echelon.observe.phases import HostClock
from echelon.run.resolve import resolve
from echelon.trainer.parts import build_parts
from echelon.trainer.state import seed_everything
from echelon.trainer.work import Work
from tests.families import zoo
from tests.ranks.layouts import TASK, make_world, train_on_one_batch
from tests.ranks.spawn import Rank, RanksFailed, run_ranks

STEPS = 3
TOLERANCE = 1e-6  # of the loss, relative: some families compute in float32 inside, and sums come in another order
LOSSY = (TOLERANCE, 0.05, 0.15)  # of the largest loss, with a codec that rounds: before an update, after one, after two
INFO = DataInfo("any", tuple("abcdefgh"), 3, 32, 64, 16, (8,) * zoo.CLASSES)
LAYOUTS = {
    "dp=2": ("dp=2", "none"),
    "dp=2, int8": ("dp=2", "int8"),
    "dp=2,zero1, int8": ("dp=2,zero1", "int8"),
    "fsdp=2": ("fsdp=2", "none"),
    "tp=2": ("tp=2", "none"),
    "pp=2": ("pp=2,microbatches=1", "none"),
}


@dataclass(frozen=True)
class Verdict:
    """What became of a family in a layout.

    Attributes:
        outcome: `same`, `refused` or `failed`.
        words: the refusal or the failure; how far each loss is from that of one process otherwise, as a part of it
            (of the largest, with a codec).
    """

    outcome: str
    words: str


@dataclass(frozen=True)
class Row:
    """A line of a file of verdicts: a family in a layout, or, without one, that it was `drawn` or `passed over`."""

    name: str
    layout: str
    outcome: str
    words: str
    date: str
    versions: str


def read_rows(file: Path) -> list[Row]:
    """Return a file's verdicts; of several about one family and layout the last."""
    rows = [Row(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    return list({(row.name, row.layout): row for row in rows}.values())


def train(rank: Rank | None, name: str, layout: str, codec: str) -> list[float]:
    """Train a family; returns the losses of the global batches."""
    settings: Mapping[str, Any] = {
        "optimizer.name": "momentum",
        "optimizer.lr": 0.005,
        "data.batch_size": zoo.SAMPLES,
        "strategy.parallel": layout,
        "strategy.compression": codec,
        "model.sync_batchnorm": True,
    }
    config = build(None, settings).config
    world = make_world(config, rank)
    seed_everything(1)
    model = zoo.build(name)
    inputs, targets = zoo.batch(name)
    clock = HostClock()
    parts = build_parts(resolve(config), Work(INFO, TASK, model, inputs[:2]), world, clock)
    losses = train_on_one_batch(parts, world, clock, (inputs, targets), STEPS)
    return losses


def attempt(rank: Rank, name: str, layout: str, codec: str) -> tuple[str, Any]:
    """Train, and say how it ended: losses, a refusal or the last lines of a traceback."""
    try:
        return "losses", train(rank, name, layout, codec)
    except UserError as refusal:
        return "refused", str(refusal)
    except Exception:  # noqa: BLE001 - the trial shows it
        return "failed", traceback.format_exc()


def reference(name: str) -> list[float]:
    """Return the losses of one process, made in a process of its own."""
    kind, found = run_ranks(attempt, 1, name, "dp=1", "none", timeout_s=120)[0]
    if kind != "losses":
        raise RanksFailed(f"{name} alone: {found}")
    return list(found)


def compare(name: str, layout: str, expected: list[float]) -> Verdict:
    """Train a family in a layout of LAYOUTS on two ranks and compare its losses."""
    parallel, codec = LAYOUTS[layout]
    try:
        ranks = run_ranks(attempt, 2, name, parallel, codec, timeout_s=100, group_timeout_s=40)
    except RanksFailed as failure:
        return Verdict("failed", f"hang or crash: {failure}"[-400:])
    kinds = {kind for kind, _ in ranks}
    if kinds == {"refused"}:
        return Verdict("refused", ranks[0][1])
    if kinds != {"losses"}:
        text = next(found for kind, found in ranks if kind == "failed") if "failed" in kinds else str(ranks)
        return Verdict("failed", str(text)[-1500:])
    seen = ranks[0][1]
    largest = max(abs(loss) for loss in expected)
    scales = [max(abs(loss), 1e-3) if codec == "none" else largest for loss in expected]  # some fall to a quarter
    apart = [abs(a - b) / scale for a, b, scale in zip(seen, expected, scales, strict=True)]
    allowed = [TOLERANCE] * STEPS if codec == "none" else LOSSY
    if not all(off <= most for off, most in zip(apart, allowed, strict=True)):  # one that is not finite is not below
        return Verdict("failed", f"losses {seen} are not {expected}")
    return Verdict("same", " ".join(f"{off:.0e}" for off in apart))
