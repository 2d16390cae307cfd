"""A small classifier of texts: the sum of embeddings of tokens and of pairs of neighbours, and a linear layer.

Joulin et al. 2017, "Bag of Tricks for Efficient Text Classification", arXiv:1607.01759, with pairs hashed to a table as
there. Few parameters are touched by a text, and a batch takes milliseconds on one core.

Shapes: N samples, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.hints import Hints
from echelon.models.base import ModelInput
from echelon.tasks.nest import TensorSpec

_FIRST, _SECOND = 31_337, 7_919  # primes by which a pair of tokens is hashed


@dataclass(frozen=True)
class BagSize:
    """Tokens below `vocabulary`, `buckets` that pairs of tokens are hashed to, embeddings of `width`."""

    vocabulary: int
    buckets: int = 20_000
    width: int = 128


def build(data: ModelInput) -> nn.Module:
    """Build embeddings of width 128, of tokens and of 20 000 pairs.

    Raises:
        UserError: inputs are no `input_ids` with an `attention_mask`.
    """
    spec = data.several.get("input_ids") if isinstance(data.several, dict) else None
    if not isinstance(spec, TensorSpec) or not spec.count or set(data.several) != {"input_ids", "attention_mask"}:
        raise UserError(
            f"--model text_classifier reads input_ids and an attention_mask, the data has {data.describe()}: "
            "choose another model"
        )
    return TextClassifier(BagSize(spec.count), data.classes)


class TextClassifier(nn.Module):
    """Token ids (N, T) and a mask (N, T) of those that are there -> logits (N, classes).

    A text's embeddings are added and divided by the root of how many tokens it has: what is padding counts nothing.
    """

    structure = Hints(
        blocks=("tokens", "pairs", "head"),
        tensor_plan={"tokens": "vocabulary", "pairs": "vocabulary", "head": "vocabulary"},
    )

    def __init__(self, size: BagSize, classes: int) -> None:
        super().__init__()
        self.buckets = size.buckets
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.pairs = nn.Embedding(size.buckets, size.width)
        self.head = nn.Linear(size.width, classes)
        for table in (self.tokens, self.pairs):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits (N, classes)."""
        there = attention_mask.to(self.head.weight.dtype)[..., None]
        pair = (input_ids[:, :-1] * _FIRST + input_ids[:, 1:] * _SECOND) % self.buckets
        total = (self.tokens(input_ids) * there).sum(1) + (self.pairs(pair) * there[:, 1:]).sum(1)
        return self.head(total / there.sum(1).clamp(min=1).sqrt())
