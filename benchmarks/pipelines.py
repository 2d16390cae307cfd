"""Steps of pipelines, simulated from what `echelon plan` measures of two workers, beside runs on shaped links.

    python -m benchmarks.pipelines --write              all cases, under six minutes on two cores, and the table
    python -m benchmarks.pipelines --smallest           the calibration and one case, nothing is written

The calibration is the plan's own: whole replicas with two batch sizes, and 1F1B on two ranks with few micro-batches and
many, over loopback. Cases are 2 and 4 ranks with two schedules, and two replicas of 2 ranks, over two link rates; none
of them is used to fit anything. Four ranks share the two cores, which the plan is told (`processors=2`); each has its
own link. Bubbles are of the two steps that a run records. ResNet-20 has activations and stages of unequal size.

Needs root, for links are shaped in network namespaces. The data are made from a seed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks._common import (
    append_result,
    command_line,
    environment_line,
    markdown_table,
    median,
    read_results,
    update_section,
)
from benchmarks.predictions import make_data
from echelon.config import RunConfig, build
from echelon.config.machines import read_at
from echelon.planning.calibration import Calibration, measured_memory
from echelon.planning.layouts import DescribedModel, Pipelining, PlannedWay, pipeline_way, tried_pipelines, with_memory
from echelon.planning.trial import calibrate_by_runs
from echelon.records.kinds import PipelineStep
from echelon.reporting.report.records import RunRecord, load_run
from echelon.reporting.report.timing import measure

TITLE = "Simulated pipelines"
NAME = "pipelines"
LINKS = ("1gbit", "100mbit")
SCHEDULES = {"resnet20": ("1f1b", "interleaved"), "small_gpt": ("gpipe", "1f1b")}
"""Of each model: two per rank are more stages than small_gpt has blocks."""
BATCH, MICROBATCHES, STEPS, CORES = 32, 8, 20, 2
_RUN_LIMIT_S = 120


@dataclass(frozen=True)
class Case:
    """A pipeline over a link: a step, the mean bubble of its ranks, and its fullest rank, as simulated and as measured.

    Attributes:
        low_s, high_s: bounds of what is simulated.
    """

    model: str
    layout: str
    link: str
    simulated_s: float
    low_s: float
    high_s: float
    measured_s: float
    simulated_bubble: float
    measured_bubble: float
    simulated_bytes: float
    measured_bytes: float

    @property
    def off(self) -> float:
        """Relative error of the step."""
        return self.simulated_s / self.measured_s - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measured step is within the bounds."""
        return self.low_s <= self.measured_s <= self.high_s


def cases_of(model: str) -> list[tuple[Pipelining, str]]:
    """Return the pipelines of a model, with their links."""
    found = [Pipelining(ranks, 1, MICROBATCHES, schedule) for ranks in (2, 4) for schedule in SCHEDULES[model]]
    found.append(Pipelining(2, 2, MICROBATCHES))
    return [(each, link) for each in found for link in LINKS]


def train(config: RunConfig, asked: Pipelining, link: str, folder: Path) -> RunRecord:
    """Do one run, and return its record."""
    layout = asked.layout if asked.replicas == 1 else f"dp={asked.replicas},{asked.layout}"
    command = [
        *(sys.executable, "-m", "echelon", "train", config.data.source, "--model", config.model.name),
        *("--run", str(folder), "--parallel", layout, "--workers", str(asked.ranks * asked.replicas)),
        *("--threads", "1", "--batch-size", str(BATCH), "--epochs", "100", "--max-steps", str(STEPS)),
        *("--eval-every", "0", "--lr", "0.02", "--link", link),
    ]
    subprocess.run(command, check=True, timeout=_RUN_LIMIT_S, stdout=subprocess.DEVNULL)
    return load_run(folder)


def case_of(known: Calibration, described: DescribedModel, asked: Pipelining, link: str, record: RunRecord) -> Case:
    """Return a case from its run."""
    workers = asked.ranks * asked.replicas
    (machines,) = read_at(f"workers={workers}, per_machine={workers}, processors={CORES}, inside={link}")
    way, timing, memory = pipeline_way(described, asked, BATCH), measure(record), measured_memory(record)
    assert timing is not None and memory is not None
    step = way.step(known, machines, BATCH)
    bubble = median(each.idle_share() for each in record.of(PipelineStep))
    held = with_memory(PlannedWay(way, {}, exact=True), known, machines, described, BATCH).memory_bytes
    return Case(
        described.config.model.name, way.label, link, step.seconds.value, step.seconds.low, step.seconds.high,
        timing.step_s, step.bubble or 0.0, bubble, float(held or 0), memory.n_bytes,
    )  # fmt: skip


