"""The store at the first machine: what a process group asks of it, who is answered, and who waits in vain."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from echelon.collectives.meeting_store import MeetingStore
from echelon.core.address import Address
from echelon.launch.meeting import Arrival, AskLater, Meeting
from echelon.messages.identity import derive_keys
from echelon.messages.key_values import KeyValueTables

SECRET = b"s" * 32
DEADLINE = timedelta(seconds=30)
SOON = timedelta(seconds=0.5)


@pytest.fixture
def address() -> Iterator[Address]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = Address("127.0.0.1", free.getsockname()[1])
    tables = KeyValueTables()
    tables.open("round")
    with Meeting(address, SECRET, Arrival, lambda arrival: AskLater(), tables):
        yield address


def _store(
    address: Address, timeout: timedelta = DEADLINE, secret: bytes = SECRET, table: str = "round"
) -> MeetingStore:
    return MeetingStore(str(address), derive_keys(secret), table, timeout)


def test_it_holds_values_for_all_ranks(address: Address) -> None:
    one, two = _store(address), _store(address)
    one.set("a", b"\x00\xff")
    assert two.get("a") == b"\x00\xff" and two.check(["a"]) and not two.check(["a", "b"])
    assert (one.add("n", 2), two.add("n", -1)) == (2, 1)
    assert two.compare_set("c", "", "x") == b"x" and one.num_keys() == 3 and one.delete_key("c")
    waits = threading.Thread(target=two.wait, args=(["late"],))
    waits.start()
    one.set("late", "1")
    waits.join(30)
    assert not waits.is_alive()
    one.close()
    two.close()


def test_a_process_group_meets_in_it(address: Address) -> None:
    stores = [_store(address) for _ in range(2)]
    groups: dict[int, dist.ProcessGroup] = {}

    def meet(rank: int) -> None:
        """Be one rank of two."""
        prefixed = dist.PrefixStore("group", stores[rank])
        groups[rank] = dist.ProcessGroupGloo(prefixed, rank, 2, DEADLINE)
        groups[rank].allreduce([values[rank]]).wait()

    values = [torch.tensor([1.0]), torch.tensor([2.0])]
    ranks = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [float(v) for v in values] == [3.0, 3.0]
    groups.clear()
    for store in stores:
        store.close()


@pytest.mark.parametrize("other", [{"secret": b"x" * 32}, {"table": "earlier"}], ids=["secret", "table"])
def test_who_has_another_secret_or_asks_for_an_earlier_table_waits_in_vain(
    address: Address, other: dict[str, object]
) -> None:
    stranger = _store(address, SOON, **other)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match="gave no answer"):
        stranger.set("a", "1")
    sound = _store(address)
    assert not sound.check(["a"])
    stranger.close()
    sound.close()


def test_a_key_that_nobody_sets_is_named(address: Address) -> None:
    store = _store(address, SOON)
    with pytest.raises(TimeoutError, match="no rank has set missing"):
        store.get("missing")
    store.close()
