"""Two towers: the embedding of the first id (the user), and those of the others, each through a layer; their product.

(Yi et al., "Sampling-bias-corrected neural modeling for large corpus item recommendations", 2019.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.models.base import ModelInput
from echelon.tasks import nest

WIDTH = 32


def build(data: ModelInput) -> nn.Module:
    """Build it for two or more columns of ids.

    Raises:
        UserError: inputs are something else.
    """
    specs = nest.leaves(data.several) if data.several is not None else []
    if len(specs) < 2 or not all(spec.count and len(spec.shape) < 2 for spec in specs) or data.classes != 1:
        raise UserError(f"--model two_tower is for two or more ids and one output, not for {data.describe()}")
    return TwoTower([spec.count for spec in specs])


class TwoTower(nn.Module):
    """Ids (N,) each, the first of the user -> (N, 1): the product of the towers, a bias of each id beside it."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(count, WIDTH) for count in counts)
        self.biases = nn.ModuleList(nn.Embedding(count, 1) for count in counts)
        self.user_tower = nn.Linear(WIDTH, WIDTH)
        self.item_tower = nn.Linear(WIDTH * (len(counts) - 1), WIDTH)
        for embedding in self.embeddings.parameters():
            nn.init.normal_(embedding, std=WIDTH**-0.5)
        for bias in self.biases.parameters():
            nn.init.zeros_(bias)

    def forward(self, users: Tensor, *items: Tensor) -> Tensor:
        """Return (N, 1)."""
        first, *others = self.embeddings
        user = self.user_tower(first(users))
        item = self.item_tower(torch.cat([each(ids) for each, ids in zip(others, items, strict=True)], dim=-1))
        biases = torch.stack([each(ids) for each, ids in zip(self.biases, (users, *items), strict=True)]).sum(0)
        return (user * item).sum(-1, keepdim=True) / WIDTH**0.5 + biases
