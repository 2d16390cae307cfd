"""What fine-tuning is worth with little data: tuned weights against training from scratch, paired by seed.

python -m benchmarks.transfer cifar FOLDER [--seeds 5] [--epochs 6] [--base 2000]
python -m benchmarks.transfer text TEXT CSV [--seeds 5] [--epochs 3] [--base 200000]

`cifar`: FOLDER has train/CLASS and test/CLASS. A model learns `--base` images of each of eight classes, and is tuned
to the other two with 50 images of each. `text`: a language model learns the first `--base` characters of TEXT and is
tuned to CSV, a table of texts and their class, of which 10 of each class are given. Accuracies are of runs of one
process; bytes, memory and seconds beside them of one run of each kind on two ranks.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._common import command_line, environment_line, markdown_table, update_section

RATES = {"scratch": 0.05, "head": 0.05, "lora": 0.05, "layer_decay(0.75)": 0.05, "all": 0.05}
TEXT_RATES = {"scratch": 1e-3, "head": 5e-3, "lora": 3e-3, "layer_decay(0.75)": 1e-3, "all": 1e-3}
HELD_OUT, PER_CLASS, TEXTS_PER_CLASS = 0.1, 50, 10
DEADLINE_S = 3600.0
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


@dataclass(frozen=True)
class Study:
    """What is tuned to what.

    Attributes:
        folder: in which runs are made.
        base: the run that was trained before, in it.
        rates: learning rate by kind.
        scratch: settings of runs from scratch, which take longer.
        settings: of all runs.
    """

    folder: Path
    base: str
    rates: dict[str, float]
    scratch: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)

    def settings_of(self, kind: str, seed: int) -> dict[str, Any]:
        """Return the settings of a run."""
        start = self.scratch if kind == "scratch" else {"weights": self.base, "tune": kind}
        return {**self.settings, **start, "lr": self.rates[kind], "seed": seed}


def compared(study: Study, data_of: Any, seeds: int) -> str:
    """Return the table of accuracies, and of what a run of each kind costs."""
    import echelon

    found: dict[str, list[float]] = {kind: [] for kind in study.rates}
    for seed in range(seeds):
        data = data_of(seed)
        for kind in study.rates:
            run = f"{kind.partition('(')[0]}-{seed}"
            settings = study.settings_of(kind, seed)
            outcome = echelon.train(data=data, run=run, workers=1, eval_every=0, **settings)
            found[kind].append(float(outcome.metrics["top1"] or 0.0))
            print("measured", seed, kind, found[kind][-1], flush=True)
    rows = []
    for kind, values in found.items():
        gains = [value - scratch for value, scratch in zip(values, found["scratch"], strict=True)]
        gain = "" if kind == "scratch" else _interval(gains)
        rows.append([kind, f"{statistics.fmean(values):.4f}", gain, *_cost(study, kind, data_of(0))])
    header = ["start", "test top-1", "more than from scratch, paired by seed (95%)", "bytes a step, both ranks"]
    return markdown_table([*header, "memory of a rank, MB", "seconds of steps"], rows)


def _cost(study: Study, kind: str, data: str) -> list[str]:
    """Return bytes of a step, memory and seconds of a run of two ranks, from the first step to the last."""
    run = f"cost-{kind.partition('(')[0]}"
    settings = {**study.settings_of(kind, 0), "workers": 2, "eval_every": 0, "max_restarts": 0}
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "echelon", "train", data, "--run", run, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
    lines = [json.loads(line) for line in Path(run, "record.jsonl").read_text().splitlines()]
    windows = [line for line in lines if line["kind"] == "steps"]
    steps = sum(len(line["losses"]) for line in windows)
    memory = max(max(line["memory_bytes"]) for line in windows)
    sent, seconds = sum(line["wire_bytes"] for line in windows) / steps, sum(line["seconds"] for line in windows)
    return [f"{sent:,.0f}", f"{memory / 1e6:.0f}", f"{seconds:.1f} ({steps} steps)"]


def cifar(folder: Path, place: Path, options: argparse.Namespace) -> str:
    """Return the table of eight classes of images and the other two."""
    import echelon

    classes = sorted(path.name for path in (folder / "train").iterdir())
    _copy(folder, place / "eight", classes[:8], {"train": options.base, "test": 100})
    common = {"model": "small_cnn", "device": "cpu", "threads": 1}
    base = {**common, "epochs": options.epochs, "batch_size": 100, "lr": 0.1, "eval_every": 0}
    first = echelon.train(data="eight", run="base", workers=1, **base)
    print("measured base", dict(first.metrics), flush=True)

    def data_of(seed: int) -> str:
        """Return the images of the other two classes that a seed draws."""
        if not (place / f"two-{seed}").exists():
            most = {"train": round(PER_CLASS / (1 - HELD_OUT)), "test": 300}
            _copy(folder, place / f"two-{seed}", classes[8:], most, seed)
        return f"two-{seed}"

    tuned = {**common, "batch_size": 20, "epochs": 15}
    return compared(Study(place, "base", RATES, {"epochs": 45}, tuned), data_of, options.seeds)


def text(file: Path, table: Path, place: Path, options: argparse.Namespace) -> str:
    """Return the table of a language model and classes of questions."""
    import transformers

    import echelon

    transformers.GPT2Config(
        vocab_size=2048, n_layer=2, n_embd=96, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ).save_pretrained(place / "gpt")
    (place / "text.txt").write_text(file.read_text()[: options.base])
    common = {"model": "transformers/gpt", "device": "cpu", "threads": 1, "optimizer": "adamw", "context": 64}
    base = {**common, "epochs": options.epochs, "batch_size": 32, "lr": 2e-3, "eval_every": 0, "tokeniser": "bpe(1024)"}
    first = echelon.train(data="text.txt", run="base", workers=1, task="language-modelling", **base)
    print("measured base", dict(first.metrics), flush=True)
    rows = list(csv.reader(table.open()))
    by_class: dict[str, list[list[str]]] = {}
    for row in rows[1:]:
        by_class.setdefault(row[1], []).append(row)

    def data_of(seed: int) -> str:
        """Return the questions that a seed draws: some to learn from, ten more of each class to be judged by."""
        here = place / f"texts-{seed}"
        here.mkdir(exist_ok=True)
        drawn = random.Random(seed)
        parts: dict[str, list[list[str]]] = {"train": [], "test": []}
        for name in sorted(by_class)[:20]:
            chosen = drawn.sample(by_class[name], 2 * TEXTS_PER_CLASS + 2)
            parts["train"] += chosen[: TEXTS_PER_CLASS + 2]
            parts["test"] += chosen[TEXTS_PER_CLASS + 2 :]
        for part, chosen in parts.items():
            with (here / f"{part}.csv").open("w", newline="") as out:
                csv.writer(out).writerows([rows[0], *chosen])
        return here.name

    tuned = {**common, "batch_size": 20, "epochs": 10, "tokeniser": "base", "task": "text-classification"}
    return compared(Study(place, "base", TEXT_RATES, {"epochs": 30}, tuned), data_of, options.seeds)


def _copy(folder: Path, into: Path, classes: Sequence[str], most: dict[str, int], seed: int = 0) -> None:
    """Put some images of classes into a folder of their own."""
    for part in ("train", "test"):
        for name in classes:
            files = sorted((folder / part / name).iterdir())
            random.Random(f"{seed}{name}").shuffle(files)
            (into / part / name).mkdir(parents=True)
            for file in files[: most.get(part)]:
                shutil.copy(file, into / part / name / file.name)


def _interval(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:+.4f}"
    half = _T95.get(len(values) - 1, 2.0) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})"


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="leave RESULTS.md as it is")
    parts = parser.add_subparsers(dest="part", required=True)
    of_cifar, of_text = parts.add_parser("cifar"), parts.add_parser("text")
    of_cifar.add_argument("folder", type=Path)
    of_text.add_argument("text", type=Path)
    of_text.add_argument("table", type=Path)
    for part, epochs, base in ((of_cifar, 6, 2000), (of_text, 3, 200_000)):
        part.add_argument("--seeds", type=int, default=5)
        part.add_argument("--epochs", type=int, default=epochs, help="on what is trained before")
        part.add_argument("--base", type=int, default=base, help="images of each class, or characters, of that")
    options = parser.parse_args()
    given = [path.absolute() for path in vars(options).values() if isinstance(path, Path)]
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        table = (cifar if options.part == "cifar" else text)(*given, Path(temporary), options)
    print(table)
    if not options.print:
        title = {"cifar": "Fine-tuning: its worth on images", "text": "Fine-tuning: its worth on texts"}[options.part]
        update_section(title, f"{table}\n\n{environment_line(command_line('benchmarks.transfer'))}")


if __name__ == "__main__":
    main()
