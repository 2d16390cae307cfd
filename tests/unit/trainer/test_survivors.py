"""Whose survivors go on when a worker is killed, where nobody says: plain replicas, at no cost without a death."""

from __future__ import annotations

import re

import pytest

from echelon.config import build
from echelon.core.errors import UserError
from echelon.run.resolve import resolve
from echelon.trainer.compatibility import check_strategies, survivors_go_on, survivors_save


@pytest.mark.parametrize(
    ("settings", "go_on"),
    [
        ({}, True),
        ({"strategy.sync": "local(8)"}, True),
        ({"strategy.sync": "diloco(20)"}, True),
        ({"strategy.sync": "easgd(10)"}, True),
        ({"strategy.sync": "local(8, overlap=2)"}, True),
        ({"strategy.sync": "local(8, overlap=2, optimizer_state=average)"}, False),
        ({"strategy.sync": "local(8, start=100)"}, True),
        ({"strategy.sync": "diloco(20, overlap=2)"}, False),
        ({"strategy.sync": "diloco(20, overlap=2, alpha=0)"}, True),
        ({"strategy.sync": "ps"}, False),
        ({"strategy.compression": "int8"}, True),
        ({"strategy.compression": "powersgd(4)"}, True),
        ({"strategy.compression": "powersgd(4)", "strategy.sync": "local(8)"}, True),
        ({"strategy.compression": "adaptive"}, True),
        ({"strategy.collective": "ring"}, True),
        ({"strategy.collective": "auto"}, True),
        ({"strategy.collective": "hierarchical(group=2)"}, True),
        ({"strategy.collective": "hierarchical(group=2)", "strategy.compression": "int8"}, False),
        ({"strategy.parallel": "fsdp=-1"}, False),
        ({"strategy.parallel": "zero1"}, False),
        ({"launch.balance": "auto"}, True),
        ({"launch.elastic": "off"}, False),
        ({"launch.nodes": "2", "launch.rendezvous": "a:1"}, True),
        ({"training.on_oom": "halve"}, False),
        ({"model.tune": "head"}, True),
        ({"model.tune": "head+unfreeze(epoch=3)"}, False),
        ({"model.compile": True}, False),
        ({"model.sync_batchnorm": True}, True),
        ({"launch.elastic": "on", "strategy.compression": "int8"}, True),
        ({"launch.elastic": "on", "strategy.compression": "int8", "strategy.sync": "local(8)"}, True),
    ],
)
def test_survivors_go_on_where_they_can(settings: dict[str, object], go_on: bool) -> None:
    run = resolve(build(None, {"data.source": "digits", **settings}).config)
    assert survivors_go_on(run, 4) is go_on
    assert not survivors_go_on(run, 1)
    check_strategies(run, 4)  # what is not asked for is not refused


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"strategy.parallel": "tp=-1"}, "--parallel tp=-1"),
        ({"strategy.collective": "hierarchical(group=2)", "strategy.compression": "int8"}, "--collective hierarchical"),
        ({"strategy.sync": "diloco(20, overlap=2)"}, "--sync diloco"),
        ({"model.tune": "head+unfreeze(epoch=3)"}, "--tune head"),
    ],
)
def test_what_is_asked_for_is_refused_where_it_cannot_be(settings: dict[str, object], flag: str) -> None:
    run = resolve(build(None, {"data.source": "digits", "launch.elastic": "on", **settings}).config)
    with pytest.raises(UserError, match=re.escape(f"--elastic on does not go together with {flag}")):
        check_strategies(run, 4)


@pytest.mark.parametrize(
    ("settings", "save"),
    [
        ({"strategy.parallel": "fsdp=-1"}, True),
        ({"strategy.parallel": "zero1"}, True),
        ({"strategy.parallel": "dp=2,tp=2"}, True),
        ({"strategy.parallel": "dp=2,pp=2", "launch.nodes": "2", "launch.rendezvous": "a:1"}, True),
        ({"strategy.parallel": "dp=2,tp=2", "launch.elastic": "on"}, True),
        ({}, False),
        ({"strategy.parallel": "tp=-1"}, False),
        ({"strategy.parallel": "dp=2,tp=2", "strategy.compression": "int8"}, True),
        ({"strategy.parallel": "zero1", "strategy.compression": "int8"}, True),
        ({"strategy.parallel": "dp=2,tp=2", "strategy.sync": "local(8)"}, False),
        ({"strategy.parallel": "fsdp=-1", "launch.elastic": "off"}, False),
        ({"strategy.parallel": "fsdp=-1", "model.tune": "head"}, False),
    ],
)
def test_survivors_of_split_layouts_save_what_they_have(settings: dict[str, object], save: bool) -> None:
    run = resolve(build(None, {"data.source": "digits", **settings}).config)
    assert survivors_save(run, 4) is save
    assert not (save and survivors_go_on(run, 4))
    check_strategies(run, 4)
