"""A small Vision Transformer: Dosovitskiy et al. 2021, arXiv:2010.11929, pre-norm, the mean of the patches classified.

No dropout and no BatchNorm: a sample's logits depend on nothing but itself, however the batch or the model is cut.
Shapes: N samples, T patches, D width, H heads, E = D / H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.core.hints import Hints
from echelon.models.base import ModelInput

TRANSFORMER_PLAN = {
    "blocks.*.attn": "heads",
    "blocks.*.attn.qkv": "column(parts=3)",
    "blocks.*.attn.proj": "row",
    "blocks.*.mlp.fc1": "column",
    "blocks.*.mlp.fc2": "row",
    "blocks.*.norm[12]": "sequence",
}
MOST_PATCHES_A_SIDE = 8


@dataclass(frozen=True)
class Size:
    """Sizes of a small transformer: `depth` blocks of width `width` with `heads` heads and MLPs of `hidden` units."""

    depth: int = 4
    width: int = 64
    heads: int = 4
    hidden: int = 128


def build(data: ModelInput) -> nn.Module:
    """Build 4 blocks of width 64 with 4 heads on at most 8x8 patches: 135 k parameters for 8x8 grey images."""
    return SmallViT(data, Size())


class Attention(nn.Module):
    """Multi-head self-attention: softmax(q k^T / sqrt(E)) v per head; `causal` lets a token see those before it."""

    def __init__(self, size: Size, causal: bool = False) -> None:
        super().__init__()
        self.num_heads = size.heads
        self.head_dim = size.width // size.heads
        self.causal = causal
        self.qkv = nn.Linear(size.width, 3 * size.heads * self.head_dim)
        self.proj = nn.Linear(size.heads * self.head_dim, size.width)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Map (N, T, D) to (N, T, D); `seen` (N, 1, 1, T) tells which tokens may be looked at, None: all."""
        samples, tokens, _ = x.shape
        qkv = self.qkv(x).view(samples, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with GELU between, on each token by itself."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size.width, size.hidden)
        self.fc2 = nn.Linear(size.hidden, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, D) to (N, T, D)."""
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, size: Size, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attn = Attention(size, causal)
        self.norm2 = nn.LayerNorm(size.width)
        self.mlp = FeedForward(size)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Map (N, T, D) to (N, T, D); `seen`: see `Attention`."""
        x = x + self.attn(self.norm1(x), seen)
        return x + self.mlp(self.norm2(x))


class SmallViT(nn.Module):
    """(N, channels, S, S) -> (N, classes)."""

    structure = Hints(
        blocks=("blocks.*",),
        chain=(":embed", "blocks.*", ":classify"),
        glue={":embed": ("patches", "positions"), ":classify": ("norm", "head")},
        tensor_plan=TRANSFORMER_PLAN,
    )

    def __init__(self, data: ModelInput, size: Size) -> None:
        super().__init__()
        side = patch_side(data.image_size)
        tokens = (data.image_size // side) ** 2
        self.patches = nn.Conv2d(data.channels, size.width, side, stride=side)
        self.positions = nn.Parameter(torch.empty(1, tokens, size.width))
        self.blocks = nn.Sequential(*[Block(size) for _ in range(size.depth)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, data.classes)
        nn.init.trunc_normal_(self.positions, std=0.02)
        initialise(self)

    def embed(self, images: Tensor) -> Tensor:
        """Map images to tokens (N, T, D)."""
        return self.patches(images).flatten(2).transpose(1, 2) + self.positions

    def classify(self, x: Tensor) -> Tensor:
        """Map tokens (N, T, D) to logits (N, classes)."""
        return self.head(self.norm(x).mean(dim=1))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, classes)."""
        return self.classify(self.blocks(self.embed(images)))


def initialise(model: nn.Module) -> None:
    """Draw linear weights and embeddings from a normal of deviation 0.02, cut at two; biases start at 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def patch_side(image_size: int) -> int:
    """Return the side of the smallest patches from 2 pixels that divide the image into at most 8x8.

    >>> [patch_side(size) for size in (8, 28, 32, 224)]
    [2, 4, 4, 28]
    """
    sides = range(2, image_size + 1)
    return next((s for s in sides if image_size % s == 0 and image_size // s <= MOST_PATCHES_A_SIDE), image_size)
