"""Computing in a narrower type than the parameters are kept in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from echelon.models.base import ModelInput
from echelon.models.builtin.resnet20 import build as build_resnet20
from echelon.models.builtin.small_vit import Size, SmallViT
from echelon.parallel.blocks import recompute_blocks
from echelon.parallel.precision import cast_blocks, cast_parameters, computing_in

IMAGES = ModelInput(10, 1, 8)


def vit() -> nn.Module:
    """Build the same small model each time."""
    torch.manual_seed(0)
    return SmallViT(IMAGES, Size(depth=2, width=16, heads=2, hidden=16))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of one batch."""
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    F.cross_entropy(model(x).float(), torch.arange(4)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_forward_is_narrow_and_gradients_reach_the_masters() -> None:
    """The same logits as a model cast by hand; parameters and gradients stay float32."""
    model, narrow = vit(), vit().bfloat16()
    cast_parameters(model, torch.bfloat16)
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(model(x), narrow(x.bfloat16()))
    found = gradients(model)
    assert len(found) == len(list(model.parameters()))
    assert all(g.dtype == torch.float32 for g in found)
    exact = gradients(vit())
    assert all(F.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.99 for a, b in zip(found, exact, strict=True))


def test_small_steps_are_not_lost() -> None:
    """What masters are for: a step that bfloat16 would round away adds up."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    cast_parameters(model, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(100):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert abs(float(model.weight.detach()) - 0.99) < 1e-3


def test_blocks_computed_again_give_the_same_gradients() -> None:
    """Recomputation happens when the whole model's copies are gone."""
    plain, again = vit(), vit()
    blocks = {f"blocks.{i}": again.get_submodule(f"blocks.{i}") for i in range(2)}
    cast_blocks(blocks, torch.bfloat16)
    recompute_blocks(blocks, "blocks")
    for model in (plain, again):
        cast_parameters(model, torch.bfloat16)
    pairs = zip(gradients(plain), gradients(again), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_batchnorm_stays_wide() -> None:
    """Its statistics are float32 and move."""
    model = build_resnet20(IMAGES)
    cast_parameters(model, torch.bfloat16)
    assert model(torch.randn(4, 1, 8, 8)).dtype == torch.bfloat16
    mean = model.get_buffer("bn.running_mean")
    assert mean.dtype == torch.float32 and mean.abs().max() > 0


def test_nothing_is_cast_without_a_type() -> None:
    """None leaves a module as it is."""
    model = nn.Linear(2, 2)
    with computing_in(model, None):
        assert model.weight.dtype == torch.float32
