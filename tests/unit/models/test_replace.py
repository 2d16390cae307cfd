"""Modules of a user's own in a model's places: which are meant, what is refused, and what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from echelon.core.errors import UserError
from echelon.models.tuning.plan import tuning_plan
from tests.ranks.layouts import MODELS, Trial, make_trainer

CODE = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return self.inner(x) * self.scale

def scaled(old):
    return Scaled(old)

def nothing(old):
    return None

def narrow(old):
    return nn.Linear(3, 3).double()

def breaks(old):
    raise ValueError("no such thing\\nhere")
"""


@pytest.fixture(autouse=True)
def _code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "replacing_parts.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def applied(tune: str) -> nn.Module:
    model = MODELS["vit"]()
    tuning_plan(tune, "eval").apply(model)
    return model


def test_what_is_meant_is_replaced_with_the_old_module_at_hand() -> None:
    model = applied('head+replace("blocks.*.mlp", replacing_parts:scaled)')
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    new = {name for name in trained if not name.startswith("head")}
    assert new and all(name.endswith("mlp.scale") for name in new)
    assert len(new) == 2


def test_a_replaced_model_trains_and_is_built_again_for_use() -> None:
    tune = 'replace("blocks.0.mlp", replacing_parts:scaled)'
    trainer = make_trainer(Trial("vit", settings={"model.tune": tune}), None)
    trainer.run(0, 2)
    again = MODELS["vit"]().double()
    tuning_plan(tune, "eval").rebuild(again)
    again.load_state_dict(trainer.parts.model.state_dict())
    assert float(again.state_dict()["blocks.0.mlp.scale"]) != 1.0


@pytest.mark.parametrize(
    ("tune", "words"),
    [
        ('replace("blocks.*.none", replacing_parts:scaled)', "matches no module; SmallViT has"),
        ('replace("blocks.0.mlp", replacing_parts:nothing)', "returned NoneType, not a torch.nn.Module"),
        ('replace("blocks.0.mlp", replacing_parts:breaks)', "raised ValueError: no such thing here"),
        ('replace("blocks.0.mlp", replacing_parts:missing)', "has no 'missing'"),
        ('replace("blocks.0.mlp", no_such_module_here:make)', "there is no module 'no_such_module_here'"),
        ('replace("blocks.0.mlp", word)', "module:function"),
        ('replace("blocks.0.mlp", replacing_parts:narrow)', "cannot be called with what takes its place"),
    ],
)
def test_what_cannot_take_a_place_is_refused_in_one_line(tune: str, words: str) -> None:
    with pytest.raises(UserError) as refusal:
        make_trainer(Trial("vit", settings={"model.tune": tune}), None)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
