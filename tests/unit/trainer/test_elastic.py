"""What survivors agree on, where more of them are lost meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from echelon.collectives.transfer import PeerLostError
from echelon.core.task import Stagnation
from echelon.observe.notes import SLOT_BYTES, Note, RankNotes
from echelon.observe.phases import Phase
from echelon.trainer import elastic, rescue
from echelon.trainer.commit import Commit
from echelon.trainer.step import StepResult


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


class Left(BaseException):
    """Raised where a survivor leaves its steps."""


@pytest.mark.parametrize(
    ("room", "loop_of", "goes_on"),
    [
        (elastic, lambda membership: elastic.ElasticLoop(None, membership, None), "_go_on"),  # type: ignore[arg-type]
        (rescue, lambda membership: rescue.RescueLoop(Path(), membership, 1.0), "_save"),
    ],
)
def test_a_survivor_is_in_no_part_of_a_step_while_it_finds_its_peers_or_saves(
    room: ModuleType, loop_of: Callable[[Any], Any], goes_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who takes long for that would hang in the forward pass in which it lost the others."""
    memory = memoryview(bytearray(SLOT_BYTES))
    notes = RankNotes(memory)

    def fit(run: Any, batches: Any) -> str:
        notes.enter(Phase.FORWARD)
        raise PeerLostError("a peer died")

    def left(*arguments: Any) -> None:
        raise Left

    monkeypatch.setattr(room, "fit", fit)
    loop = loop_of(SimpleNamespace(is_newcomer=False, begin=lambda: None, concerns=lambda error: True))
    monkeypatch.setattr(type(loop), goes_on, left)
    run: Any = SimpleNamespace(world=SimpleNamespace(notes=notes))
    with pytest.raises(Left):
        loop.fit(run, SimpleNamespace(note=lambda between: None))
    note = Note.read(memory)
    assert note is not None and note.activity == Phase.OTHER


def test_a_step_is_whole_however_often_ranks_change_before_it_is_recorded() -> None:
    """Of a batch of 12 samples one of two workers has 5, and the other one has died."""
    world: Any = SimpleNamespace(rank=0, size=1, group=None, device=torch.device("cpu"))
    known = StepResult(torch.tensor(2.5), torch.tensor(1.0), samples=5, units=5, global_units=12)
    for _ in range(2):
        (known,) = elastic._completed([known], world)
        assert (float(known.loss), float(known.score), known.samples) == (6.0, 2.4, 12)


def test_members_have_parts_of_a_step_that_make_it_up() -> None:
    """Whichever of three is left then, it knows as much of it as the others, newcomers included."""
    known = StepResult(torch.tensor(6.0), torch.tensor(3.0), samples=6, units=6, global_units=13)
    parts = []
    for rank in range(3):
        world: Any = SimpleNamespace(rank=rank, size=3, group=None, device=torch.device("cpu"))
        parts += elastic._completed([known], world)
    assert sum(float(part.loss) for part in parts) == pytest.approx(13.0)
    assert sum(float(part.score) for part in parts) == pytest.approx(6.5)
    assert sum(part.samples for part in parts) == sum(part.units for part in parts) == 13
    alone: Any = SimpleNamespace(rank=0, size=1, group=None, device=torch.device("cpu"))
    for part in parts:
        (again,) = elastic._completed([part], alone)
        assert float(again.loss) == pytest.approx(13.0) and again.samples == 13
