"""Time what training waits for checkpoints: of a run with a folder alone, and of one mirrored over 10 Mbit/s.

python benchmarks/mirror_standstill.py [REPEATS]: needs the group `clusters` (rclone), prints one line a run.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.clusters.stores import rclone
from tests.clusters.throttle import throttled

from echelon.records.file import read_records
from echelon.records.kinds import Checkpoint, Steps
from echelon.study.intervals import ratio_interval

RUN = ["train", "digits", "--model", "resnet20", "--workers", "2", "--epochs", "6", "--checkpoint-every", "4"]


@dataclass(frozen=True)
class Waited:
    """What training waited for the checkpoints of a run.

    Attributes:
        median_s: rank 0, for one checkpoint.
        share: of the steps' seconds, for all of them.
        checkpoints: how many.
    """

    median_s: float
    share: float
    checkpoints: int


def timed(folder: Path, *more: str) -> Waited:
    """Train, and return what rank 0 waited for checkpoints."""
    command = [sys.executable, "-m", "echelon", *RUN, "--run", str(folder), *more]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    waits = [saved.blocked_s for saved in read_records(folder, Checkpoint)]
    steps_s = sum(window.seconds for window in read_records(folder, Steps))
    return Waited(statistics.median(waits), sum(waits) / steps_s, len(waits))


def main(repeats: int) -> None:
    """Time both ways in turn, which of them first by turns, and print each run and their ratio."""
    found: dict[str, list[Waited]] = {"folder": [], "mirror": []}
    with tempfile.TemporaryDirectory() as scratch, rclone(Path(scratch)) as store, throttled(store.port, 10e6) as port:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        for i in range(repeats):
            for name in sorted(found, reverse=bool(i % 2)):
                more = ["--mirror", f"s3://runs/{uuid.uuid4().hex}"] if name == "mirror" else []
                waited = timed(Path(scratch) / f"{name}{i}", *more)
                found[name].append(waited)
                print(
                    f"{name}: {waited.checkpoints} checkpoints, {waited.median_s * 1e3:.2f} ms waited for one, "
                    f"{waited.share:.2%} of the steps' time for all",
                    flush=True,
                )
    for what in ("median_s", "share"):
        mirror, folder = ([getattr(waited, what) for waited in found[name]] for name in ("mirror", "folder"))
        print(f"{what}, mirror / folder: {ratio_interval(mirror, folder)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
