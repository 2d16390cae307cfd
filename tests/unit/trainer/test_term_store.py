"""Who waits for others of a term stops when it is over, and does not take a slow or stopped one for an own error."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from echelon.core.terms import Term, TermFolder
from echelon.trainer.membership import Membership, TermOver, TermStore


def members(path: Path, timeout_s: float) -> tuple[TermFolder, Membership]:
    """Return a folder whose first new term has two members, and the first of them, in no term yet."""
    folder = TermFolder(path / "terms")
    folder.make()
    folder.publish(Term(1, ("rank0.0", "rank1.0"), lost_by=1))
    return folder, Membership(folder, "rank0.0", timeout_s)


def test_a_wait_in_the_store_ends_with_the_term(tmp_path: Path) -> None:
    _, membership = members(tmp_path, timeout_s=60.0)
    store = TermStore(dist.HashStore(), membership.check_term, timedelta(seconds=60))
    with pytest.raises(TermOver):
        store.get("of one that is lost")


def test_a_wait_that_takes_too_long_is_one_for_a_lost_peer(tmp_path: Path) -> None:
    _, membership = members(tmp_path, timeout_s=60.0)
    store = TermStore(dist.HashStore(), lambda: None, timedelta(seconds=0.05))
    with pytest.raises(dist.DistStoreError) as caught:
        store.get("of one that is stopped")
    assert membership.concerns(caught.value)


def test_who_waits_for_one_to_enter_says_so_before_it_gives_up(tmp_path: Path) -> None:
    folder, membership = members(tmp_path, timeout_s=0.2)
    with pytest.raises(TimeoutError):
        membership.next_term()
    assert folder.has_complained(1, "rank0.0") and not folder.has_complained(1, "rank1.0")
