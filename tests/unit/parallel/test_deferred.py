"""A model built without memory gets the values, bit for bit, that it would have had, and little memory on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn

from echelon.models import ModelInput
from echelon.models.builtin import mlp, resnet20, small_cnn, small_vit
from echelon.models.builtin.small_gpt import SmallGPT
from echelon.parallel.deferred_init import named_tensors, replay, without_memory

INPUT = ModelInput(10, 3, 32)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp.build(INPUT),
    "small_cnn": lambda: small_cnn.build(INPUT),
    "resnet20": lambda: resnet20.build(INPUT),
    "small_vit": lambda: small_vit.build(INPUT),
    "small_gpt": SmallGPT,
    "timm_vit": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, drop_path_rate=0.1),
    "timm_resnet": lambda: timm.create_model("resnet10t", num_classes=10),
    "timm_convnext": lambda: timm.create_model("convnext_atto", num_classes=10, drop_path_rate=0.1),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_and_generators_are_those_of_a_model_that_was_built_at_once(name: str) -> None:
    torch.manual_seed(3)
    expected = named_tensors(MODELS[name]())
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with without_memory() as recording:
        model = MODELS[name]()
    wanted = named_tensors(model)
    meta = {n: t for n, t in wanted.items() if t.is_meta}
    assert meta, "nothing was deferred"
    found: dict[str, Tensor] = {n: t for n, t in wanted.items() if not t.is_meta}
    replay(recording, meta, lambda n, tensor: found.update({n: tensor.clone()}))
    assert found.keys() == expected.keys()
    for n, tensor in expected.items():
        assert torch.equal(found[n], tensor), n
    assert torch.equal(torch.get_rng_state(), state)
