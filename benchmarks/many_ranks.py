"""Processor time of a step of a tiny model on many ranks of one machine: `echelon train` beside a DDP script by hand.

python -m benchmarks.many_ranks [--ranks 8 16] [--rounds 3] [--steps 1000] [--batch 128]

An MLP of 4,810 parameters on digits (1,438 samples: epochs of 12 steps with batches of 128, of 90 with 16), SGD with
momentum, one thread a process. What is counted is the processor time of the ranks' processes between two steps.
Evaluation is off; all else is as by default. They take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._common import REPOSITORY, command_line, environment_line, interleave, markdown_table, update_section

FEW, DEADLINE_S = 200, 1200.0
FOLDER, STEPS = "MANY_RANKS_FOLDER", "MANY_RANKS_STEPS"
HAND, ECHELON = "hand-written DDP", "Echelon"


class Tiny(nn.Module):
    """An MLP for images of 8x8 that notes the processor time of its process at two of its training steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self._step, self._began_s = 0, 0.0

    def forward(self, images: Tensor) -> Tensor:
        """Return scores [N, 10]."""
        self._step += self.training
        if self._step == FEW:
            self._began_s = time.process_time()
        elif self._step == FEW + int(os.environ.get(STEPS, "0")):
            Path(os.environ[FOLDER], str(os.getpid())).write_text(str(time.process_time() - self._began_s))
        scores: Tensor = self.layers(images)
        return scores


def tiny(*_: object, **__: object) -> nn.Module:
    """Return the model."""
    return Tiny()


def train_by_hand(rank: int, ranks: int, steps: int, batch_size: int, port: int) -> None:
    """Train as a script would, one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    data = load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(data.target)
    model = DistributedDataParallel(tiny())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    order, total = torch.Generator().manual_seed(0), torch.zeros(())
    places = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(places) < batch_size:
            places = torch.randperm(len(images), generator=order)
        batch, places = places[:batch_size][rank::ranks], places[batch_size:]
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.destroy_process_group()


def step_ms(contender: str, ranks: int, steps: int, batch: int) -> float:
    """Return the processor time of a step, of all ranks, in milliseconds.

    Raises:
        CalledProcessError: the run failed.
        ValueError: a rank noted nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        notes.mkdir()
        last = FEW + steps + 10
        if contender == HAND:
            command = [sys.executable, "-m", "benchmarks.many_ranks", "--by-hand", str(ranks), str(last), str(batch)]
        else:
            command = [
                sys.executable, "-m", "echelon", "train", "digits", "--model", "benchmarks.many_ranks:tiny", "--trust",
                "--workers", str(ranks), "--threads", "1", "--device", "cpu", "--batch-size", str(batch),
                "--epochs", "9999", "--max-steps", str(last), "--eval-every", "0", "--run", str(Path(folder, "run")),
            ]  # fmt: skip
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        given = {**os.environ, "PYTHONPATH": path, FOLDER: str(notes), STEPS: str(steps)}
        subprocess.run(command, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL, env=given)
        seconds = [float(note.read_text()) for note in notes.iterdir()]
    if len(seconds) != ranks:
        raise ValueError(f"{len(seconds)} of {ranks} ranks noted their time")
    return 1e3 * sum(seconds) / steps


def measure(ranks: int, rounds: int, steps: int, batch: int) -> list[object]:
    """Return a row of the table: milliseconds of a step, all ranks, of both, and their ratios."""
    found: dict[str, list[float]] = {HAND: [], ECHELON: []}
    for _, contender in interleave((HAND, ECHELON), rounds):
        found[contender].append(step_ms(contender, ranks, steps, batch))
        print(ranks, contender, f"{found[contender][-1]:.3f} ms", flush=True)
    ratios = [ours / hand for ours, hand in zip(found[ECHELON], found[HAND], strict=True)]
    hand, ours = (statistics.median(found[name]) for name in (HAND, ECHELON))
    ratio, bounds = f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"
    return [ranks, f"{hand:.2f}", f"{ours:.2f}", ratio, bounds]


def main() -> None:
    """Measure, and write the table into RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--by-hand", type=int, nargs=3, metavar=("RANKS", "STEPS", "BATCH"), help="be the script")
    args = parser.parse_args()
    if args.by_hand:
        ranks, steps, batch = args.by_hand
        mp.spawn(train_by_hand, (ranks, steps, batch, 20_000 + os.getpid() % 20_000), nprocs=ranks)
        return
    rows = [measure(ranks, args.rounds, args.steps, args.batch) for ranks in args.ranks]
    header = ["ranks", "by hand, ms a step", "Echelon, ms a step", "ratio, median", "lowest to highest"]
    about = f"An MLP of 4,810 parameters, {args.batch} samples a batch; processor time of the ranks' processes."
    line = environment_line(command_line("benchmarks.many_ranks"))
    update_section("Many ranks: processor time of a tiny step", f"{line}\n\n{about}\n\n{markdown_table(header, rows)}")


if __name__ == "__main__":
    main()
