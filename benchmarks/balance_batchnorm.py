"""What unequal parts of a batch do to BatchNorm, which measures each part by itself: parts of 28 and 100, and of 64.

python -m benchmarks.balance_batchnorm [--seeds 5] [--epochs 8]

Three convolutions with BatchNorm on digits, SGD with momentum, a cosine. Both workers are computed one after the other
in this process, with statistics of their own, whose mean is evaluated, as a run does; everything else is the same for
both: weights at the start, order of the samples, learning rate. So a pair of runs of a seed differs by the parts alone.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks._common import command_line, environment_line, update_section

BATCH, RATE, MOMENTUM = 128, 0.05, 0.9
PARTS = {"equal": (64, 64), "unequal": (28, 100)}
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""Student's t of a 95% interval, by the number of pairs."""


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 8, 8) and classes (N,), to train and to evaluate."""

    train: tuple[Tensor, Tensor]
    evaluation: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Result:
    """The mean training loss of the last epoch, and loss and top-1 of the evaluation after it."""

    train_loss: float
    loss: float
    top_1: float


def read_digits() -> Digits:
    """Return the data as Echelon divides it."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, classes = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16 - 0.3, torch.tensor(data.target)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    cut = len(order) * 4 // 5
    return Digits((images[order[:cut]], classes[order[:cut]]), (images[order[cut:]], classes[order[cut:]]))


def build(seed: int) -> nn.Module:
    """Return the model."""
    torch.manual_seed(seed)

    def block(ins: int, outs: int) -> list[nn.Module]:
        """Return a convolution and what follows it."""
        return [nn.Conv2d(ins, outs, 3, padding=1, bias=False), nn.BatchNorm2d(outs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip


def train(digits: Digits, parts: Sequence[int], seed: int, epochs: int) -> Result:
    """Train with a batch divided so; the last batch of an epoch in the same proportion."""
    model = build(seed)
    workers = [model, copy.deepcopy(model)]  # parameters are those of the first, statistics their own
    for own, shared in zip(workers[1].modules(), model.modules(), strict=True):
        own._parameters = shared._parameters
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM, weight_decay=5e-4)
    images, classes = digits.train
    steps = epochs * math.ceil(len(classes) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    draws = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    for _ in range(epochs):
        losses = []
        for batch in torch.randperm(len(classes), generator=draws).split(BATCH):
            first = round(len(batch) * parts[0] / sum(parts))
            optimizer.zero_grad()
            total = 0.0
            for worker, part in zip(workers, (batch[:first], batch[first:]), strict=True):
                loss = cross_entropy(worker(images[part]), classes[part], reduction="sum") / len(batch)
                loss.backward()
                total += loss.item()
            optimizer.step()
            schedule.step()
            losses.append(total)
    return Result(sum(losses) / len(losses), *evaluate(workers, digits))


@torch.no_grad()
def evaluate(workers: Sequence[nn.Module], digits: Digits) -> tuple[float, float]:
    """Return loss and top-1 with the mean of the workers' statistics."""
    model = copy.deepcopy(workers[0]).eval()
    for mean, *each in zip(model.buffers(), *(worker.buffers() for worker in workers), strict=True):
        mean.copy_(sum(buffer.double() for buffer in each) / len(each))
    outputs, classes = model(digits.evaluation[0]), digits.evaluation[1]
    return cross_entropy(outputs, classes).item(), (outputs.argmax(1) == classes).double().mean().item()


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of paired differences and its 95% interval."""
    values = torch.tensor(differences, dtype=torch.float64)
    half = T_95[len(values)] * values.std().item() / math.sqrt(len(values))
    return values.mean().item(), values.mean().item() - half, values.mean().item() + half


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, choices=sorted(T_95))
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    digits = read_digits()
    results = {n: [train(digits, p, s, options.epochs) for s in range(options.seeds)] for n, p in PARTS.items()}
    lines = []
    for name, scale, unit in (("train_loss", 1.0, ""), ("loss", 1.0, ""), ("top_1", 100.0, " percentage points")):
        means = {n: scale * sum(getattr(r, name) for r in each) / len(each) for n, each in results.items()}
        pairs = zip(results["unequal"], results["equal"], strict=True)
        mean, low, high = interval([scale * (getattr(u, name) - getattr(e, name)) for u, e in pairs])
        lines.append(
            f"- {name.replace('_', ' ')}: {means['equal']:.4f} with parts of 64, {means['unequal']:.4f} with 28 and "
            f"100; difference {mean:+.4f} ({low:+.4f} to {high:+.4f}){unit}"
        )
    about = f"{options.seeds} seeds, {options.epochs} epochs of digits; means, and 95% intervals of paired differences."
    text = "\n".join([about, "", *lines])
    print(text)
    update_section(
        "Balance: BatchNorm with unequal parts",
        f"{environment_line(command_line('benchmarks.balance_batchnorm'))}\n\n{text}\n",
    )


if __name__ == "__main__":
    main()
