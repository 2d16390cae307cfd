"""Plans beside what was measured: 4 workers on shaped links, predicted from 2 workers on loopback, drawn by a seed.

Two workers have a core each, and four have half of one, which the plan is told as `speed=0.5`: two workers that share
one core never wait for another core to wake up, which takes four of them most of what their messages take.

    python -m benchmarks.plan --seed 1 --model 0            one model: two calibrating runs, and four that are measured
    python -m benchmarks.plan --seed 1 --write              the table of all models that were run

Needs root, for links are shaped in network namespaces, and two cores. The data are made from the seed.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

from benchmarks._common import (
    append_result,
    command_line,
    environment_line,
    markdown_table,
    read_results,
    update_section,
)
from benchmarks.predictions import CHOICES, IMAGE_MODELS, make_data, options_of, plain_settings
from echelon.config import build
from echelon.config.machines import read_at
from echelon.planning.calibration import calibrate, measured_memory
from echelon.planning.layouts import DescribedModel
from echelon.planning.plan import over_steps
from echelon.planning.steps import Replicated
from echelon.reporting.report.records import CONFIG_FILE, load_run

TITLE = "Plans"
LINKS = ("1gbit", "100mbit", "10mbit")
STEPS = 80
_RUN_LIMIT_S = 300


@dataclass(frozen=True)
class Case:
    """A choice on a link: seconds of a step and bytes of the fullest rank, as predicted and as measured.

    Attributes:
        low_s, high_s: bounds of what is predicted.
        before_bytes: what the fullest rank had before it had a model.
        forecast_bytes: what a dry run tells of what comes after that, without a calibration.
    """

    model: str
    link: str
    choice: str
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    predicted_bytes: float = 0.0
    measured_bytes: float = 0.0
    before_bytes: float = 0.0
    forecast_bytes: float = 0.0

    @property
    def off(self) -> float:
        """Relative error."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_off(self) -> float:
        """Relative error."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def grown_bytes(self) -> float:
        """Measured since it has a model."""
        return self.measured_bytes - self.before_bytes

    @property
    def grown_off(self) -> float:
        """Relative error of that alone."""
        return (self.predicted_bytes - self.before_bytes) / self.grown_bytes - 1


def run_model(seed: int, number: int) -> list[Case]:
    """Calibrate with two workers, then measure choices with four."""
    choose = random.Random(f"plan {seed} {number}")
    model = choose.choice(IMAGE_MODELS)
    drawn = [(choose.choice(LINKS), choose.choice(("", *CHOICES))) for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        data, run = make_data(Path(folder), model, seed), Path(folder) / "run"
        records = []
        for batch in (64, 32):
            own = ["--model", model, "--workers", "2", "--batch-size", str(batch)]
            records.append(load_run(_train(data, run, own)))
        known, described = calibrate(records), DescribedModel.of(build(run / CONFIG_FILE, {}).config)
        ways = {plain_settings(way.settings): way for way in known.ways}
        found = []
        for link, choice in drawn:
            way = ways[plain_settings(options_of(choice))]
            way = over_steps(way, STEPS)
            step = Replicated(way).step(known, read_at(f"workers=4, speed=0.5, link={link}")[0], 64).seconds
            words = [f"--{name.rpartition('.')[2]}={value}" for name, value in options_of(choice).items()]
            fixed = ["--model", model, "--workers", "4", "--batch-size", "64", "--link", link]
            four = load_run(_train(data, run, [*fixed, *words]))
            windows, memory = four.windows, measured_memory(four)
            laid_out = {"strategy.parallel": "dp=4", **way.settings}
            told = []
            for measured in ((), known.memory):
                described.learn(measured)
                told.append(described.memory(laid_out, 4, 64))
            seconds = sum(w.seconds for w in windows) / sum(w.count for w in windows)  # of all, begin and end too
            of_step = (step.value, step.low, step.high, seconds)
            found.append(
                Case(model, link, choice or "none", *of_step, told[1], memory.n_bytes, memory.before_bytes, told[0])
            )
        return found


def _train(data: Path, folder: Path, options: Sequence[str]) -> Path:
    """Do one run into an empty folder, on two cores, and return it."""
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    command = [
        *(sys.executable, "-m", "echelon", "train", str(data), "--run", str(folder), "--threads", "1"),
        *("--epochs", "100", "--lr", "0.02", "--max-steps", str(STEPS), "--eval-every", "0", *options),
    ]
    allowed = sorted(os.sched_getaffinity(0))[:2]
    subprocess.run(
        command, check=True, timeout=_RUN_LIMIT_S, stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    )  # fmt: skip
    return folder


def table(cases: Sequence[Case]) -> str:
    """Return the table, the worst last."""
    head = ["model", "link", "choice", "predicted", "measured", "off", "in the interval"]
    if with_memory := all(c.measured_bytes for c in cases):
        head += [
            "MB: predicted",
            "measured",
            "off",
            "of these since it has a model: dry run",
            "predicted",
            "measured",
            "off",
        ]
    rows = [
        [
            c.model, c.link, f"`{c.choice}`",
            f"{1e3 * c.predicted_s:.0f} ms ({1e3 * c.low_s:.0f} to {1e3 * c.high_s:.0f})",
            f"{1e3 * c.measured_s:.0f} ms",
            f"{c.off:+.0%}", "yes" if c.low_s <= c.measured_s <= c.high_s else "**no**",
            *(_memory_cells(c) if with_memory else ()),
        ]
        for c in sorted(cases, key=lambda c: abs(c.off))
    ]  # fmt: skip
    return markdown_table(head, rows)


def _memory_cells(case: Case) -> list[str]:
    whole = (case.predicted_bytes, case.measured_bytes)
    grown = (case.forecast_bytes, case.predicted_bytes - case.before_bytes, case.grown_bytes)
    return [
        *(f"{size / 1e6:.0f}" for size in whole), f"{case.memory_off:+.1%}",
        *(f"{size / 1e6:.0f}" for size in grown), f"{case.grown_off:+.1%}",
    ]  # fmt: skip


def said_of_memory(cases: Sequence[Case]) -> str:
    """Return how far memory was off, in words."""
    parts = (
        ("Memory of the fullest rank's process", [abs(c.memory_off) for c in cases]),
        ("of what it has had since it has a model", [abs(c.grown_off) for c in cases]),
        ("of that by a dry run alone", [abs(c.forecast_bytes / c.grown_bytes - 1) for c in cases]),
    )
    clauses = (
        f"{what}: median error {median(off):.1%}, worst {max(off):.1%}, "
        f"{sum(each <= 0.05 for each in off)} of {len(off)} within 5%"
        for what, off in parts
    )
    return f" {'; '.join(clauses)}."


def main() -> None:
    """Run a model, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=int, nargs="*", default=[])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    name = f"plan-{options.seed}"
    for number in options.model:
        for case in run_model(options.seed, number):
            append_result(name, asdict(case))
            told = (
                f"{1e3 * case.predicted_s:.0f} ms predicted, {1e3 * case.measured_s:.0f} ms measured: {case.off:+.0%}; "
                f"{' / '.join(_memory_cells(case))}"
            )
            print(case.model, case.link, case.choice, told, flush=True)
    if options.write:
        results = read_results(name)
        cases = [Case(**{f.name: result[f.name] for f in fields(Case)}) for result in results]
        inside = sum(c.low_s <= c.measured_s <= c.high_s for c in cases)
        middle = sorted(abs(c.off) for c in cases)[len(cases) // 2]
        said = (
            f"Steps of 4 workers from a calibration of 2: median error {middle:.0%}, worst "
            f"{max(abs(c.off) for c in cases):.0%}; {inside} of {len(cases)} within their interval."
        )
        said += said_of_memory(cases) if all(c.measured_bytes for c in cases) else ""
        where = environment_line(command_line("benchmarks.plan"), results[-1]["environment"])
        update_section(
            TITLE if options.seed == 1 else f"{TITLE}, seed {options.seed}", f"{where}\n\n{said}\n\n{table(cases)}"
        )


if __name__ == "__main__":
    main()
