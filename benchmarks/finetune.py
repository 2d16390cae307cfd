"""What fine-tuning costs beside a hand-written script, and what it is worth with little data.

python -m benchmarks.finetune cost [--only head] [--rounds 5] [--steps 40]
python -m benchmarks.finetune cifar FOLDER [--seeds 5] [--epochs 10]
python -m benchmarks.finetune text FOLDER ENGLISH [--seeds 5] [--epochs 10]

`cost`: head, all and lora of a small vision transformer on one thread, in turns with a loop of torch and peft.
`cifar`: FOLDER has train/CLASS and test/CLASS. A model is trained on eight classes, then tuned to the other two with 50
images of each; against training from scratch on these, paired by seed.
`text`: FOLDER has train.csv and test.csv of banking77, ENGLISH is a text, a sentence a line. A masked language model is
trained on it, then tuned to ten texts of each of the 77 categories.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from benchmarks._common import (
    REPOSITORY,
    command_line,
    environment_line,
    interleave,
    markdown_table,
    median,
    update_section,
)
from echelon.records.file import read_records
from echelon.records.kinds import Steps

KINDS = ("head", "all", "lora")
TUNES = ("head", "lora", "layer_decay(0.75)", "all")
SCRATCH = "scratch"
PER_CLASS, TEXTS_PER_CLASS = 50, 10
DEADLINE_S = 3600.0
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def cost(kinds: Sequence[str], rounds: int, steps: int) -> str:
    """Return the table of seconds and memory, the product's over the script's."""
    rows = []
    for kind in kinds:
        measured: dict[str, list[tuple[float, float]]] = {"echelon": [], "hand": []}
        for _, who in interleave(tuple(measured), rounds):
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks._finetune_hand", who, kind, str(steps)],
                cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=DEADLINE_S,
            )  # fmt: skip
            seconds, memory = json.loads(done.stdout.splitlines()[-1])
            measured[who].append((seconds, memory))
        pairs = list(zip(measured["echelon"], measured["hand"], strict=True))
        speed = [hand[0] / own[0] for own, hand in pairs]
        memory = [own[1] / hand[1] for own, hand in pairs]
        rows.append([
            kind, *(f"{1e3 * median(each[0] for each in measured[who]):.1f} ms" for who in measured),
            _range(speed), *(f"{median(each[1] for each in measured[who]) / 1e6:.0f} MB" for who in measured),
            _range(memory),
        ])  # fmt: skip
        print(*rows[-1], sep=" | ", flush=True)
    header = ["tune", "a step", "by hand", "speed of by hand", "peak memory", "by hand", "memory of by hand"]
    return markdown_table(header, rows)


def _range(values: Sequence[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def cifar(folder: Path, seeds: int, epochs: int) -> str:
    """Return the table of accuracies on two classes."""
    classes = sorted(path.name for path in (folder / "train").iterdir())
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        link_classes(folder, place / "eight", classes[:8], {})
        _train(place, "eight", "base", ["--model", "resnet20", "--epochs", str(epochs)])
        base = ["--weights", str(place / "base"), "--model", "resnet20", "--epochs", "20"]
        scratch = ["--model", "resnet20", "--epochs", "60"]

        def data(seed: int) -> str:
            """Put 50 images of each of two classes into a folder."""
            link_classes(folder, place / f"two-{seed}", classes[8:], {"train": PER_CLASS}, seed)
            return f"two-{seed}"

        return _table(_compared(place, data, {SCRATCH: scratch, **dict.fromkeys(TUNES, base)}, seeds))


def text(folder: Path, english: Path, seeds: int, epochs: int) -> str:
    """Return the table of accuracies on 77 categories."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        shutil.copy(english, place / "english.txt")
        masked = ["--task", "masked-language-modelling", "--tokeniser", "bpe(4000)", "--epochs", str(epochs)]
        # it learns how often tokens are for a thousand steps before it looks at others: many small steps, none too long
        masked += ["--context", "32", "--lr", "0.001", "--warmup-epochs", "0.2", "--clip-norm", "1"]
        print("base", _trained(place, "english.txt", "base", masked), flush=True)
        common = ["--input", "text", "--target", "category", "--model", "small_bert", "--epochs", "20"]
        common += ["--optimizer", "adamw", "--eval-every", "5", "--tokeniser", str(place / "base"), "--lr", "0.001"]

        def data(seed: int) -> str:
            """Write ten texts of each category, and all that are for the test."""
            of = place / f"few-{seed}"
            of.mkdir()
            shutil.copy(folder / "test.csv", of)
            table = pd.read_csv(folder / "train.csv").sample(frac=1, random_state=seed)
            table.groupby("category").head(TEXTS_PER_CLASS).to_csv(of / "train.csv", index=False)
            return of.name

        base = [*common, "--weights", str(place / "base")]
        return _table(_compared(place, data, {SCRATCH: common, **dict.fromkeys(TUNES, base)}, seeds))


