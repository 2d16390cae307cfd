"""What is split how, and what is refused before anything starts; no processes."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.hints import Hints, Style, parse_tensor_plan
from echelon.models import ModelInput, hints_for
from echelon.parallel.tensor import TensorPlan, plan_tensor
from echelon.parallel.tensor.comm import chunk_of


def plan(model: nn.Module, tp: int = 2, overrides: dict[str, str] | None = None, sequence: bool = False) -> TensorPlan:
    return plan_tensor(model, tp, hints_for(model), parse_tensor_plan(overrides or {}), sequence)


def builtin(name: str) -> nn.Module:
    model = importlib.import_module(f"echelon.models.builtin.{name}").build(ModelInput(10, 1, 8))
    assert isinstance(model, nn.Module)
    return model


def refusal(model: nn.Module, tp: int = 2, overrides: dict[str, str] | None = None, sequence: bool = False) -> str:
    with pytest.raises(UserError) as refused:
        plan(model, tp, overrides, sequence)
    assert "\n" not in str(refused.value)
    return str(refused.value)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind()
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Attention, a pair with an activation between, one that looks like a pair and is none, and a loop on values."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(x)
        x = self.down(nn.functional.gelu(self.up(x)))
        return self.b(torch.softmax(self.a(x), -1))


def names(styles: TensorPlan) -> dict[str, str]:
    return {name: str(style) for name, style in styles.styles.items()}


def test_a_plan_is_found_where_dataflow_proves_it_and_in_attention() -> None:
    found = plan(Net())
    assert found.found
    assert names(found) == {
        "attn": "heads", "attn.qkv": "column(parts=3)", "attn.out": "row", "up": "column", "down": "row",
    }  # fmt: skip


def test_convolutions_without_batchnorm_are_paired_too() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3), nn.Flatten())
    assert names(plan(model)) == {"0": "channels_out", "3": "channels_in"}


def test_a_models_own_patterns_are_over_its_familys() -> None:
    assert str(plan(builtin("small_vit"), overrides={"blocks.0.mlp.*": "replicate"}).styles["blocks.0.mlp.fc1"]) == (
        "replicate"
    )


def test_a_model_on_meta_is_planned_as_any() -> None:
    with torch.device("meta"):
        assert "blocks.0.attn.qkv" in plan(builtin("small_vit")).styles


@pytest.mark.parametrize(
    ("model", "tp", "words"),
    [
        ("small_vit", 3, "tp=3 does not divide the 4 heads of blocks.0.attn"),
        ("small_vit", 8, "tp=8 does not divide the 4 heads of blocks.0.attn"),
        ("mlp", 300, "tp=300 does not divide the 256 outputs of 1"),
        ("resnet20", 3, "tp=3 does not divide the 16 output channels of blocks.0.conv1"),
        ("small_cnn", 16, "tp=16 does not divide the 8 groups of channels of features.1"),
    ],
)
def test_a_tp_that_does_not_divide_names_the_module(model: str, tp: int, words: str) -> None:
    assert words in refusal(builtin(model), tp)


def test_batchnorm_and_depthwise_convolutions_between_two_convolutions_are_split_by_channels() -> None:
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 3)),
        nn.BatchNorm2d(4),
    )
    own = {"0": "channels_out", "1": "channels", "3": "channels", "4": "channels_in"}
    assert names(plan(model)) == own == names(plan(model, overrides=own))


class Gated(nn.Module):
    """Attention with few key heads and norms over a head's width, and a gated MLP."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.head_dim = 4  # type: ignore[assignment]
        self.attn.q, self.attn.k, self.attn.v, self.attn.o = (nn.Linear(8, n) for n in (16, 8, 8, 8))
        self.attn.o = nn.Linear(16, 8)
        self.attn.norm = nn.LayerNorm(4)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        if bias:
            self.attn.q_bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def test_gated_layers_and_attention_with_few_key_heads_are_found() -> None:
    mlp = {"gate": "column", "up": "column", "down": "row"}
    attention = {"attn": "heads", **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "column"), "attn.o": "row"}
    assert names(plan(Gated())) == {**attention, "attn.norm": "shared", **mlp}
    assert names(plan(Gated(bias=True))) == mlp


def test_layers_of_attention_that_no_family_declares_take_its_inputs_themselves() -> None:
    model = Gated()
    assert plan(model).enters_by_layer("attn", model.attn)
    own = {"attn": "heads", "attn.q": "column", "attn.k": "column", "attn.o": "row", "attn.norm": "shared"}
    by_hand = plan(model, overrides={**own, "attn.v": "column"})
    assert by_hand.enters_by_layer("attn", model.attn) and not by_hand.enters_by_layer("attn.q", model.attn.q)
    # What a shared layer reads, nobody knows.
    assert not plan(model, overrides={**own, "attn.v": "shared"}).enters_by_layer("attn", model.attn)
    family = builtin("small_vit")
    assert not plan(family).enters_by_layer("blocks.0.attn", family.get_submodule("blocks.0.attn"))


