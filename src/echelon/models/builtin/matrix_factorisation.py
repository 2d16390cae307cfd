"""Matrix factorisation: a bias of each user and each item, and the product of their factors.

    output(u, i) = b_u + b_i + SCALE p_u . q_i

(Koren, Bell and Volinsky, "Matrix factorization techniques for recommender systems", 2009), of targets whose mean is
taken out. Weight decay is the prior of all of them, and of the product twice over: a small SCALE makes it stronger for
factors than for biases, which have more samples each to learn from, so that one setting suits both.
"""

from __future__ import annotations

from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.models.base import ModelInput
from echelon.tasks import nest

FACTORS = 64
SCALE = 0.45
START = 0.2


def build(data: ModelInput) -> nn.Module:
    """Build it for two columns of ids.

    Raises:
        UserError: inputs are something else.
    """
    specs = nest.leaves(data.several) if data.several is not None else []
    if len(specs) != 2 or not all(spec.count and len(spec.shape) < 2 for spec in specs) or data.classes != 1:
        raise UserError(f"--model matrix_factorisation is for two ids and one output, not for {data.describe()}")
    return MatrixFactorisation(specs[0].count, specs[1].count)


class MatrixFactorisation(nn.Module):
    """Ids of users (N,) and items (N,) -> (N, 1). The id 0, of those that were never seen, learns nothing."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.user_bias, self.item_bias = (nn.Embedding(count, 1) for count in (users, items))
        self.user_factors, self.item_factors = (nn.Embedding(count, FACTORS) for count in (users, items))
        for bias in (self.user_bias, self.item_bias):
            nn.init.zeros_(bias.weight)
        for factors in (self.user_factors, self.item_factors):
            nn.init.normal_(factors.weight, std=START)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return (N, 1)."""
        product = (self.user_factors(users) * self.item_factors(items)).sum(-1, keepdim=True)
        outputs: Tensor = self.user_bias(users) + self.item_bias(items) + SCALE * product
        return outputs
