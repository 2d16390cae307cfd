"""A small causal language model in GPT-2's form: Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners", without dropout. It reads token ids, so that it is built from Python; `--model` builds classifiers of images.

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


@dataclass(frozen=True)
class TextSize:
    """Token ids below `vocabulary`, at most `context` of them; `tied`: the logits' weights are the embedding's."""

    vocabulary: int = 256
    context: int = 64
    tied: bool = True


def build(data: ModelInput) -> nn.Module:
    """Refuse images.

    Raises:
        UserError: always: there are no tokens in images.
    """
    raise UserError(
        f"--model small_gpt reads token ids, the data has {data.describe()}: "
        "choose a model of images, or build SmallGPT from Python"
    )


class SmallGPT(nn.Module):
    """Token ids (N, T) -> logits (N, T, V) of each next token."""

    structure = Hints(
        blocks=("blocks.*",),
        chain=(":embed", "blocks.*", ":predict"),
        glue={":embed": ("embedding", "positions"), ":predict": ("norm", "head")},
        tensor_plan={**TRANSFORMER_PLAN, "embedding": "vocabulary", "head": "vocabulary"},
    )

    def __init__(self, text: TextSize | None = None, size: Size | None = None) -> None:
        super().__init__()
        text, size = text or TextSize(), size or Size()
        self.embedding = nn.Embedding(text.vocabulary, size.width)
        self.positions = nn.Parameter(torch.empty(1, text.context, size.width))
        self.blocks = nn.Sequential(*[Block(size, causal=True) for _ in range(size.depth)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, text.vocabulary, bias=False)
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
