"""Choices at the start: what `auto` leaves open, and what it may stand beside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config import RunConfig, build
from echelon.core.errors import UserError
from echelon.planning import layout_memory
from echelon.planning.auto import choose, points_of, settled
from echelon.run.resolve import left_open, resolve


def described(**strategy: str) -> RunConfig:
    config = build(None, {"data.source": "digits"}).config
    return replace(config, strategy=replace(config.strategy, **strategy))


def test_a_description_keeps_what_is_not_left_open() -> None:
    config = described(sync="local(period=8)", compression="auto")
    assert left_open(config) == {"strategy.compression"}
    assert settled(config).strategy.compression == "none" and settled(config).strategy.sync == "local(period=8)"
    assert settled(config, {"strategy.compression": "sign"}).strategy.compression == "sign"
    assert not left_open(described(collective="auto"))


def test_averages_cost_more_with_an_optimizer_that_normalises() -> None:
    sgd, adam = (build(None, {"data.source": "digits", "optimizer.name": name}).config for name in ("sgd", "adamw"))
    assert points_of(sgd, 200)["local(period=4), sign"] <= 0.3 < points_of(sgd, 200)["local(period=8), sign"]
    assert points_of(sgd, 1000)["local(period=8), sign"] <= 0.3
    assert "diloco(period=8), int8" in points_of(adam, 1000)
    assert not [label for label in points_of(adam, 1000) if label.startswith("local")]


def test_codecs_are_not_compared_between_pieces_of_replicas() -> None:
    resolved = build(None, {"data.source": "digits", "strategy.parallel": "fsdp=2"})
    with pytest.raises(UserError, match="leave out --parallel fsdp=2"):
        choose(resolved, 0.3, frozenset({"strategy.compression"}))


@pytest.mark.parametrize(
    ("sync", "free", "chosen", "said"),
    [
        ("local(period=8)", 10**9, "dp=-1", "what others take beside local(period=8) is not predicted"),
        ("allreduce", 2_300_000, "fsdp=2", "too large: 2.83 MB by dp=-1"),
        (
            "allreduce",
            1_000_000,
            "",
            "nothing fits the 1 MB of each worker: the least is 2.15 MB, with --parallel fsdp=2; ",
        ),
    ],
)
def test_a_layout_is_chosen_within_memory(
    monkeypatch: pytest.MonkeyPatch, sync: str, free: int, chosen: str, said: str
) -> None:
    monkeypatch.setattr(layout_memory, "free_bytes", lambda device, ranks: free)
    words = {"model.name": "mlp", "data.batch_size": 512, "launch.workers": 2, "training.device": "cpu"}
    resolved = build(None, {**words, "strategy.sync": sync})
    if not chosen:
        with pytest.raises(UserError, match=said):
            choose(resolved, 0.3, frozenset({"strategy.parallel"}))
        return
    found = choose(resolved, 0.3, frozenset({"strategy.parallel"}))
    assert found.settings == {"strategy.parallel": chosen}
    assert said in " ".join(found.words)


def test_a_layout_is_left_open_on_the_command_line_alone() -> None:
    assert left_open(build(None, {"strategy.parallel": "auto", "launch.workers": 2}).config) == {"strategy.parallel"}
    with pytest.raises(UserError, match="--parallel auto is for `echelon train`"):
        resolve(described(parallel="auto"))
    for given, said in (
        ("training.accumulate", "give --parallel, or --acc"),
        ("data.batch_size", "give --batch-size N"),
    ):
        with pytest.raises(UserError, match=said):
            choose(build(None, {given: "auto"}), 0.3, frozenset({"strategy.parallel"}))
