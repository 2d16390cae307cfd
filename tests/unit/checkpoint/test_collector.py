"""Parts on their way to rank 0's disk: for how long nothing may come, and what an earlier start has brought."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from echelon.checkpoint import collector
from echelon.checkpoint.blocks import BLOCK_BYTES
from echelon.checkpoint.collector import PartCollector, as_saved
from echelon.checkpoint.incomplete import HomeParts, incompletes
from echelon.checkpoint.parts import AlikeTensors, PartWriter, RankPart
from echelon.checkpoint.store import CheckpointStore
from echelon.checkpoint.transfer import PartServer
from echelon.core.errors import UserError
from echelon.core.patience import Patience
from echelon.messages.identity import derive_keys
from tests.unit.checkpoint.test_incomplete import save

KEYS = derive_keys(bytes(32))
TOKEN, STEP = 7, 10
DEADLINE_S = 20.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    """Return a store with a checkpoint that lacks rank 1's part."""
    with closing(CheckpointStore(tmp_path / "checkpoints", keep=1)) as opened:
        save(opened, STEP, TOKEN)
        yield opened


@pytest.fixture
def home(tmp_path: Path) -> HomeParts:
    parts = HomeParts(tmp_path / "b", rank=1)
    parts.folder.mkdir(parents=True)
    return parts


@pytest.fixture
def server(home: HomeParts) -> Iterator[PartServer]:
    with closing(PartServer(KEYS, "127.0.0.1", home)) as opened:
        yield opened


def collecting(store: CheckpointStore, server: PartServer, patience_s: float = 600.0) -> closing[PartCollector]:
    patience = Patience(store.folder, patience_s)
    return closing(PartCollector(store, KEYS, {1: server.address}, as_saved, patience))


def wait_until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_another_machines_disk_may_be_full_for_as_long_as_patience_lasts(
    store: CheckpointStore, server: PartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_STUCK_S", 0.0)
    with collecting(store, server, patience_s=3600.0) as patient:
        wait_until(lambda: server.sent_bytes > 0)
        looks = server.sent_bytes
        wait_until(lambda: server.sent_bytes > looks)
        assert patient.failure is None
    with collecting(store, server, patience_s=0.0) as hasty:
        wait_until(lambda: hasty.failure is not None)
        with pytest.raises(UserError, match="nothing has come of the parts of ranks 1 for"):
            hasty.is_idle(hurries=True)


def test_what_an_earlier_start_has_brought_does_not_travel_again(
    store: CheckpointStore, home: HomeParts, server: PartServer
) -> None:
    n_bytes = 64 * BLOCK_BYTES
    noise = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8)
    writer = PartWriter()
    server.expect(TOKEN)
    writer.write({home.path(TOKEN): RankPart.of(1, {"own": noise}, {}, {}, AlikeTensors())})
    writer.wait()
    unfinished = incompletes(store.folder)[0].arrived(1).with_suffix(".unfinished")
    unfinished.parent.mkdir()
    unfinished.write_bytes(home.path(TOKEN).read_bytes()[: n_bytes // 2])
    with collecting(store, server) as again:
        wait_until(lambda: again.is_idle(hurries=True))
    assert server.sent_bytes < 0.75 * n_bytes
    found = store.newest()
    assert found is not None and torch.equal(found[1]["ranks"][1]["own"], noise)
