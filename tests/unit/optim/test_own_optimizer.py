"""An optimizer of the user's own: what it is, is found by steps; what a run cannot do with it is refused in a line."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from echelon.config import build
from echelon.config.schema import OptimizerConfig
from echelon.core.errors import UserError
from echelon.optim.build import build_optimizer, build_schedule
from echelon.optim.choice import OptimizerChoice
from echelon.optim.own import OptimizerFactory, described, has_sgd_momentum, import_optimizer, is_own, read_optimizer
from echelon.optim.probe import OwnTraits, probe
from echelon.optim.traits import ELEMENTWISE, Reach
from echelon.run.resolve import resolve
from echelon.trainer.compatibility import check_strategies, interplay_notes
from tests.unit.optim import own_optimizers as own

MODULE = "tests.unit.optim.own_optimizers"


@pytest.mark.parametrize(
    ("kind", "traits"),
    [
        (own.Plain, OwnTraits(Reach.ELEMENT)),
        (own.Normed, OwnTraits(Reach.TENSOR)),
        (own.Clipped, OwnTraits(Reach.MODEL)),
        (own.Declared, OwnTraits(Reach.ELEMENT)),
        (own.Langevin, OwnTraits(Reach.MODEL, draws=True)),
        (own.InGroup, OwnTraits(Reach.ELEMENT, in_state=False)),
        (own.Eager, OwnTraits(Reach.ELEMENT, eager=True)),
        (own.Heavy, OwnTraits(Reach.ELEMENT, momentum=0.8)),
        (functools.partial(own.Heavy, momentum=0.0), OwnTraits(Reach.ELEMENT)),
        (torch.optim.Adafactor, OwnTraits(Reach.TENSOR)),
        (
            functools.partial(torch.optim.RMSprop, momentum=0.8),
            OwnTraits(Reach.ELEMENT, momentum=0.8, is_sgd=False),
        ),
    ],
)
def test_what_an_optimizer_is_is_found_by_steps(kind: Callable[..., torch.optim.Optimizer], traits: OwnTraits) -> None:
    state = torch.get_rng_state()
    assert probe(kind, "mine:Own") == traits == probe(kind, "mine:Own")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["adamw", "lion", "rmsproptf", "adan", "laprop"])
def test_steps_find_out_of_timms_what_the_list_says(name: str) -> None:
    from timm.optim import get_optimizer_class

    assert name in ELEMENTWISE and probe(get_optimizer_class(name, bind_defaults=True), name).reach is Reach.ELEMENT


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (own.Forgetful, "a resumed run would go on otherwise: .*self.state"),
        (own.Rebinding, "change them in place"),
        (own.Listing, "its state 'norms' is a list"),
        (own.Closed, "without a closure, failed .*TypeError"),
        (own.WithoutRate, "it takes no lr"),
        (torch.optim.LBFGS, "without a closure, failed"),
        (lambda params, lr: nn.Linear(1, 1), "built a Linear"),
        (functools.partial(own.Plain, rho=1.0), "does not take these settings: .*rho"),
    ],
)
def test_what_no_run_can_be_trained_with_is_refused(kind: Callable[..., torch.optim.Optimizer], words: str) -> None:
    with pytest.raises(UserError, match=words) as refusal:
        probe(kind, "mine:Own")
    assert "\n" not in str(refusal.value) and str(refusal.value).startswith("--optimizer mine:Own")


def named(text: str) -> OptimizerFactory:
    call = read_optimizer(text)
    assert call is not None
    return import_optimizer(call, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{MODULE}:Plane", "did you mean Plain"),
        (f"{MODULE}:Plain(0.5)", "its arguments are named"),
        (f"{MODULE}:Plain(lr=0.5)", "lr is the run's setting --lr"),
        (f"{MODULE}:Plain(weight_decay=0.5)", "the run's setting --weight-decay"),
        ("torch.nn:Linear", "Linear is no subclass of torch.optim.Optimizer"),
        (f"{MODULE}:Plain+{MODULE}:Normed", "name one optimizer"),
        ("object:Plain", "an object given from Python"),
    ],
)
def test_a_name_that_leads_to_none_is_refused(text: str, words: str) -> None:
    assert is_own(text)
    with pytest.raises(UserError, match=words):
        named(text)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (own.Plain, f"{MODULE}:Plain"),
        (functools.partial(own.Plain, beta=0.5), f"{MODULE}:Plain(beta=0.5)"),
        (functools.partial(torch.optim.AdamW, betas=(0.8, 0.9)), "torch.optim.adamw:AdamW(betas=0.8+0.9)"),
        (functools.partial(own.Plain, beta=torch.ones(1)), "object:Plain"),
        (lambda params, lr: own.Plain(params, lr), "object:function"),
    ],
)
def test_an_object_from_python_has_the_name_that_leads_to_it(
    given: Callable[..., torch.optim.Optimizer], name: str
) -> None:
    assert described(given) == name
    if not name.startswith("object:"):
        parameters = [nn.Parameter(torch.ones(2))]
        built, again = given(parameters, lr=1.0), named(name)(parameters, lr=1.0)
        assert (type(built), built.defaults) == (type(again), again.defaults)
    assert OptimizerChoice(name, given).factory is given
    with pytest.raises(UserError, match="the run's optimizer is 'mine:Other'"):
        _ = OptimizerChoice("mine:Other", given).factory


def test_its_groups_and_its_rate_are_those_of_the_run() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    config = OptimizerConfig(name="mine:Plain", lr=0.1, weight_decay=0.02, scale_lr=100)
    optimizer = build_optimizer(model, config, 300, own.Plain)
    decays = {group["weight_decay"]: [p.ndim for p in group["params"]] for group in optimizer.param_groups}
    assert decays == {0.0: [1, 1, 1], 0.02: [2]}
    assert build_schedule(optimizer, config, 10, 2).lr == pytest.approx(0.3)
    (group,) = build_optimizer(model, config, 300, own.Heavy).param_groups
    assert (group["weight_decay"], group["initial_lr"], len(group["params"])) == (0, pytest.approx(0.3), 4)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("Normed", {"strategy.parallel": "fsdp=2"}, "it needs whole tensors .*elementwise = True"),
        ("Clipped", {"strategy.parallel": "pp=2"}, "norm over all of the model"),
        ("Clipped", {"strategy.parallel": "dp=2,zero1"}, "norm over all of the model"),
        ("Eager", {"strategy.parallel": "dp=2,zero1"}, "make it in step"),
        ("Clipped", {"strategy.sync": "ps"}, "depends on other tensors"),
        ("InGroup", {"strategy.sync": "ps(mode=async)"}, "servers save self.state"),
        ("Langevin", {}, "replicas would part"),
        ("Heavy", {"strategy.compression": "topk(0.01)"}, "its momentum 0.8 would act after decoding"),
        ("Plain", {"strategy.sync": "ps(momentum_correction=true)"}, "no momentum on the servers"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(name: str, settings: dict[str, Any], words: str) -> None:
    run = resolve(build(None, {"optimizer.name": f"{MODULE}:{name}", **settings}).config)
    with pytest.raises(UserError, match=words) as refusal:
        check_strategies(run, 2)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Plain", {"strategy.parallel": "fsdp=2"}),
        ("Declared", {"strategy.parallel": "fsdp=2"}),
        ("Normed", {"strategy.parallel": "dp=2,zero1"}),
        ("Normed", {"strategy.sync": "ps(mode=async)"}),
        ("Clipped", {}),
        ("Langevin", {"strategy.sync": "local(8)"}),
        ("Heavy(momentum=0.0)", {"strategy.compression": "topk(0.01, momentum=0.9)"}),
        ("Heavy", {"strategy.sync": "ps(mode=async, momentum_correction=true)"}),
    ],
)
def test_what_goes_together_is_not_refused(name: str, settings: dict[str, Any]) -> None:
    run = resolve(build(None, {"optimizer.name": f"{MODULE}:{name}", **settings}).config)
    check_strategies(run, 2)
    notes = [note for note in interplay_notes(run, 1) if re.search("weight-decay 0.0005 is not used", note)]
    assert len(notes) == name.startswith("Heavy")
    assert run.optimizer.is_split_on_servers == (run.optimizer.reach is Reach.ELEMENT)


@pytest.mark.parametrize(
    ("name", "is_sgd"), [("sgd", True), ("sgdw", True), ("sgdp", True), ("lookahead_sgd", True), ("rmsproptf", False)]
)
def test_momentum_of_timms_variants_of_sgd_is_sgds(name: str, is_sgd: bool) -> None:
    from timm.optim import create_optimizer_v2

    optimizer = create_optimizer_v2([torch.nn.Parameter(torch.zeros(2))], opt=name, lr=0.1, momentum=0.9)
    assert has_sgd_momentum(optimizer) == is_sgd
