"""What each tool trains in the comparison of survivors: a model whose updates say which samples they are of.

It needs torch alone: the peers' own interpreters import it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import Dataset, Sampler

SAMPLES, FEATURES, BATCH, WORKERS, LR = 480, 8, 12, 3, 0.2
EPOCH = SAMPLES // BATCH  # steps
STEPS = 8 * EPOCH
PACE = "ELASTIC_PEERS_PACE_S"  # seconds that a worker takes for a sample
RECORD = "ELASTIC_PEERS_RECORD"  # the folder where each process writes its finished steps
CHECKPOINT_STEPS = 50
RESTARTS = 10


def _features() -> Tensor:
    return torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _labels(features: Tensor) -> Tensor:
    noise = torch.randn(SAMPLES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (features[:, :2].sum(dim=1) + features[:, 2:4].prod(dim=1) + 0.3 * noise > 0).long()


class Points(Dataset[tuple[Tensor, int]]):
    """Samples that are their own number; the model knows their features."""

    def __init__(self) -> None:
        self._labels = _labels(_features()).tolist()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index)]), self._labels[index]


class Model(nn.Module):
    """A small network, and a weight for each sample that moves by the sample's part in an update, and by nothing else.

    Attributes:
        newest: the one that this process trains.
    """

    newest: ClassVar[Model | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.network = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 2): the sample's logit, and its count."""
        indices = x[:, 0].long()
        if self.training and torch.is_grad_enabled():
            Model.newest = self
            time.sleep(len(x) * float(os.environ.get(PACE, "0")))
        return torch.stack([self.network(_features()[indices])[:, 0], self.counts[indices]], dim=1)

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss of all samples."""
        features = _features()
        logits = self.network(features)[:, 0]
        return float(_logistic(logits, _labels(features)).mean())

    def steps(self) -> int:
        """Return how many updates have made these weights: each moves the counts by the learning rate in sum."""
        return round(-float(self.counts.detach().sum()) / LR)


def _logistic(logits: Tensor, labels: Tensor) -> Tensor:
    return softplus(logits * (1 - 2 * labels))


def loss_of_each(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each sample's loss; the gradient of its count is 1."""
    return _logistic(outputs[:, 0], targets) + outputs[:, 1] - outputs[:, 1].detach()


class RecordedSGD(torch.optim.SGD):
    """SGD that writes a line of each finished step: its time, process, worker, number, samples, and the loss after."""

    def step(self, closure: Any = None) -> Any:
        """Update, and write."""
        model = Model.newest
        samples = _samples(model) if model is not None else []
        result = super().step(closure)
        if model is not None and samples:
            who, pid = worker_number(), os.getpid()
            line = {"t": time.time(), "pid": pid, "worker": who, "step": model.steps()}
            with (Path(os.environ[RECORD]) / f"{pid}.jsonl").open("a") as file:
                file.write(json.dumps({**line, "samples": samples, "loss": model.loss()}) + "\n")
        return result


def _samples(model: Model) -> list[int]:
    gradient = model.counts.grad
    found: list[int] = gradient.nonzero()[:, 0].tolist() if gradient is not None else []
    return found


def worker_number() -> int:
    """Return which of the workers this process is, or stands for; 0 leads."""
    member = os.environ.get("ECHELON_MEMBER", "")
    if member:
        return int(member.removeprefix("rank").partition(".")[0])
    return int(os.environ.get("REPLICA_GROUP_ID") or os.environ["RANK"])


def batch_at(sampler: Sampler[int], step: int) -> tuple[Tensor, Tensor]:
    """Return a worker's inputs and targets of a step, from 0, by a sampler of its part of the data."""
    sampler.set_epoch(step // EPOCH)  # type: ignore[attr-defined]
    share = BATCH // WORKERS
    first = step % EPOCH * share
    points = Points()
    chosen = [points[i] for i in list(sampler)[first : first + share]]
    return torch.stack([x for x, _ in chosen]), torch.tensor([label for _, label in chosen])


def train_step(
    model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> None:
    """Train one batch."""
    optimizer.zero_grad()
    torch.autograd.backward(loss_of_each(model(inputs), targets).mean())
    optimizer.step()
