"""A six-step flow whose driver is killed at random seconds: is every step done once, with the bits of a calm flow?

uv run python benchmarks/flow.py --runs 100 --kills 4 [--minutes 15] [--data PATH/cifar10]
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.flows.base import step_folder
from echelon.flows.state import load_flow
from echelon.records.file import read_records
from echelon.records.kinds import FlowStepEnd, FlowStepStart

PREPARE = """\
import shutil
from pathlib import Path


def subset(folder, source: str, images: int):
    for part in ("train", "test"):
        for label in sorted(p for p in (Path(source) / part).iterdir() if p.is_dir()):
            to = folder / "subset" / part / label.name
            to.mkdir(parents=True)
            for file in sorted(label.iterdir())[:images]:
                shutil.copyfile(file, to / file.name)


def nothing(folder):
    (folder / "subset").mkdir()
"""
FLOW = """\
steps:
  subset:
    prepare: {prepare}
    settings: {settings}
    outputs: {{data: subset}}
  pretrain:
    train: {data}
    needs: [subset]
    matrix: {{seed: [0, 1]}}
    settings:
      model: mlp
      epochs: 1
      workers: 1
      seed: ${{seed}}
  tune:
    finetune: ["${{pretrain.run}}", "{data}"]
    matrix: {{seed: [0, 1], lr: [0.01, 0.02]}}
    settings:
      lr: ${{lr}}
      epochs: 1
      workers: 1
  judge:
    evaluate: ${{tune.run}}
    matrix: tune
    settings: {{workers: 1}}
  best:
    select: ${{tune.run}}
  file:
    export: ["${{best.run}}", model.safetensors]
"""
DEADLINE_S = 1800.0


def main() -> None:
    """Run the flow once in peace and once with kills, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=8, help="of each run")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0, help="no run is begun after so many")
    parser.add_argument("--longest", type=float, default=20.0, help="seconds until a kill, at most")
    parser.add_argument("--data", default="", help="a folder with train/ and test/; empty: digits")
    parser.add_argument("--images", type=int, default=20, help="of each class, of such a folder")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        write_flow(base, options.data, options.images)
        begun, draw, found = time.monotonic(), random.Random(options.seed), []
        run_killed(base, 0, options.longest, draw)
        (base / "flow").rename(base / "calm")  # a run knows the path of its data: all flows have the same
        print(f"calm: {time.monotonic() - begun:.0f} s", flush=True)
        while len(found) < options.runs and time.monotonic() - begun < 60 * options.minutes:
            began = time.monotonic()
            kills = run_killed(base, options.kills, options.longest, draw)
            found.append(compare(base, kills))
            print(f"run {len(found)}: {time.monotonic() - began:.0f} s, {found[-1]}", flush=True)
            shutil.rmtree(base / "flow")
        print(f"{len(found)} runs: {sum(found, Compared())}")


def write_flow(base: Path, data: str, images: int) -> None:
    """Describe the flow in a folder.

    Args:
        data: a folder with train/ and test/; empty: digits.
        images: of each class, of such a folder.
    """
    (base / "mine.py").write_text(PREPARE)
    given = (
        ("mine:subset", f"{{source: {Path(data).resolve()}, images: {images}}}", "${subset.data}")
        if data
        else ("mine:nothing", "{}", "digits")
    )
    (base / "flow.yaml").write_text(FLOW.format(**dict(zip(("prepare", "settings", "data"), given))))


@dataclass(frozen=True)
class Compared:
    """What became of killed flows beside a calm one.

    Attributes:
        starts: of steps; `went_on` of them from a checkpoint.
        not_once: steps that were not done exactly once.
        different: steps that left other bytes than the calm flow's.
    """

    kills: int = 0
    starts: int = 0
    went_on: int = 0
    not_once: Sequence[str] = ()
    different: Sequence[str] = ()

    def __add__(self, other: Compared) -> Compared:
        """Return both together."""
        return Compared(
            self.kills + other.kills, self.starts + other.starts, self.went_on + other.went_on,
            [*self.not_once, *other.not_once], [*self.different, *other.different],
        )  # fmt: skip

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"{self.kills} kills, {self.starts} starts of steps, {self.went_on} went on from a checkpoint; not done "
            f"exactly once: {', '.join(self.not_once) or 'none'}; other bits than without kills: "
            f"{', '.join(self.different) or 'none'}"
        )


def run_killed(base: Path, kills: int, longest_s: float, draw: random.Random) -> int:
    """Run the flow until it is complete, killed so many times on the way; returns how often it was."""
    command = [sys.executable, "-m", "echelon", "flow", str(base / "flow.yaml"), "--run", str(base / "flow")]
    done = 0
    while True:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            _, errors = process.communicate(timeout=draw.uniform(1.0, longest_s) if done < kills else DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate(timeout=60)
            if done >= kills:
                raise
            done += 1
            continue
        if process.returncode:
            raise SystemExit(f"the flow failed: {errors}")
        return done


def compare(base: Path, kills: int) -> Compared:
    """Return whether each step of the killed flow was done once, and left what the calm one's did."""
    twice, different, starts, goes_on = [], [], 0, 0
    for name in load_flow(base / "calm").steps:
        of = [step_folder(base / folder, name) for folder in ("calm", "flow")]
        calm, killed = ([end for end in read_records(each, FlowStepEnd) if end.status == "completed"] for each in of)
        begun = read_records(of[1], FlowStepStart)
        starts += len(begun)
        goes_on += sum(start.goes_on for start in begun)
        if len(killed) != 1:
            twice.append(f"{name} ({len(killed)} times)")
        elif calm[0].outputs != killed[0].outputs:
            different.append(name)
    return Compared(kills, starts, goes_on, twice, different)


if __name__ == "__main__":
    main()
