"""A part on the disk of another machine, from its rank to who asks: how fast it comes, and what is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from echelon.checkpoint import transfer
from echelon.checkpoint.blocks import BLOCK_BYTES
from echelon.checkpoint.files import note_sum
from echelon.checkpoint.incomplete import HomeParts
from echelon.checkpoint.tensors import write_file
from echelon.checkpoint.transfer import NoAnswer, PartLink, PartServer, TransferPace
from echelon.messages.endpoint import Sender
from echelon.messages.identity import derive_keys
from echelon.messages.sockets import new_context

KEYS = derive_keys(bytes(32))
TOKEN = 7


@pytest.fixture
def home(tmp_path: Path) -> HomeParts:
    parts = HomeParts(tmp_path, rank=3)
    parts.folder.mkdir()
    return parts


@pytest.fixture
def server(home: HomeParts) -> Iterator[PartServer]:
    with closing(PartServer(KEYS, "127.0.0.1", home)) as opened:
        yield opened


@pytest.fixture
def over() -> threading.Event:
    return threading.Event()


@pytest.fixture
def link(server: PartServer, over: threading.Event) -> Iterator[PartLink]:
    context = new_context()
    hurry = threading.Event()
    hurry.set()
    with closing(PartLink(context, Sender(KEYS, "test"), server.address, TransferPace(hurry), over)) as opened:
        yield opened
    context.destroy()


def write_part(home: HomeParts, token: int) -> Path:
    path = home.path(token)
    note_sum(path, write_file(path, {"a": torch.zeros(3 * BLOCK_BYTES // 4)}))
    return path


def test_a_part_comes_block_by_block_once_it_is_written(home: HomeParts, server: PartServer, link: PartLink) -> None:
    server.expect(TOKEN)
    assert link.describe(TOKEN, []) is None
    path = write_part(home, TOKEN)
    described = link.describe(TOKEN, [TOKEN])
    assert described is not None
    note, listed = described
    assert home.is_there(TOKEN, 3, note)
    link.measure(TOKEN)
    before = server.sent_bytes
    assert b"".join(link.blocks(TOKEN, range(len(listed)), listed)) == path.read_bytes()
    assert server.sent_bytes - before < BLOCK_BYTES // 10, "zeros travelled as they are"


def test_parts_that_are_needed_no_more_are_removed_and_newer_ones_stay(
    home: HomeParts, server: PartServer, link: PartLink
) -> None:
    paths = {token: write_part(home, token) for token in (1, 2, 3, 4)}
    for token in (2, 3, 4):
        server.expect(token)
    assert link.describe(3, [3]) is not None
    assert {token for token, path in paths.items() if path.exists()} == {3, 4}, "nobody has asked for 4 yet"


@pytest.mark.parametrize(("data", "is_coded"), [(b"no zstd", True), (b"another block", False)])
def test_what_is_no_block_is_no_answer(
    home: HomeParts, server: PartServer, link: PartLink, monkeypatch: pytest.MonkeyPatch, data: bytes, is_coded: bool
) -> None:
    write_part(home, TOKEN)
    described = link.describe(TOKEN, [TOKEN])
    assert described is not None
    monkeypatch.setattr(transfer, "coded", lambda _: (data, is_coded))
    with pytest.raises(NoAnswer):
        link.blocks(TOKEN, [0], described[1])
    server.check()


def test_a_server_tells_what_ended_it(
    home: HomeParts, server: PartServer, link: PartLink, over: threading.Event
) -> None:
    home.path(TOKEN).write_bytes(b"part")
    threading.Timer(0.5, over.set).start()
    with pytest.raises(NoAnswer):
        link.describe(TOKEN, [TOKEN])
    with pytest.raises(ValueError, match="is no safetensors file"):
        server.check()


def test_who_has_not_the_runs_keys_is_not_answered(server: PartServer) -> None:
    context, over = new_context(), threading.Event()
    stranger = PartLink(
        context, Sender(derive_keys(bytes(31) + b"x"), "test"), server.address, TransferPace(threading.Event()), over
    )
    threading.Timer(0.5, over.set).start()
    with closing(stranger), pytest.raises(NoAnswer):
        stranger.describe(TOKEN, [])
    context.destroy()


def test_a_transfer_takes_a_tenth_of_the_links_time_and_less_of_a_busy_one() -> None:
    hurry = threading.Event()
    pace = TransferPace(hurry)
    pace.asked(0.1)  # there and back
    assert pace.rest_s(0.12) == pytest.approx(9 * 0.02)
    assert pace.rest_s(0.15) == pytest.approx(9 * 0.05), "others use the link: what is sent takes longer"
    hurry.set()
    assert pace.rest_s(0.15) == 0.0


def test_a_fast_link_is_asked_for_more_at_once() -> None:
    pace = TransferPace(threading.Event())
    pace.asked(0.001)
    for _ in range(10):
        pace.rest_s(0.002)
    assert pace.blocks == 64
    pace.rest_s(0.2)
    assert pace.blocks == 32


def test_only_what_a_link_has_carried_lets_answers_grow_beyond_a_megabyte() -> None:
    for n_sent, most in ((100, 64), (1 << 20, 256), (16 << 20, 1024)):
        pace = TransferPace(threading.Event())
        pace.asked(0.001)
        for _ in range(15):
            pace.carried(1 << 20, n_sent, seconds=0.002, coding_s=0.0)
            pace.rest_s(0.002)
        assert pace.blocks == most


@pytest.mark.parametrize(
    ("n_sent", "link_s", "codes"),
    [(9 << 17, 1.0, True), (9 << 17, 0.02, False), (1 << 10, 0.0, True)],
    ids=["10 Mbit/s", "500 Mbit/s", "zeros"],
)
def test_blocks_are_coded_where_that_saves_more_than_a_link_carries_meanwhile(
    n_sent: int, link_s: float, codes: bool
) -> None:
    pace = TransferPace(threading.Event())
    pace.asked(0.001)
    pace.carried(10 << 17, n_sent, seconds=0.001 + link_s + 0.02, coding_s=0.02)
    assert pace.codes == codes


def test_blocks_travel_as_they_are_where_they_are_not_to_be_coded(
    home: HomeParts, server: PartServer, over: threading.Event
) -> None:
    context, pace = new_context(), TransferPace(threading.Event())
    path = write_part(home, TOKEN)
    with closing(PartLink(context, Sender(KEYS, "test"), server.address, pace, over)) as link:
        described = link.describe(TOKEN, [TOKEN])
        assert described is not None
        before, pace.codes = server.sent_bytes, False
        assert b"".join(link.blocks(TOKEN, range(len(described[1])), described[1])) == path.read_bytes()
        assert server.sent_bytes - before > 3 * BLOCK_BYTES
        link.measure(TOKEN)
        assert pace.codes
    context.destroy()
