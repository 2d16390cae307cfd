"""A family's hints are true of its models: the chain is the forward pass, its steps hold every parameter."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.core.hints import STYLES, Hints, matching, parse_tensor_plan
from echelon.models import ModelInput, give_logits, hints_for


def builtin(name: str) -> nn.Module:
    model = importlib.import_module(f"echelon.models.builtin.{name}").build(ModelInput(5, 3, 16))
    assert isinstance(model, nn.Module)
    return model


def gpt() -> nn.Module:
    from echelon.models.builtin.small_gpt import SmallGPT, TextSize

    return SmallGPT(TextSize(vocabulary=13, context=8))


def timm_model(name: str, **options: Any) -> nn.Module:
    import timm

    model = timm.create_model(name, num_classes=5, **options)
    assert isinstance(model, nn.Module)
    return model


def torchvision_model(name: str) -> nn.Module:
    from torchvision import models

    model = models.get_model(name, num_classes=5)
    assert isinstance(model, nn.Module)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda n=name: builtin(n)) for name in ("mlp", "bench_cnn", "small_cnn", "resnet20", "small_vit")},  # type: ignore[misc]
    "small_gpt": gpt,
    "timm_vit": lambda: timm_model("vit_tiny_patch16_224", img_size=16, depth=2),
    "timm_vit_reg": lambda: timm_model("vit_tiny_patch16_224", img_size=16, depth=1, reg_tokens=2, global_pool="avg"),
    "timm_resnet": lambda: timm_model("resnet10t"),
    "timm_convnext": lambda: timm_model("convnext_atto", depths=(1, 1, 1, 1)),
    "torchvision_resnet": lambda: torchvision_model("resnet18"),
}


def hints_of(model: nn.Module) -> Hints:
    hints = hints_for(model)
    assert hints is not None
    return hints


def steps(model: nn.Module, hints: Hints) -> list[str]:
    assert hints.chain is not None
    names = [name for name, _ in model.named_modules()]
    glued = [[step] if step[0] in ":=" else matching([step], names) for step in hints.chain]
    assert all(glued), "each step is there"
    return [step for some in glued for step in some]


@pytest.mark.parametrize("name", MODELS)
def test_the_chain_is_the_forward_pass(name: str) -> None:
    model = MODELS[name]().eval()
    hints = hints_of(model)
    example = torch.randint(0, 13, (2, 8)) if name == "small_gpt" else torch.randn(2, 3, *_side(name))
    x = example
    with torch.no_grad():
        for step in steps(model, hints):
            x = _apply(model, step, x)
        torch.testing.assert_close(x, model(example), rtol=0, atol=0)


def _side(name: str) -> tuple[int, int]:
    return (32, 32) if "resnet" in name or "convnext" in name else (16, 16)


def _apply(model: nn.Module, step: str, x: Tensor) -> Tensor:
    if step.startswith(":"):
        return getattr(model, step[1:])(x)  # type: ignore[no-any-return]
    if step.startswith("="):
        return {"=flatten": lambda y: y.flatten(1), "=relu": torch.relu}[step](x)
    return model.get_submodule(step)(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_belongs_to_one_step(name: str) -> None:
    model = MODELS[name]()
    hints = hints_of(model)
    held: list[str] = []
    for step in steps(model, hints):
        held += hints.glue[step] if step.startswith(":") else [step]
    parameters = [each for each, _ in model.named_parameters(remove_duplicate=False)]
    for parameter in parameters:
        owners = [each for each in held if parameter == each or parameter.startswith(f"{each}.")]
        assert len(owners) == 1, (parameter, owners)


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_names_modules_that_are_there(name: str) -> None:
    model = MODELS[name]()
    hints = hints_of(model)
    names = [each for each, _ in model.named_modules()]
    plan = parse_tensor_plan(hints.tensor_plan)
    assert {style.name for style in plan.values()} <= set(STYLES)
    assert any(style.name in ("row", "channels_in") and matching([each], names) for each, style in plan.items())
    assert all(matching([block], names) for block in hints.blocks)


def test_other_models_have_no_hints() -> None:
    assert hints_for(nn.Sequential(nn.Linear(2, 2))) is None


class Declared(nn.Sequential):
    """Someone's own model that tells its structure."""

    structure = Hints(chain=("*",))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        return super().forward(x)


class Doubled(Declared):
    """Another forward, which that structure does not tell of."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers, and double."""
        return 2 * super().forward(x)


def test_a_class_tells_its_own_structure_until_forward_is_another() -> None:
    """What a subclass computes beside the declared chain would be lost in a pipeline."""
    found, changed = hints_for(Declared()), hints_for(Doubled())
    assert found is not None and found.chain == ("*",)
    assert changed is not None and changed.chain is None


class Record(nn.Module):
    """Gives a record with logits, and keys and values unless it is told not to."""

    def forward(self, x: Tensor, use_cache: bool = True) -> SimpleNamespace:
        """Return the input as logits."""
        return SimpleNamespace(logits=x, cache=x if use_cache else None)


def test_a_model_that_gives_a_record_gives_its_logits() -> None:
    """And is not asked for a cache; one that gives a tensor stays as it is."""
    cached: list[object] = []
    model = Record()
    model.register_forward_hook(lambda _, __, found: cached.append(found.cache))
    give_logits(model)
    x = torch.ones(2)
    assert model(x) is x and cached == [None]
    plain = nn.Identity()
    give_logits(plain)
    assert plain(x) is x
