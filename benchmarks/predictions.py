"""Predictions of whole runs beside what was measured, on (model, link, choice) drawn by a seed.

A run by all-reduce (with another seed than 1: of whole gradients, int8, or by powersgd) predicts from its own record
what another choice would take, from the first step to the end, pauses counted. Then that choice is run. None of these
runs is used to make the predictions: the draw is all that is given.

    python -m benchmarks.predictions --seed 1 --group 0     one model and link, two choices: three runs
    python -m benchmarks.predictions --seed 1 --write       the table of all groups that were run

Needs root, for links are shaped in network namespaces. The data are made from the seed: images with a pattern for each
of ten classes, and a text of made-up words.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks._common import (
    append_result,
    command_line,
    environment_line,
    markdown_table,
    read_results,
    update_section,
)
from echelon.reporting.report import summarise
from echelon.reporting.report.records import load_run
from echelon.reporting.report.summary import Summary
from echelon.reporting.report.whole_run import WholeRun
from echelon.run.resolve import canonical

IMAGE_MODELS = (
    *("small_cnn", "resnet20", "timm/test_byobnet", "timm/test_convnext", "timm/test_efficientnet", "timm/test_resnet"),
    *("timm/test_vit", "timm/test_nfnet", "torchvision/shufflenet_v2_x0_5"),
)
MODELS = (*IMAGE_MODELS, "small_gpt")
LINKS = {"": 60, "100mbit": 60, "10mbit": 30}
"""Links ("": loopback), and the steps of a run over each."""

CHOICES = (
    *("compression=bf16", "compression=int8", "compression=sign", "compression=topk(0.01)", "compression=powersgd(2)"),
    *("sync=local(8)", "sync=local(8, overlap=2)", "sync=diloco(20)", "sync=local(8) compression=int8"),
    *("sync=diloco(20) compression=int8", "sync=local(8, overlap=2) compression=sign"),
)
BASES = ("", "compression=int8", "compression=powersgd(2)")
CLOSE = 0.15
TITLE = "Predictions of whole runs"
_RUN_LIMIT_S = 300
_LINK_BOUND_S = 40.0  # of a run that takes longer the link decides, not what else the machine does
_NAMES = {"sync": "strategy.sync", "compression": "strategy.compression"}


@dataclass(frozen=True)
class Group:
    """A model over a link, and the choices that are predicted from one run of it, by `base`."""

    model: str
    link: str
    choices: tuple[str, ...]
    base: str = ""


@dataclass(frozen=True)
class Pair:
    """One prediction and its measurement, in seconds from the first step to the end; `base_s` are the base's, before
    and after.

    Attributes:
        step_s, then_step_s, measured_step_s: of all-reduce, predicted, and measured.
        pauses, base_pauses: shares of the measured run, and of all-reduce's.
    """

    group: int
    model: str
    link: str
    choice: str
    base_s: list[float]
    predicted_s: float
    measured_s: float
    step_s: list[float]
    then_step_s: float
    measured_step_s: float
    pauses: dict[str, float]
    base_pauses: dict[str, float]
    base: str = ""

    @property
    def off(self) -> float:
        """Relative error of the predicted seconds."""
        return self.predicted_s / self.measured_s - 1


def drawn(seed: int, number: int) -> Group:
    """Return a group of the draw."""
    choose = random.Random(f"{seed} {number}")
    model, link, choices = choose.choice(MODELS), choose.choice(list(LINKS)), tuple(choose.sample(CHOICES, 2))
    base = "" if seed == 1 else choose.choice(BASES)
    return Group(model, link, tuple(choice for choice in choices if choice != base), base)


def run_group(seed: int, number: int) -> list[Pair]:
    """Run the base, each choice, and the base again; returns what was predicted and measured.

    Both runs of the base predict, and the mean counts: where they differ, the machine has changed meanwhile. A long
    one is not repeated.
    """
    group, measured = drawn(seed, number), []
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder), group.model, seed)

        def run(choice: str) -> Summary:
            """Do one run, and return it in numbers."""
            return summarise(load_run(_train(data, group, choice, Path(folder) / "run")))

        before = run(group.base)
        measured = [(choice, run(choice)) for choice in group.choices]
        drifts = before.whole is not None and before.whole.seconds < _LINK_BOUND_S
        bases = [before, run(group.base)] if drifts else [before]
    return [pair for choice, found in measured if (pair := _pair(number, group, choice, bases, found))]


def _pair(number: int, group: Group, choice: str, bases: Sequence[Summary], found: Summary) -> Pair | None:
    wanted = plain_settings(options_of(choice))
    predicted = [p for base in bases for p in base.predictions if plain_settings(p.settings) == wanted]
    wholes = [base.whole for base in bases if base.whole]
    if not predicted or found.whole is None or not wholes:
        print(f"{group.model}: nothing was predicted for {choice}")
        return None
    return Pair(
        number, group.model, group.link, choice, [w.seconds for w in wholes], fmean(p.run_then_s for p in predicted),
        found.whole.seconds, [p.now_s for p in predicted], fmean(p.then_s for p in predicted), found.step_s or 0.0,
        _shares(found.whole), _shares(wholes[0]), group.base,
    )  # fmt: skip


def _shares(whole: WholeRun) -> dict[str, float]:
    return {name: round(share, 4) for name, share in whole.shares(0.001).items()}


def _parts(choice: str) -> list[tuple[str, str]]:
    """Return names and values of `sync=local(8, overlap=2) compression=int8`."""
    words = choice.replace(", ", ",").split()
    return [(name, value) for name, _, value in (word.partition("=") for word in words)]


def options_of(choice: str) -> dict[str, str]:
    """Return the settings of `sync=local(8, overlap=2) compression=int8`, by dotted name."""
    return {_NAMES[name]: value for name, value in _parts(choice)}


def plain_settings(settings: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Return settings with specs as they are read: `topk(0.01)` is `topk(density=0.01)`."""
    full = {"strategy.sync": "allreduce", "strategy.compression": "none", **settings}
    return frozenset((name, canonical(name, value)) for name, value in full.items())


