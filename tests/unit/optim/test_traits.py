"""What is said of optimizers is true of timm's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from echelon.config.schema import OptimizerConfig
from echelon.optim.build import build_optimizer
from echelon.optim.traits import ELEMENTWISE, SPLIT_ON_SERVERS, Reach, is_split_on_servers, reach_of


def _train(name: str, pieces: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    """Take a step for each list of gradients, one gradient a piece."""
    parameters = nn.ParameterList([nn.Parameter(piece.clone()) for piece in pieces])
    optimizer = build_optimizer(parameters, OptimizerConfig(name=name, lr=0.01, weight_decay=0.01), 1)
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_an_elementwise_optimizer_gives_the_same_on_pieces_of_a_tensor(name: str) -> None:
    torch.manual_seed(0)
    weight, gradients = torch.randn(6, 8), [torch.randn(6, 8) for _ in range(4)]
    (together,) = _train(name, [weight], [[g] for g in gradients])
    rows = _train(name, [weight[:2], weight[2:]], [[g[:2], g[2:]] for g in gradients])
    assert torch.allclose(torch.cat(rows), together, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["radam", "adamax", "adadelta", "rmsproptf", "adabelief", "adan", "madgrad"])
def test_keys_are_cut_as_in_the_checkpoints_of_earlier_runs(name: str) -> None:
    """Servers cut tensors only for the optimizers that they always cut them for: a key's fingerprint must stay."""
    assert reach_of(name) is Reach.ELEMENT and not is_split_on_servers(name)
    assert SPLIT_ON_SERVERS <= ELEMENTWISE
