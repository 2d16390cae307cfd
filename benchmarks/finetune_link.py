"""What a tuned model loses over a slow link: `echelon train` from its first step to its end, beside loopback.

python -m benchmarks.finetune_link FOLDER [--link 10mbit] [--rounds 3] [--epochs 2] [--tune "lora(r=8, targets=qkv)"]

FOLDER has train/CLASS and test/CLASS; 16 and 2 images of each class are used. `timm/vit_small_patch16_224` is trained
on them by two workers with 16 images each, over loopback and over the link in turn; evaluations and checkpoints count.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks._common import (
    REPOSITORY,
    command_line,
    environment_line,
    interleave,
    markdown_table,
    median,
    paired_ratio,
    update_section,
)
from benchmarks.finetune import link_classes
from echelon.records.file import read_records
from echelon.records.kinds import End, LinkTraffic, Steps

LOOPBACK = "loopback"
MODEL, SIDE, WORKERS, BATCH = "timm/vit_small_patch16_224", "224", "2", "32"
IMAGES = {"train": 16, "test": 2}  # of a class
DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Whole:
    """A run from the start of its first step to its end.

    Attributes:
        seconds: of all; `steps_s` those of its steps.
        sent: bytes that the kernel counted on the links of all ranks; 0 over loopback.
    """

    seconds: float
    steps_s: float
    sent: float


def train(data: Path, run: Path, place: str, options: argparse.Namespace) -> Whole:
    """Train once with the command line."""
    command = [
        sys.executable, "-m", "echelon", "train", str(data), "--model", MODEL, "--image-size", SIDE,
        "--workers", WORKERS, "--batch-size", BATCH, "--epochs", str(options.epochs), "--tune", options.tune,
        "--run", str(run),
        *([] if place == LOOPBACK else ["--link", place]),
    ]  # fmt: skip
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
    windows = read_records(run, Steps)
    first_t = windows[0].t - windows[0].seconds
    sent = sum(host.sent_payload_bytes for each in read_records(run, LinkTraffic) for host in each.hosts)
    return Whole(read_records(run, End)[-1].t - first_t, sum(each.seconds for each in windows), sent)


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--link", default="10mbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--tune", default="lora(r=8, targets=qkv)")
    parser.add_argument("--print", action="store_true", help="leave RESULTS.md as it is")
    options = parser.parse_args()
    found: dict[str, list[Whole]] = {LOOPBACK: [], options.link: []}
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "data"
        link_classes(options.folder, data, sorted(each.name for each in (options.folder / "train").iterdir()), IMAGES)
        for turn, place in interleave(tuple(found), options.rounds):
            found[place].append(train(data, Path(temporary) / f"{place}-{turn}", place, options))
            print(place, found[place][-1], flush=True)
    base = [each.seconds for each in found[LOOPBACK]]
    rows = []
    for place, runs in found.items():
        speeds = [at_base / each.seconds for at_base, each in zip(base, runs, strict=True)]
        rows.append([
            place, f"{median(each.seconds for each in runs):.1f} s", f"{median(each.steps_s for each in runs):.1f} s",
            f"{paired_ratio(base, [each.seconds for each in runs]):.3f} ({min(speeds):.3f} to {max(speeds):.3f})",
            f"{median(each.sent for each in runs) / 1e6:.2f} MB" if place != LOOPBACK else "",
        ])  # fmt: skip
    table = markdown_table(["over", "first step to end", "its steps", "speed of loopback", "sent by all ranks"], rows)
    print(table)
    if not options.print:
        line = environment_line(command_line("benchmarks.finetune_link"))
        update_section("A tuned model over a slow link", f"{table}\n\n{line}")


if __name__ == "__main__":
    main()
