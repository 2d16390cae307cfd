"""Low-rank adapters: where they go, what they compute, and what their weights are without them."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("peft", reason="needs peft")

from echelon.core.adapters import DOWN, adapted_layer
from echelon.core.errors import UserError
from echelon.models.adapters import never_called
from echelon.models.base import ModelInput
from echelon.models.trial import call_blank
from echelon.models.tuning.plan import tuning_plan
from tests.ranks.layouts import MODELS


class Convolutions(nn.Module):
    """(N, 3, 8, 8) -> (N, 5), with a strided, a padded and a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.second = nn.Conv2d(8, 6, 1)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.depthwise(self.first(x)).relu()).mean((2, 3)))


def gpt2() -> nn.Module:
    """Return a GPT-2 of transformers, whose linear layers hold their weights transposed, square ones too."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    size = {"vocab_size": 16, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))


IMAGES, TOKENS = torch.randn(2, 1, 8, 8), torch.randint(0, 16, (2, 6))
CASES = {
    "vit": (MODELS["vit"], IMAGES, {"qkv", "proj"}),
    "mlp": (MODELS["mlp"], IMAGES, {"1", "3"}),
    "convolutions": (Convolutions, torch.randn(2, 3, 8, 8), {"first", "second"}),
    "gpt2": (gpt2, TOKENS, {"c_attn", "c_proj"}),
}


def outputs(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    result = model.eval()(inputs)
    return getattr(result, "logits", result)


@pytest.mark.parametrize("case", CASES)
def test_adapters_keep_names_add_nothing_at_first_and_are_added_into_weights(case: str) -> None:
    build, inputs, expected = CASES[case]
    model = build().double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    plain, names, before = copy.deepcopy(model), list(model.state_dict()), outputs(model, inputs)
    plan = tuning_plan("lora(r=2, alpha=6)", "eval")
    plan.apply(model)
    assert [name for name in model.state_dict() if not adapted_layer(name)] == names
    adapted = {name for name, module in model.named_modules() if hasattr(module, DOWN)}
    assert {name.rpartition(".")[2] for name in adapted} == expected
    assert torch.equal(outputs(model, inputs), before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if adapted_layer(name):
                parameter.normal_()
    after = outputs(copy.deepcopy(model), inputs)  # a copy has adapters of its own
    assert not torch.allclose(after, before)
    assert all(p.grad is None for p in plain.parameters())
    plain.load_state_dict(plan.plain(model.state_dict(), plain))
    assert torch.allclose(outputs(plain, inputs), after, rtol=1e-9, atol=1e-12)


def trained(tune: str, model: str = "vit") -> set[str]:
    built = MODELS[model]()
    tuning_plan(tune, "eval").apply(built)
    return {name for name, parameter in built.named_parameters() if parameter.requires_grad}


def test_adapters_and_the_head_are_trained_and_others_join() -> None:
    of_head = {"head.weight", "head.bias"}
    found = trained("lora(r=2)")
    assert of_head < found and all(adapted_layer(name) for name in found - of_head)
    assert trained("lora(r=2)+norm") - found == {n for n in trained("norm") if "norm" in n}
    assert trained('lora(r=2)+freeze("blocks.0")') == {name for name in found if not name.startswith("blocks.0")}
    assert {adapted_layer(name) for name in trained("lora(r=2, targets=qkv)") - of_head} == {
        "blocks.0.attn.qkv",
        "blocks.1.attn.qkv",
    }
    assert {adapted_layer(n) for n in trained('lora(r=2, targets="blocks.0.**.fc1+proj")') - of_head} == {
        "blocks.0.mlp.fc1",
        "blocks.0.attn.proj",
        "blocks.1.attn.proj",
    }


@pytest.mark.parametrize(
    ("tune", "reason"),
    [
        ("lora(targets=query)", "query matches no layer of SmallViT .* there are qkv, proj, fc1, fc2"),
        ("lora(r=64)", "has no linear layer or convolution but its head that is larger than r=64"),
        ("lora(r=0)", "r must be at least 1"),
        ("lora(alpha=0)", "alpha must be above 0"),
    ],
)
def test_what_cannot_be_adapted_is_refused_in_a_line(tune: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        trained(tune)


class Reads(nn.Module):
    """Attention that computes with the weight of its first layer, as that of Swin, BEiT and EVA does."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.attn, self.fc, self.head = nn.Module(), nn.Linear(64, 64), nn.Linear(64, 10)
        self.attn.qkv, self.calls = nn.Linear(64, 64), calls
        self.attn.forward = self._attend  # type: ignore[method-assign]

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.attn.qkv
        return qkv(x) if self.calls else nn.functional.linear(x, qkv.weight, qkv.bias)  # type: ignore[arg-type, operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(self.attn(x.flatten(1))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("calls", "layer"), [(True, "attn.qkv"), (False, "fc")])
def test_a_layer_whose_weight_alone_is_used_gets_no_adapter(calls: bool, layer: str) -> None:
    blank, model = partial(call_blank, data=ModelInput(10, 1, 8)), Reads(calls)
    tuning_plan("lora(r=2)", "eval").apply(model, call=blank)
    assert {adapted_layer(name) for name, _ in model.named_parameters()} == {"", layer}
    if not calls:
        with pytest.raises(UserError, match=r"attn.qkv of Reads is never called, only its weight is used"):
            tuning_plan("lora(r=2, targets=qkv)", "eval").apply(Reads(calls), call=blank)


@pytest.mark.parametrize(("model", "layers"), [
    (nn.Sequential(nn.Linear(64, 32), nn.Sequential(nn.ReLU(), nn.Linear(32, 32)), nn.Linear(32, 10)), {"0", "1.1"}),
    (nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Sequential(nn.Linear(32, 10))), {"0"}),
])  # fmt: skip
def test_a_layers_name_does_not_stand_for_the_endings_of_others(model: nn.Module, layers: set[str]) -> None:
    tuning_plan("lora(r=4)", "eval").apply(model)
    assert {adapted_layer(name) for name, _ in model.named_parameters()} - {""} == layers
    head = [name for name, p in model.named_parameters() if p.requires_grad and not adapted_layer(name)]
    assert len(head) == 2 and len(model(torch.randn(2, 64))) == 2


def test_a_tied_head_is_trained_where_it_is_named_alone() -> None:
    for tune, trained in (("lora(r=4)", False), ("lora(r=4)+head", True)):
        model = gpt2()
        tuning_plan(tune, "eval").apply(model)
        assert model.lm_head.weight.requires_grad is trained


class Gated(nn.Module):
    """Calls one of its layers for blank inputs, another for others, and uses the weight alone of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros, self.others, self.bare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer that is meant gives, and the bare weight's product."""
        layer = self.others if x.any() else self.zeros
        return layer(x) + torch.nn.functional.linear(x, self.bare.weight)


def test_a_layer_that_blank_inputs_do_not_reach_is_not_taken_for_one_that_is_never_called() -> None:
    names = ["zeros", "others", "bare"]
    for inputs in (torch.zeros(2, 4), torch.ones(2, 4)):
        assert never_called(Gated(), names, lambda model, x=inputs: model(x)) == {"bare"}
