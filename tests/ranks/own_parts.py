"""A module and data of a user's own, in a file that workers can import."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from echelon.models.base import ModelInput
from echelon.models.builtin import bench_cnn, resnet20
from echelon.models.builtin.small_cnn import SmallCNN


class Dots(Dataset[tuple[Tensor, int]]):
    """Points of two classes, told apart by the sum of their four numbers."""

    def __init__(self, count: int, seed: int) -> None:
        self._points = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._points[index], int(self._points[index].sum() > 0)


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(B, 2)`."""
        logits: Tensor = self.layers(x)
        return logits


class Greedy(nn.Module):
    """Has memory for 8 samples at a time, from its 11th batch on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.batches = module, 0

    def forward(self, x: Tensor) -> Tensor:
        """Return what its module does.

        Raises:
            RuntimeError: as torch's allocator has it.
        """
        self.batches += self.training
        if self.training and self.batches > 10 and len(x) > 8:
            raise RuntimeError("err == 0. DefaultCPUAllocator: can't allocate memory")
        outputs: Tensor = self.module(x)
        return outputs


def greedy(data: ModelInput) -> nn.Module:
    """Return a small model that has memory for 8 images."""
    return Greedy(SmallCNN(data))


class InFloat64(nn.Module):
    """A model of images in float64: sums in different orders differ by 1e-16, which does not grow into sight."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, classes)."""
        logits: Tensor = self.model(images.double())
        return logits


def bench_cnn64(data: ModelInput) -> nn.Module:
    """Build `bench_cnn` in float64."""
    return InFloat64(bench_cnn.build(data))


def resnet20_64(data: ModelInput) -> nn.Module:
    """Build `resnet20` in float64."""
    return InFloat64(resnet20.build(data))


class SmallCNN64(SmallCNN):
    """`small_cnn` in float64, under its own names."""

    def __init__(self, data: ModelInput) -> None:
        super().__init__(data)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, classes)."""
        return super().forward(images.double())


if __name__ == "__main__":
    import echelon
    from tests.ranks.own_parts import Dots, Net

    net = Net()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    outcome = echelon.train(net, (Dots(400, 0), Dots(100, 1)), run="own", workers=2, epochs=5, device="cpu", threads=1)
    # Workers get it in shared memory: had they trained it there, each would have trained the others' too.
    assert all(map(torch.equal, before, net.parameters()))
    print(outcome.status, outcome.summary["metrics"]["top1"])