def _train(data: Path, group: Group, choice: str, folder: Path) -> Path:
    """Do one run into an empty folder, and return it."""
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    link = ["--link", group.link] if group.link else []
    options = [word for name, value in _parts(choice) for word in (f"--{name}", value)]
    command = [
        *(sys.executable, "-m", "echelon", "train", str(data), "--model", group.model, "--run", str(folder)),
        *("--workers", "2", "--threads", "1", "--batch-size", "64", "--epochs", "100", "--lr", "0.02"),
        *("--max-steps", str(LINKS[group.link]), "--eval-every", "1", *link, *options),
    ]
    subprocess.run(command, check=True, timeout=_RUN_LIMIT_S, stdout=subprocess.DEVNULL)
    return folder


def make_data(folder: Path, model: str, seed: int) -> Path:
    """Write images or a text made from the seed; returns where."""
    rng = np.random.default_rng(seed)
    if model == "small_gpt":
        words = ["".join(rng.choice(list("abcdefghijklmnop"), rng.integers(2, 8))) for _ in range(400)]
        text = " ".join(words[min(399, int(i))] for i in rng.zipf(1.3, 60_000))
        (folder / "text.txt").write_text(text, encoding="utf-8")
        return folder / "text.txt"
    from PIL import Image

    for label in range(10):
        pattern = rng.normal(128, 40, (32, 32, 3))
        place = folder / "images" / f"class{label}"
        place.mkdir(parents=True)
        for i in range(160):
            pixels = np.clip(pattern + rng.normal(0, 60, pattern.shape), 0, 255).astype("uint8")
            Image.fromarray(pixels).save(place / f"{i}.png")
    return folder / "images"


def table(pairs: Sequence[Pair]) -> str:
    """Return the table, the worst last."""
    head = ["model", "link", "choice", "from", "took", "predicted", "measured", "off", "a step: predicted", "measured"]
    rows = [
        [
            p.model, p.link or "loopback", f"`{p.choice}`", f"`{p.base or 'none'}`",
            ", ".join(f"{s:.1f}" for s in p.base_s) + " s",
            f"{p.predicted_s:.1f} s",
            f"{p.measured_s:.1f} s", f"{p.off:+.0%}" if abs(p.off) <= CLOSE else f"**{p.off:+.0%}**",
            f"{1e3 * p.then_step_s:.0f} ms", f"{1e3 * p.measured_step_s:.0f} ms",
        ]
        for p in sorted(pairs, key=lambda p: abs(p.off))
    ]  # fmt: skip
    return markdown_table(head, rows)


def main() -> None:
    """Run one group of the draw, or write the table of those that were run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--group", type=int, help="its number; without it all that are written are those run before")
    parser.add_argument("--write", action="store_true", help="write the table into RESULTS.md")
    options = parser.parse_args()
    name = f"predictions-{options.seed}"
    if options.group is not None:
        for pair in run_group(options.seed, options.group):
            append_result(name, asdict(pair))
            print(pair.model, pair.link or "loopback", pair.choice, f"{pair.predicted_s:.1f} s predicted", end=", ")
            print(f"{pair.measured_s:.1f} s measured: {pair.off:+.0%}", flush=True)
    if options.write:
        results = [*{(result["group"], result["choice"]): result for result in read_results(name)}.values()]
        pairs = [Pair(**{f.name: result[f.name] for f in fields(Pair) if f.name in result}) for result in results]
        held = sum(abs(p.off) <= CLOSE for p in pairs)
        said = f"{held} of {len(pairs)} within {CLOSE:.0%}; seconds from the first step to the end, pauses counted."
        where = environment_line(command_line("benchmarks.predictions"), results[-1]["environment"])
        update_section(
            TITLE if options.seed == 1 else f"{TITLE}, seed {options.seed}", f"{where}\n\n{said}\n\n{table(pairs)}"
        )


if __name__ == "__main__":
    main()
