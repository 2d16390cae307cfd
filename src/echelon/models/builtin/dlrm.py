"""A small deep learning recommendation model: numbers and ids of a row, products of all pairs of them, and an MLP.

Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
arXiv:1906.00091: each id has a vector, the numbers become one of the same width, and the products of all pairs of
vectors go, beside the numbers' own, through the layers above.

Shapes: N samples, K numbers, M columns of ids, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.hints import Hints
from echelon.models.base import ModelInput
from echelon.tasks.nest import TensorSpec

WIDTH = 16
_BOTTOM, _TOP = 64, (128, 64)  # hidden units


def build(data: ModelInput) -> nn.Module:
    """Build vectors of 16, numbers -> 64 -> 16, and products -> 128 -> 64 -> outputs with ReLU between.

    Raises:
        UserError: inputs are no rows with columns of ids or strings.
    """
    specs = data.several
    if not isinstance(specs, dict) or "categories" not in specs or set(specs) - {"numbers", "categories"}:
        raise UserError(
            f"--model dlrm is for rows with numbers and ids, or strings, not for {data.describe()}: "
            "of a recommendation, columns of floats are numbers"
        )
    ids, numbers = specs["categories"], specs.get("numbers", TensorSpec((0,)))
    return DLRM(numbers.shape[0], ids.shape[0], ids.count, data.classes)


class DLRM(nn.Module):
    """Numbers (N, K), which may be missing, and categories (N, M), ids of one common count -> (N, outputs)."""

    structure = Hints(
        tensor_plan={
            "embedding": "vocabulary",
            "bottom.0": "column",
            "bottom.2": "row",
            "top.0": "column",
            "top.2": "row",
        }
    )

    def __init__(self, numbers: int, categories: int, count: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(count, WIDTH)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.bottom = (
            nn.Sequential(nn.Linear(numbers, _BOTTOM), nn.ReLU(), nn.Linear(_BOTTOM, WIDTH)) if numbers else None
        )
        vectors = categories + (numbers > 0)
        products = vectors * (vectors - 1) // 2
        self.top = nn.Sequential(
            nn.Linear(products + vectors * WIDTH, _TOP[0]), nn.ReLU(),
            nn.Linear(_TOP[0], _TOP[1]), nn.ReLU(),
            nn.Linear(_TOP[1], outputs),
        )  # fmt: skip

    def forward(self, categories: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Return outputs (N, outputs)."""
        vectors = self.embedding(categories)
        if self.bottom is not None and numbers is not None:
            vectors = torch.cat([self.bottom(numbers)[:, None], vectors], dim=1)
        count = vectors.shape[1]
        first, second = torch.triu_indices(count, count, 1, device=vectors.device)
        products = (vectors @ vectors.transpose(1, 2))[:, first, second]
        outputs: Tensor = self.top(torch.cat([vectors.flatten(1), products], dim=1))
        return outputs