def run_model(model: str, folder: Path, cases: Sequence[tuple[Pipelining, str]]) -> list[Case]:
    """Calibrate, then measure cases."""
    settings = {
        "data.source": str(make_data(folder, model, 1)), "model.name": model, "data.batch_size": BATCH,
        "training.device": "cpu", "optimizer.lr": 0.02, "launch.workers": 2, "launch.threads": 1,
    }  # fmt: skip
    config = build(None, settings).config
    described = DescribedModel.of(config)
    known = calibrate_by_runs(config, tried_pipelines(read_at("workers=2"), described, BATCH))
    described.learn(known.memory)
    found = []
    for number, (asked, link) in enumerate(cases):
        record = train(config, asked, link, folder / str(number))
        found.append(case_of(known, described, asked, link, record))
        last = found[-1]
        told = f"{1e3 * last.simulated_s:.1f} ms simulated, {1e3 * last.measured_s:.1f} ms measured: {last.off:+.0%}"
        bubbles = f"bubble {last.simulated_bubble:.0%} simulated, {last.measured_bubble:.0%} measured"
        print(f"{last.layout} over {link}: {told}; {bubbles}", flush=True)
    return found


def table(cases: Sequence[Case]) -> str:
    """Return the table, in the order in which cases were measured."""
    head = ["model", "layout", "link", "a step: simulated", "measured", "off", "in the interval"]
    head += ["bubble: simulated", "measured", "fullest rank: forecast", "measured", "off"]
    rows = [
        [
            c.model, f"`{c.layout}`", c.link,
            f"{1e3 * c.simulated_s:.0f} ms ({1e3 * c.low_s:.0f} to {1e3 * c.high_s:.0f})",
            f"{1e3 * c.measured_s:.0f} ms", f"{c.off:+.0%}", "yes" if c.is_inside else "**no**",
            f"{c.simulated_bubble:.0%}", f"{c.measured_bubble:.0%}",
            f"{c.simulated_bytes / 1e6:.0f} MB", f"{c.measured_bytes / 1e6:.0f} MB",
            f"{c.simulated_bytes / c.measured_bytes - 1:+.0%}",
        ]
        for c in cases
    ]  # fmt: skip
    return markdown_table(head, rows)


def errors_in_words(cases: Sequence[Case]) -> str:
    """Say how far off cases were, by how many ranks there are, and those over each link."""
    kinds = {"All": cases}
    kinds |= {
        f"{ranks} ranks, one replica": [c for c in cases if c.layout.startswith(f"pp={ranks}")] for ranks in (2, 4)
    }
    kinds |= {"two replicas of 2 ranks": [c for c in cases if c.layout.startswith("dp=")]}
    kinds |= {f"over {link}": [c for c in cases if c.link == link] for link in LINKS}
    words = []
    for kind, mine in kinds.items():
        off = [abs(c.off) for c in mine]
        inside = f"{sum(c.is_inside for c in mine)} of {len(mine)} in their interval"
        words.append(f"{kind}: median error {median(off):.0%}, worst {max(off):.0%}, {inside}")
    bubbles = [100 * abs(c.simulated_bubble - c.measured_bubble) for c in cases]
    return "; ".join(words) + f". Bubbles: off by {median(bubbles):.0f} points (median), {max(bubbles):.0f} (worst)."


def main() -> None:
    """Run the cases of one model, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SCHEDULES), default="resnet20")
    parser.add_argument("--smallest", action="store_true", help="one case, of which nothing is written")
    parser.add_argument("--write", action="store_true", help="keep the results, and write the table")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cases = run_model(options.model, Path(folder), cases_of(options.model)[: 1 if options.smallest else None])
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.write and not options.smallest:
        for case in cases:
            append_result(NAME, asdict(case))
        results = read_results(NAME)
        newest = {(r["model"], r["layout"], r["link"]): r for r in results}
        known = [Case(**{f.name: result[f.name] for f in fields(Case)}) for result in newest.values()]
        where = environment_line(command_line("benchmarks.pipelines"), results[-1]["environment"])
        update_section(TITLE, f"{where}\n\n{errors_in_words(known)}\n\n{table(known)}")


if __name__ == "__main__":
    main()
