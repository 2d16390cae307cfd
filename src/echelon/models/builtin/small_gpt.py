"""A small causal language model in GPT-2's form (Radford et al. 2019), without dropout.

The paper: "Language Models are Unsupervised Multitask Learners". It reads token ids: of `--task language-modelling`.

Shapes: N samples, T tokens, D width, V size of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.hints import Hints
from echelon.models.base import ModelInput
from echelon.models.builtin.small_vit import TRANSFORMER_PLAN, Block, Size, initialise
from echelon.tasks.nest import TensorSpec


@dataclass(frozen=True)
class TextSize:
    """Token ids below `vocabulary`, at most `context` of them, and logits of `outputs` of them, all where it is 0.

    `tied`: the logits' weights are the embedding's; `causal`: a token sees those before it, and no others.
    """

    vocabulary: int = 256
    context: int = 64
    tied: bool = True
    causal: bool = True
    outputs: int = 0


SIZE = Size(depth=4, width=128, heads=4, hidden=512)


def build(data: ModelInput) -> nn.Module:
    """Build 4 blocks of width 128 with 4 heads, untied: 0.8 M parameters for 66 characters and windows of 128.

    Raises:
        UserError: inputs are no token ids.
    """
    spec = data.several
    if not isinstance(spec, TensorSpec) or not spec.count or len(spec.shape) != 1:
        raise UserError(
            f"--model small_gpt reads token ids, the data has {data.describe()}: "
            "choose a model of images, or build SmallGPT from Python"
        )
    return SmallGPT(TextSize(spec.count, spec.shape[0], tied=False), SIZE)


class SmallGPT(nn.Module):
    """Token ids (N, T) -> logits (N, T, V) of each next token."""

    structure = Hints(
        blocks=("blocks.*",),
        chain=(":embed", "blocks.*", ":predict"),
        glue={":embed": ("embedding", "positions"), ":predict": ("norm", "head")},
        tensor_plan={**TRANSFORMER_PLAN, "embedding": "vocabulary", "head": "vocabulary"},
        positions=("positions",),
    )

    def __init__(self, text: TextSize | None = None, size: Size | None = None) -> None:
        super().__init__()
        text, size = text or TextSize(), size or Size()
        self.embedding = nn.Embedding(text.vocabulary, size.width)
        self.positions = nn.Parameter(torch.empty(1, text.context, size.width))
        self.blocks = nn.Sequential(*[Block(size, causal=text.causal) for _ in range(size.depth)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, text.outputs or text.vocabulary, bias=False)
        nn.init.trunc_normal_(self.positions, std=0.02)
        initialise(self)
        if text.tied:
            self.head.weight = self.embedding.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Map ids (N, T) to (N, T, D)."""
        return self.embedding(tokens) + self.positions[:, : tokens.shape[1]]

    def predict(self, x: Tensor) -> Tensor:
        """Map (N, T, D) to logits (N, T, V)."""
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (N, T, V)."""
        return self.predict(self.blocks(self.embed(tokens)))
