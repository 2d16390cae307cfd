"""Chains of models that declare none: found by a trace, tried bit for bit, refused by the module that breaks them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.parallel.pipeline import PipelineSettings
from echelon.parallel.pipeline.chain import units_of
from echelon.parallel.pipeline.find_chain import find_chain
from echelon.parallel.pipeline.plan import plan_stages
from echelon.parallel.pipeline.stage import make_stage
from echelon.parallel.pipeline.traced_chain import check_chain
from echelon.torch_compat import FakeTensorMode


class Net(nn.Module):
    """Two layers, blocks and a head, with code of its own between them; each kind below changes a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.place = nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(3)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(nn.functional.dropout(x, 0.5, self.training))

    def start(self, x: Tensor) -> Tensor:
        """Return what the blocks get."""
        return self.stem(x) + self.place


class Deciding(Net):
    def start(self, x: Tensor) -> Tensor:
        return self.stem(x) if x.sum() > 0 else -self.stem(x)


class Ungraded(Net):
    def start(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.stem(x)


class Drawing(Net):
    def start(self, x: Tensor) -> Tensor:
        return self.stem(x) * float(torch.rand(()))


class Constant(Net):
    def start(self, x: Tensor) -> Tensor:
        return self.stem(x) + torch.arange(8)


class Around(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = self.start(x)
        x = first
        for block in self.blocks:
            x = block(x) + first
        return self.head(x)


class TwoWays(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self.head(self.start(x))


class Several(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Remembering(nn.Module):
    """A block that uses what an earlier one saw."""

    def __init__(self, notes: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.norm, self.notes = nn.Linear(8, 8), nn.LayerNorm(8), notes

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(x.detach())
        return self.norm(self.layer(x)) + len(self.notes)


class Secret(Net):
    def __init__(self) -> None:
        super().__init__()
        notes: list[Tensor] = []
        self.blocks = nn.ModuleList(Remembering(notes) for _ in range(3))


class Caching(nn.Linear):
    """Remembers in evaluation what it makes of its weights, until it is trained."""

    cache: Tensor | None = None

    def train(self, mode: bool = True) -> Caching:
        self.cache = None if mode else self.cache
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        self.cache = self.weight * 1 if self.cache is None else self.cache
        return nn.functional.linear(x, self.cache, self.bias)


def caching() -> Net:
    """Return a model with blocks that remember."""
    model = Net()
    model.blocks = nn.ModuleList(nn.Sequential(Caching(8, 8), nn.Dropout(0.5)) for _ in range(3))
    return model


def timm_model(name: str) -> nn.Module:
    """Build a model of timm without weights."""
    import timm

    model: nn.Module = timm.create_model(name, num_classes=10)
    return model


FAMILIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "own code": (Net, (2, 6)),
    "what is remembered in evaluation": (caching, (2, 6)),
    "mobilenet": (lambda: timm_model("mobilenetv3_small_050"), (2, 3, 64, 64)),
    "regnet": (lambda: timm_model("regnetx_002"), (2, 3, 64, 64)),
    "tokens and relative positions": (lambda: timm_model("test_vit_relpos"), (2, 3, 160, 160)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_traced_chain_has_the_models_gradients_and_state(family: str) -> None:
    """Cut at every unit, in training: its outputs, gradients and statistics; the check leaves all as it was."""
    torch.manual_seed(1)
    build, shape = FAMILIES[family]
    model, images = build().double(), torch.randn(shape, dtype=torch.float64)
    model.get_submodule("head" if family != "mobilenet" else "classifier").eval()
    modes, state = [m.training for m in model.modules()], {k: v.clone() for k, v in model.state_dict().items()}
    units = units_of(find_chain(model, None))
    assert check_chain(model, units, images) == ""
    copy.deepcopy(model)  # as stages are
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    torch.manual_seed(2)
    expected = model(images)
    expected.square().sum().backward()
    gradients, after = [p.grad for p in model.parameters()], {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    model.zero_grad()
    torch.manual_seed(2)
    names: list[str] = []
    x = images
    for number, unit in enumerate(units):
        stage = make_stage(model, unit.steps, number == 0, number == len(units) - 1)
        names += stage.state_dict()
        x = stage(x)
    assert torch.allclose(x, expected, rtol=1e-12)
    x.square().sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None and gradient is not None
        assert torch.allclose(parameter.grad, gradient, rtol=1e-9, atol=1e-9)
    assert all(torch.allclose(after[name], tensor) for name, tensor in model.state_dict().items())
    assert sorted(names) == sorted(model.state_dict())


REFUSALS: dict[str, tuple[type[Net], str]] = {
    "decides by values": (
        Deciding,
        r"cannot be traced: it decides by values or shapes \(in start, test_tr",
    ),
    "no gradients": (Ungraded, "computes without gradients, or without autocast, outside its modules"),
    "random numbers": (Drawing, "draws random numbers outside its modules"),
    "a tensor of its own": (Constant, "makes a tensor of its own"),
    "the first output goes around": (Around, r"beside the output of blocks\.0.*, add of stem goes on to head"),
    "other modules in evaluation": (TwoWays, "other modules in training than in evaluation"),
    "two outputs": (Several, "gives several values"),
    "a layer that nothing calls": (Unused, "spare.weight belongs to no step"),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_what_is_no_chain_says_what_breaks_it(why: str) -> None:
    kind, words = REFUSALS[why]
    with pytest.raises(UserError, match=words) as refused:
        find_chain(kind(), None)
    assert "\n" not in str(refused.value) and "use fsdp=N instead" in str(refused.value)


def test_modules_that_work_together_unseen_are_refused_by_their_outputs() -> None:
    with pytest.raises(UserError, match=r"in evaluation, .* one after the other give other outputs"):
        plan_stages(Secret(), None, PipelineSettings("gpipe"), 2, torch.randn(2, 6))


def test_a_rehearsal_finds_the_same_chain() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, inputs = Net(), torch.randn(2, 6)
        units = units_of(find_chain(model, None))
        assert check_chain(model, units, inputs) == ""
    assert [unit.name for unit in units] == [unit.name for unit in units_of(find_chain(Net(), None))]
