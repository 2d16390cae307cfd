"""What an update by layers, behind the next forward pass, is refused with, and what it turns off."""

from __future__ import annotations

import re

import pytest

from echelon.config import build
from echelon.core.errors import UserError
from echelon.run.resolve import resolve
from echelon.trainer.compatibility import check_strategies, interplay_notes, pushing_order, survivors_go_on
from echelon.trainer.resolved import ResolvedRun

RING = "ring(order=priority)"


def _run(settings: dict[str, str | int | float | None]) -> ResolvedRun:
    return resolve(build(None, {"data.source": "digits", "strategy.collective": RING, **settings}).config)


@pytest.mark.parametrize(
    ("settings", "reason", "instead"),
    [
        (
            {"optimizer.clip_norm": 1.0},
            "--clip-norm: the norm of all gradients is known with the last sum",
            "leave one",
        ),
        ({"training.precision": "fp16"}, "--precision fp16", "--precision bf16"),
        ({"training.ema": 0.99}, "--ema", "leave one of them out"),
        ({"model.compile": True}, "--compile", "leave one of them out"),
        ({"optimizer.name": "lamb"}, "--optimizer lamb", "use sgd, nesterov, momentum, adam or adamw"),
        ({"strategy.compression": "bf16"}, "--compression bf16", "leave one of them out"),
        ({"strategy.sync": "local(8)"}, "--sync local(8) has none", "use --sync allreduce"),
        ({"strategy.sync": "ps"}, "--sync ps", "leave out --collective"),
        ({"strategy.parallel": "dp=-1,zero1"}, "--parallel", "use --parallel dp=N"),
        ({"strategy.parallel": "fsdp=-1"}, "--parallel fsdp=-1", "--parallel"),
        (
            {"launch.elastic": "on"},
            f"--elastic on does not go together with --collective {RING}",
            "leave one of them out",
        ),
    ],
)
def test_what_needs_all_sums_is_refused(
    settings: dict[str, str | int | float | None], reason: str, instead: str
) -> None:
    with pytest.raises(UserError, match=re.escape(reason)) as refused:
        check_strategies(_run(settings), 4)
    assert instead in str(refused.value)


def test_one_worker_has_nothing_to_order() -> None:
    with pytest.raises(UserError, match="needs several workers"):
        check_strategies(_run({"strategy.collective": "backend(order=priority)"}), 1)


@pytest.mark.parametrize("spec", ["backend", "ring", "direct", "halving_doubling", "auto"])
def test_every_path_has_both_orders_and_survivors_start_again_from_the_checkpoint(spec: str) -> None:
    run = _run({"strategy.collective": f"{spec}(order=priority)"})
    check_strategies(run, 2)
    assert run.path.by_priority and not survivors_go_on(run, 2)
    assert survivors_go_on(_run({"strategy.collective": spec}), 2)
    assert not any("changes nothing" in note for note in interplay_notes(run, 2))


def test_another_order_is_refused_in_words() -> None:
    with pytest.raises(UserError, match=re.escape("order must be one of ready, priority, not fast")):
        _run({"strategy.collective": "ring(order=fast)"})


SERVERS = "ps(mode=sync, order=priority)"


@pytest.mark.parametrize(
    ("sync", "settings", "reason"),
    [
        (SERVERS, {"optimizer.clip_norm": 1.0}, "no server sees the norm of the whole gradient: leave out --clip-norm"),
        (SERVERS, {"model.compile": True}, "--compile: compiled code reads all layers at once"),
        (
            SERVERS,
            {"training.precision": "bf16-params"},
            "--precision bf16-params: all parameters are converted at once",
        ),
        (SERVERS, {"strategy.parallel": "pp=2"}, "--parallel pp=2: its first rank gives all ranks their parameters"),
        (SERVERS, {"strategy.collective": "ring"}, "has no collectives: leave out --collective"),
        (
            "ps",
            {"strategy.collective": "backend(order=priority)"},
            "pushes and pulls are ordered by ps(order=priority)",
        ),
    ],
)
def test_what_needs_all_parameters_before_the_first_layer_is_refused(
    sync: str, settings: dict[str, str | int | float | None], reason: str
) -> None:
    run = _run({"strategy.collective": "backend", "strategy.sync": sync, **settings})
    with pytest.raises(UserError, match=re.escape(reason)):
        check_strategies(run, 4)


@pytest.mark.parametrize("mode", ["sync", "async", "ssp", "ssp, staleness=0"])
def test_servers_have_both_orders(mode: str) -> None:
    for order in ("ready", "priority"):
        run = _run({"strategy.collective": "backend", "strategy.sync": f"ps(mode={mode}, order={order})"})
        check_strategies(run, 2)
        assert pushing_order(run, 1) == order
        assert pushing_order(run, 2) == "", "a worker of several ranks has no choice"


def test_backups_and_that_order_are_refused_in_words() -> None:
    with pytest.raises(UserError, match=re.escape("backup=1 may begin without a worker's gradient")):
        _run({"strategy.collective": "backend", "strategy.sync": "ps(mode=sync, backup=1, order=priority)"})
    assert pushing_order(_run({"strategy.collective": "backend", "strategy.sync": "ps(mode=sync, backup=1)"}), 1) == ""
