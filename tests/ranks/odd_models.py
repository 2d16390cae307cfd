"""Modules that are unusual in one way each: tied, empty, complex, nested, lazy, compiled."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.core.hints import Hints

WIDTH, CLASSES = 8, 4


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x).tanh())  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Blocks two of which share a layer, and a head whose weight is a block's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.blocks[2].fc1 = self.blocks[1].fc1
        self.head = nn.Linear(WIDTH, 16)
        self.head.weight = self.blocks[3].fc1.weight  # type: ignore[union-attr, assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, :WIDTH]
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, :CLASSES]  # type: ignore[no-any-return]


class Nested(nn.Module):
    """Containers in containers, as stages of blocks are."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x.flatten(1)[:, :WIDTH]))  # type: ignore[no-any-return]


class Uncut(Nested):
    """A chain by its own word, whose first step uses what belongs to the last."""

    structure = Hints(chain=(":begin", "stages.*.*", "head"), glue={":begin": ()})

    def begin(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :WIDTH] * float(self.head.in_features > 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.begin(x)))  # type: ignore[no-any-return]


class GatedTokens(nn.Module):
    """Attention with fewer key heads than query heads, their widths alone known, and a gated MLP."""

    head_dim = 2

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, n) for n in (8, 4, 4, WIDTH))
        self.gate, self.up, self.down = (nn.Linear(*sizes) for sizes in ((WIDTH, 16), (WIDTH, 16), (16, WIDTH)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.q(x.flatten(1, 2)).tanh() + x.flatten(1, 2)
        return self.head(x + self.down(self.gate(x).sigmoid() * self.up(x))).mean(1)  # type: ignore[no-any-return]


class Normed(nn.Module):
    """A residual block of convolutions with BatchNorm and a depthwise one between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.conv2, self.bn3 = nn.Conv2d(8, 1, 1), nn.BatchNorm2d(1)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.depthwise(self.bn1(self.conv1(x)).relu())).relu()
        return self.head((x + self.bn3(self.conv2(y))).flatten(1))  # type: ignore[no-any-return]


class Empty(nn.Module):
    """A parameter and a buffer without elements, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.prompt = nn.Parameter(torch.empty(0, WIDTH))
        self.register_buffer("nothing", torch.empty(0))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, :WIDTH] + self.prompt.sum(0)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Complex(nn.Module):
    """A filter in the frequency domain: a complex parameter, and a complex buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex128))
        self.register_buffer("seen", torch.zeros(WIDTH // 2 + 1, dtype=torch.complex128))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x.flatten(1)[:, :WIDTH])
        if self.training:
            self.seen.mul_(0.9).add_(0.1 * waves.mean(0).detach())
        return self.head(torch.fft.irfft(waves * self.filter, n=WIDTH))  # type: ignore[no-any-return]


class Competing(nn.Module):
    """Two layers with a softmax between them, which takes all hidden units together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x.flatten(1)[:, :WIDTH]).softmax(1)))  # type: ignore[no-any-return]


class Branching(nn.Module):
    """Blocks with code of the root's own around them: a chain that nothing declares."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.place = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1)[:, :WIDTH]) + self.place
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)  # type: ignore[no-any-return]