def _compared(
    place: Path, data: Callable[[int], str], ways: Mapping[str, Sequence[str]], seeds: int
) -> dict[str, list[Trained]]:
    """Train in each way with each seed; `ways`: arguments by what is tuned, or from scratch."""
    found: dict[str, list[Trained]] = {name: [] for name in ways}
    for seed in range(seeds):
        folder = data(seed)
        for name, start in ways.items():
            arguments = [
                *start,
                *([] if name == SCRATCH else ["--tune", name]),
                "--batch-size",
                "20",
                "--seed",
                str(seed),
            ]
            found[name].append(_train(place, folder, f"{name.partition('(')[0]}-{seed}", arguments))
            print(seed, name, found[name][-1], flush=True)
    return found


def _table(found: Mapping[str, Sequence[Trained]]) -> str:
    rows = []
    for name, runs in found.items():
        gains = [run.top1 - scratch.top1 for run, scratch in zip(runs, found[SCRATCH], strict=True)]
        rows.append([
            name, f"{statistics.fmean(run.top1 for run in runs):.4f}", "" if name == SCRATCH else _interval(gains),
            f"{1e3 * median(run.step_s for run in runs):.0f} ms", f"{median(run.seconds for run in runs):.0f} s",
            f"{median(run.step_bytes for run in runs):,.0f}", f"{median(run.memory for run in runs) / 1e6:.0f} MB",
        ])  # fmt: skip
    header = ["from", "top-1", "more than from scratch, paired by seed (95%)", "a step", "the run", "bytes a step"]
    return markdown_table([*header, "peak memory of a rank"], rows)


def link_classes(folder: Path, into: Path, classes: Sequence[str], most: dict[str, int], seed: int = 0) -> None:
    """Put classes into a folder of their own, by links of the file system."""
    for part in ("train", "test"):
        for name in classes:
            files = sorted((folder / part / name).iterdir())
            random.Random(f"{seed}{name}").shuffle(files)
            (into / part / name).mkdir(parents=True)
            for file in files[: most.get(part)]:
                try:
                    os.link(file, into / part / name / file.name)
                except OSError:
                    shutil.copy(file, into / part / name / file.name)


@dataclass(frozen=True)
class Trained:
    """What came of a run: accuracy of the best checkpoint on the test set, and what it cost.

    Attributes:
        step_s: seconds of a step; `seconds` of the command.
        step_bytes: that a rank sent in a step.
        memory: peak of the fullest rank, in bytes.
    """

    top1: float
    step_s: float
    seconds: float
    step_bytes: float
    memory: float


def _trained(place: Path, data: str, run: str, arguments: Sequence[str]) -> dict[str, float]:
    """Train with the command line; returns the run's metrics."""
    command = [sys.executable, "-m", "echelon", "train", data, *arguments, "--run", run, "--workers", "2"]
    subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
    metrics: dict[str, float] = json.loads((place / run / "summary.json").read_text())["metrics"]
    return metrics


def _train(place: Path, data: str, run: str, arguments: Sequence[str]) -> Trained:
    """Train with the command line, and evaluate the best checkpoint."""
    _trained(place, data, run, arguments)
    import echelon

    before = Path.cwd()
    os.chdir(place)
    try:
        top1 = float(echelon.evaluate(run, workers=1)["top1"] or math.nan)
    finally:
        os.chdir(before)
    told = json.loads((place / run / "summary.json").read_text())
    memory = max(peak for window in read_records(place / run, Steps) for peak in window.memory_bytes)
    return Trained(top1, told["step_s"], told["wall_s"], told["wire_bytes_per_step"], memory)


def _interval(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:+.4f}"
    half = _T95.get(len(values) - 1, 2.0) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})"


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="leave RESULTS.md as it is")
    parts = parser.add_subparsers(dest="part", required=True)
    of_cost, of_cifar, of_text = parts.add_parser("cost"), parts.add_parser("cifar"), parts.add_parser("text")
    of_text.add_argument("folder", type=Path)
    of_text.add_argument("english", type=Path)
    of_text.add_argument("--seeds", type=int, default=5)
    of_text.add_argument("--epochs", type=int, default=10)
    of_cost.add_argument("--only", choices=KINDS, help="one of them; then RESULTS.md stays as it is")
    of_cost.add_argument("--rounds", type=int, default=5)
    of_cost.add_argument("--steps", type=int, default=40)
    of_cifar.add_argument("folder", type=Path)
    of_cifar.add_argument("--seeds", type=int, default=5)
    of_cifar.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    if options.part == "cost":
        kinds = (options.only,) if options.only else KINDS
        title, table = "Fine-tuning: its cost", cost(kinds, options.rounds, options.steps)
    elif options.part == "text":
        title = "Fine-tuning: its worth on texts"
        table = text(options.folder.absolute(), options.english.absolute(), options.seeds, options.epochs)
    else:
        title, table = "Fine-tuning: its worth", cifar(options.folder.absolute(), options.seeds, options.epochs)
    print(table)
    if not options.print and not getattr(options, "only", None):
        update_section(title, f"{table}\n\n{environment_line(command_line('benchmarks.finetune'))}")


if __name__ == "__main__":
    main()
