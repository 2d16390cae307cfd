"""The recommendation model of numbers and ids."""

from __future__ import annotations

import pytest
import torch

from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.models import ModelInput, build_model
from echelon.models.builtin.dlrm import DLRM, WIDTH
from echelon.tasks.nest import TensorSpec

IDS = {"categories": TensorSpec((3,), "int64", 11)}


@pytest.mark.parametrize("specs", [IDS, {"numbers": TensorSpec((2,)), **IDS}])
def test_products_of_all_pairs_of_vectors_reach_the_top(specs: dict[str, TensorSpec]) -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(name="dlrm"), ModelInput(1, 1, 1, several=specs))
    assert isinstance(model, DLRM)
    ids, numbers = torch.randint(0, 11, (5, 3)), torch.randn(5, 2) if model.bottom is not None else None
    vectors = list(model.embedding(ids).unbind(1))
    if model.bottom is not None:
        vectors.insert(0, model.bottom(numbers))
    pairs = [(a * b).sum(1) for i, a in enumerate(vectors) for b in vectors[i + 1 :]]
    features = torch.cat([*vectors, torch.stack(pairs, dim=1)], dim=1)
    assert features.shape == (5, len(vectors) * WIDTH + len(pairs))
    torch.testing.assert_close(model(categories=ids, numbers=numbers), model.top(features))
    model(ids, numbers).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_ids_by_position_are_refused() -> None:
    ids = (TensorSpec((), "int64", 4), TensorSpec((), "int64", 4))
    with pytest.raises(UserError, match="--model dlrm is for rows with numbers and ids"):
        build_model(ModelConfig(name="dlrm"), ModelInput(1, 1, 1, several=ids))
