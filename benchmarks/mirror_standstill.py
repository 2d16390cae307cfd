"""Time what training waits for checkpoints: of a run with a folder alone, and of one mirrored over 10 Mbit/s.

python benchmarks/mirror_standstill.py [REPEATS]: needs the group `clusters` (rclone), prints one line a run.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.clusters.stores import rclone
from tests.clusters.throttle import throttled

from echelon.records.file import read_records
from echelon.records.kinds import Checkpoint, Steps

RUN = ["train", "digits", "--model", "resnet20", "--workers", "2", "--epochs", "3", "--checkpoint-every", "4"]


def timed(folder: Path, *more: str) -> tuple[float, float, int]:
    """Return the seconds that rank 0 waited for checkpoints, those of all steps, and how many checkpoints."""
    command = [sys.executable, "-m", "echelon", *RUN, "--run", str(folder), *more]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    saved = read_records(folder, Checkpoint)
    return sum(c.blocked_s for c in saved), sum(s.seconds for s in read_records(folder, Steps)), len(saved)


def main(repeats: int) -> None:
    """Time both ways in turn."""
    waits: dict[str, list[float]] = {"folder": [], "mirror": []}
    with tempfile.TemporaryDirectory() as scratch, rclone(Path(scratch)) as store, throttled(store.port, 10e6) as port:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        for i in range(repeats):
            for name in waits:
                more = ["--mirror", f"s3://runs/{uuid.uuid4().hex}"] if name == "mirror" else []
                blocked_s, steps_s, count = timed(Path(scratch) / f"{name}{i}", *more)
                waits[name].append(blocked_s / count)
                print(
                    f"{name}: {count} checkpoints, {blocked_s / count * 1e3:.1f} ms waited each, {steps_s:.2f} s steps"
                )
    medians = {name: statistics.median(values) for name, values in waits.items()}
    print(f"ratio of medians {medians['mirror'] / medians['folder']:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
