"""Training with each codec: two workers in one process, exchanging as the compressed all-reduce does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from echelon.compression.base import Codec, State
from echelon.compression.registry import read

SPECS = [
    "fp16",
    "bf16",
    "int8",
    "qsgd",
    "qsgd(levels=1, bucket=128)",
    "ternary",
    "sign",
    "sign(vote=true)",
    "threshold(density=0.01)",
    "threshold(tau=0.01)",
    "topk(0.01)",
    "topk(0.01, momentum=0)",
    "topk(0.02, values=sign)",
    "topk(0.01, warmup_steps=60)",
    "randomk(0.1)",
    "powersgd(rank=2)",
    "topk(0.01)+huffman",
]
WORKERS, BATCH, EPOCHS = 2, 64, 14

Exchange = Callable[[str, list[Tensor]], Tensor]


def average(name: str, gradients: list[Tensor]) -> Tensor:
    """What a codec stands in for."""
    return torch.stack(gradients).mean(dim=0)


class Compressed:
    """One tensor's exchange through a codec: as its rounds for linear codecs, else encoded, summed, encoded again."""

    def __init__(self, codec: Codec) -> None:
        self.codec, self.back = codec, codec.relay()
        self.states: dict[tuple[str, int], State] = {}

    def __call__(self, name: str, gradients: list[Tensor]) -> Tensor:
        if gradients[0].dim() < 2:
            return average(name, gradients)
        states = [self._state(self.codec, name, rank, gradients[0]) for rank in range(WORKERS)]
        if self.codec.linear:
            return self._reduce(gradients, states)
        total = torch.zeros_like(gradients[0])
        for gradient, state in zip(gradients, states, strict=True):
            self.codec.add_to(total, self.codec.compress(gradient, state))
        state = self._state(self.back, name, -1, total)
        result = self.back.extract(self.back.compress(total, state))
        return result if self.codec.direction else result / WORKERS

    def _state(self, codec: Codec, name: str, rank: int, like: Tensor) -> State:
        key = (name, rank)
        if key not in self.states:
            self.states[key] = codec.init_state(name, like, stream=rank + 1)
        return self.states[key]

    def _reduce(self, gradients: list[Tensor], states: list[State]) -> Tensor:
        rounds = [self.codec.reduce_rounds(g, s) for g, s in zip(gradients, states, strict=True)]
        sent = [next(one) for one in rounds]
        while True:
            mean = torch.stack(sent).mean(dim=0)
            sent = []
            for one in rounds:
                try:
                    sent.append(one.send(mean.clone()))
                except StopIteration as stop:
                    result: Tensor = stop.value
            if not sent:
                return result


def accuracy(exchange: Exchange, momentum: float) -> float:
    """Train a small network on half of each batch per worker; accuracy on 360 held-out digits."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(y))
    test, train = order[:360], order[360:]
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    steps = len(train) // BATCH * EPOCHS
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(EPOCHS):
        for batch in train[torch.randperm(len(train))].split(BATCH)[: len(train) // BATCH]:
            parts = []
            for part in batch.chunk(WORKERS):
                loss = nn.functional.cross_entropy(model(x[part]), y[part])
                parts.append(torch.autograd.grad(loss, list(model.parameters())))
            for (name, parameter), *gradients in zip(model.named_parameters(), *parts, strict=True):
                parameter.grad = exchange(name, gradients)
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return float((model(x[test]).argmax(dim=1) == y[test]).float().mean())


@pytest.fixture(scope="module")
def plain() -> float:
    return accuracy(average, momentum=0.9)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_accuracy_is_kept(spec: str, plain: float) -> None:
    """Within 1 point of the uncompressed accuracy (360 digits: three of them), as `--compression` would run."""
    compression, momentum = read(spec).with_momentum(0.9)
    reached = accuracy(Compressed(compression.build()), momentum)
    assert reached > plain - 0.011, f"{spec}: {reached:.4f}, uncompressed {plain:.4f}"
