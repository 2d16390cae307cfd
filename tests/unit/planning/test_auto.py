"""Choices at the start: what `auto` leaves open, and what it may stand beside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config import RunConfig, build
from echelon.core.errors import UserError
from echelon.planning.auto import choose, left_open, settled


def described(**strategy: str) -> RunConfig:
    config = build(None, {"data.source": "digits"}).config
    return replace(config, strategy=replace(config.strategy, **strategy))


def test_a_description_keeps_what_is_not_left_open() -> None:
    config = described(sync="local(period=8)", compression="auto")
    assert left_open(config) == {"strategy.compression"}
    assert settled(config).strategy.compression == "none" and settled(config).strategy.sync == "local(period=8)"
    assert settled(config, {"strategy.compression": "sign"}).strategy.compression == "sign"
    assert not left_open(described(collective="auto"))


def test_codecs_are_not_compared_between_pieces_of_replicas() -> None:
    resolved = build(None, {"data.source": "digits", "strategy.parallel": "fsdp=2"})
    with pytest.raises(UserError, match="leave out --parallel fsdp=2"):
        choose(resolved, 0.3, frozenset({"strategy.compression"}))
