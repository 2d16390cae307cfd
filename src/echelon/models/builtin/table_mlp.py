"""Rows of a table: numbers and embedded categories, and two hidden layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.hints import Hints
from echelon.models.base import ModelInput
from echelon.tasks import nest

HIDDEN = 128
EMBEDDING = 16


def build(data: ModelInput) -> nn.Module:
    """Build [numbers, embeddings] -> 128 -> 128 -> outputs with ReLU between.

    Raises:
        UserError: inputs are no rows of a table.
    """
    specs = data.several if data.several is not None else {"numbers": nest.TensorSpec(data.shape or (), data.dtype)}
    if not isinstance(specs, dict) or set(specs) - {"numbers", "categories"} or data.shape == ():
        raise UserError(f"--model table_mlp is for rows of a table, not for {data.describe()}")
    numbers = specs["numbers"].shape[0] if "numbers" in specs and len(specs["numbers"].shape) == 1 else 0
    categories = specs.get("categories", nest.TensorSpec((0,)))
    if not numbers and not categories.count:
        raise UserError(f"--model table_mlp is for rows of a table, not for {data.describe()}")
    return TableMLP(numbers, categories.shape[0], categories.count, data.classes)


class TableMLP(nn.Module):
    """Numbers (N, K) and categories (N, M), ids of one common count, either of which may be missing -> (N, outputs)."""

    structure = Hints(tensor_plan={"layers.0": "column", "layers.2": "row"})

    def __init__(self, numbers: int, categories: int, count: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(count, EMBEDDING) if categories else None
        if self.embedding is not None:
            nn.init.normal_(self.embedding.weight, std=EMBEDDING**-0.5)
        self.layers = nn.Sequential(
            nn.Linear(numbers + categories * EMBEDDING, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, outputs),
        )

    def forward(self, numbers: Tensor | None = None, categories: Tensor | None = None) -> Tensor:
        """Return outputs (N, outputs)."""
        columns = [] if numbers is None else [numbers]
        if self.embedding is not None and categories is not None:
            columns.append(self.embedding(categories).flatten(1))
        outputs: Tensor = self.layers(torch.cat(columns, dim=1))
        return outputs
