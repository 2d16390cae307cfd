"""What survivors agree on, where more of them are lost meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from echelon.collectives.transfer import PeerLostError
from echelon.core.task import Stagnation
from echelon.trainer import elastic
from echelon.trainer.commit import Commit


class Codecs:
    """Stands for a strategy that remembers of which moment its codecs are to be."""

    def __init__(self) -> None:
        self.settled: list[bool] = []

    def settle_step(self, made: bool) -> None:
        """Note it."""
        self.settled.append(made)


def commit(step: int) -> Commit:
    """Return that of a rank that has made so many updates."""
    return Commit(step, False, 0, step, Stagnation(), False, "")


@pytest.mark.parametrize(("own", "settled"), [(5, []), (6, [False])])
def test_a_step_that_is_not_brought_here_may_be_done_again(
    own: int, settled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who alone has made it may die before it gives it on: a codec must still know how it was before."""
    codecs = Codecs()
    members = [elastic._Member(0, True, commit(6)), elastic._Member(0, False, commit(own))]
    if own == 6:
        members.append(elastic._Member(0, False))

    def lost(*arguments: Any) -> int:
        raise PeerLostError("the source died")

    monkeypatch.setattr(elastic, "regroupable", lambda run: codecs)
    monkeypatch.setattr(elastic, "_exchange", lambda told, world: members)
    monkeypatch.setattr(elastic.ElasticLoop, "_bring_up", lost)
    rebuilder: Any = SimpleNamespace(recorded=lambda: 0, paths="")
    nothing: Any = None
    loop = elastic.ElasticLoop(rebuilder, nothing, nothing)
    run: Any = SimpleNamespace(world=SimpleNamespace(leads=False), balance=None)
    batches: Any = SimpleNamespace(commit=commit(own), recorded=0, spent_s=0.0, draws_by_part=True)
    world: Any = SimpleNamespace(rank=1)
    with pytest.raises(PeerLostError):
        loop._agree(run, batches, world)
    assert codecs.settled == settled