class Fused(nn.Module):
    """A gated MLP whose gate and values are halves of one layer's output; they are multiplied, or added."""

    def __init__(self, product: bool = True) -> None:
        super().__init__()
        self.both, self.down, self.product = nn.Linear(8, 32), nn.Linear(16, 8), product

    def forward(self, x: Tensor) -> Tensor:
        gate, values = self.both(x).chunk(2, dim=-1)
        gate = torch.nn.functional.silu(gate)
        return self.down(gate * values if self.product else gate + values)  # type: ignore[no-any-return]


def test_a_gate_fused_with_its_values_is_split_in_both_halves() -> None:
    assert names(plan(Fused())) == {"both": "column(parts=2)", "down": "row"}
    assert "no attention, pair of layers" in refusal(Fused(product=False), 2)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"blocks.*.mlp.fc3": "row"}, "no module's name fits blocks.*.mlp.fc3"),
        ({"patches": "column"}, "column is a style of Linear layers; patches is a Conv2d"),
        ({"blocks.0.norm1": "channels"}, "channels is a style of BatchNorm"),
        ({"blocks.0.mlp": "heads"}, "heads is a style of attention modules"),
        ({"head": "channels_in"}, "channels_in is a style of convolutions"),
        ({"norm": "vocabulary"}, "vocabulary is a style of Embedding and Linear"),
        ({"blocks.0.attn.qkv": "column(parts=5)"}, "192 outputs, which are not 5 equal parts"),
        ({"**": "replicate"}, "nothing of SmallViT is split by this plan"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(overrides: dict[str, str], words: str) -> None:
    assert words in refusal(builtin("small_vit"), overrides=overrides)


def test_a_tied_parameter_split_in_two_ways_is_refused() -> None:
    from echelon.models.builtin.small_gpt import SmallGPT

    said = refusal(SmallGPT(), overrides={"head": "replicate"})
    assert "embedding.weight and head.weight are one tied parameter" in said


def test_dropout_on_hidden_units_that_do_not_divide_is_refused() -> None:
    def pair(hidden: int, dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 8))

    assert "does not divide the 7 outputs of 0, so that the ranks' random numbers would part at 2" in refusal(
        pair(7, 0.5)
    )
    assert names(plan(pair(8, 0.5))) == names(plan(pair(7, 0.0))) == {"0": "column", "3": "row"}


class Dropping(nn.Module):
    """One dropout for inputs or hidden units, in a forward pass that can be traced or not."""

    def __init__(self, place: str, traced: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.drop, self.place, self.traced = (
            nn.Linear(8, 7),
            nn.Linear(7, 8),
            nn.Dropout(),
            place,
            traced,
        )

    def forward(self, x: Tensor) -> Tensor:
        if not self.traced and x.sum() > 0:
            return x
        hidden = self.up(self.drop(x) if self.place == "before" else x).relu()
        return self.down(self.drop(hidden) if self.place == "between" else hidden)  # type: ignore[no-any-return]


def test_dropout_on_what_is_whole_may_stand_beside_hidden_units_that_do_not_divide() -> None:
    layers = nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 8)
    assert names(plan(nn.Sequential(nn.Dropout(), *layers))) == {"1": "column", "3": "row"}
    assert names(plan(nn.Sequential(*layers, nn.Dropout()))) == {"0": "column", "2": "row"}
    assert names(plan(Dropping("before"))) == {"up": "column", "down": "row"}
    assert "would part at drop" in refusal(Dropping("between"))
    by_hand = {"up": "column", "down": "row"}
    assert "would part at drop" in refusal(Dropping("before", traced=False), overrides=by_hand)


def test_nothing_to_split_says_what_to_write() -> None:
    assert "write --tensor-plan" in refusal(nn.Sequential(nn.Flatten(), nn.Linear(4, 4)))


@pytest.mark.parametrize("model", ["mlp", "resnet20"])
def test_tokens_are_split_in_transformers_alone(model: str) -> None:
    assert "leave sequence away" in refusal(builtin(model), sequence=True)


def test_a_layer_of_which_nobody_said_that_it_works_by_token_is_refused() -> None:
    model = builtin("small_vit")
    hints = hints_for(model)
    assert hints is not None
    less = {pattern: style for pattern, style in hints.tensor_plan.items() if style != "sequence"}
    with pytest.raises(UserError, match=r"blocks.0.norm1 \(LayerNorm\) would see a part of the tokens"):
        plan_tensor(model, 2, Hints(hints.blocks, None, {}, less), {"blocks.1.norm1": Style("sequence")}, True)


def test_a_layer_inside_split_attention_without_a_style_is_refused() -> None:
    model = Net()
    model.attn.scale = nn.LayerNorm(4)
    said = refusal(model, overrides={"attn": "heads", "attn.qkv": "column(parts=3)", "attn.out": "row"})
    assert "attn.scale (LayerNorm) is inside attention whose heads are split" in said


@pytest.mark.parametrize(("total", "parts"), [(8, 2), (7, 2), (5, 4), (1, 4), (0, 2)])
def test_a_dim_is_cut_as_torch_cuts_it(total: int, parts: int) -> None:
    sizes = [chunk_of(total, parts, index)[1] for index in range(parts)]
    theirs = [len(chunk) for chunk in torch.arange(total).chunk(parts)]
    assert [size for size in sizes if size] == [size for size in theirs if size] and sum(sizes) == total
