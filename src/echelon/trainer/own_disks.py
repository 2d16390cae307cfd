"""Checkpoints of a run whose machines have disks of their own: each rank writes its part where it stands.

What rank 0's disk lacks then comes to it beside training (`PartCollector`). A run that is started again on the same
machines finds the parts where they stand.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from echelon.checkpoint import WRITING_PART, CheckpointStore
from echelon.checkpoint.blocks import coded, decoded, load_codec
from echelon.checkpoint.collector import PartCollector, as_saved
from echelon.checkpoint.files import DamagedError
from echelon.checkpoint.incomplete import HomeParts, IncompleteCheckpoint, Lacking, PartNote, incompletes
from echelon.checkpoint.store import Complete
from echelon.checkpoint.transfer import PartServer
from echelon.core.address import STORE_VARIABLE, Address, address_towards
from echelon.core.errors import UserError
from echelon.core.patience import Patience
from echelon.messages.identity import RunKeys, derive_keys
from echelon.messages.plain import from_plain, to_plain
from echelon.trainer.world import World, text_from_rank_0

_PIECE_BYTES = 1 << 20
_ADDRESS_BYTES = 64


def away_ranks(sees: bool, world: World) -> tuple[int, ...]:
    """Return the ranks that do not see rank 0's disk; all ranks call it.

    Args:
        sees: whether this one does.
    """
    rows = torch.zeros(world.size, dtype=torch.uint8, device=world.device)
    rows[world.rank] = sees
    dist.all_reduce(rows, dist.ReduceOp.MAX, group=world.group)
    return tuple(rank for rank, each in enumerate(rows.tolist()) if not each)


class OwnDisks:
    """What a rank does for checkpoints where not all ranks see rank 0's disk.

    Attributes:
        away: the ranks that do not see it.
    """

    def __init__(
        self, world: World, away: Sequence[int], store: CheckpointStore, complete: Complete, patience: Patience
    ) -> None:
        """Let rank 0 find the ranks on other machines; all ranks call it together.

        Args:
            store: of this rank's machine.
            complete: see `PartCollector`.
        """
        load_codec()
        self.away = tuple(away)
        self._home = HomeParts(store.folder.parent, world.rank)
        self._server: PartServer | None = None
        self._collector: PartCollector | None = None
        keys = _keys(world)
        if world.rank in self.away:
            patience.insist(WRITING_PART, lambda: self._home.folder.mkdir(parents=True, exist_ok=True))
            self._server = PartServer(keys, _own_host(world), self._home)
        addresses = _addresses(self._server.address if self._server is not None else "", world)
        if world.leads:
            of_away = {rank: addresses[rank] for rank in self.away}
            self._collector = PartCollector(store, keys, of_away, complete, patience)

    @property
    def is_away(self) -> bool:
        """Whether this rank does not see rank 0's disk."""
        return self._server is not None

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent for parts."""
        sender = self._server or self._collector
        return 0 if sender is None else sender.sent_bytes

    def part_path(self, token: int) -> Path:
        """Return where this rank, on another machine, writes its part."""
        assert self._server is not None
        self._server.expect(token)
        return self._home.path(token)

    def is_idle(self, hurries: bool) -> bool:
        """Whether nothing is on its way to this rank that a checkpoint lacks; without a hurry that is not asked.

        Raises:
            UserError: a part cannot be written, or did not come.
        """
        return self._collector is None or self._collector.is_idle(hurries)

    def end(self) -> None:
        """Let what goes on end by itself: others wait for this rank."""
        for each in (self._server, self._collector):
            if each is not None:
                each.end()

    def close(self) -> None:
        """Bring nothing any more."""
        for each in (self._server, self._collector):
            if each is not None:
                each.close()


@dataclass(frozen=True)
class _Offer:
    """What rank 0 tells of a checkpoint that lacks parts; `notes` by the ranks' numbers, as text."""

    lacking: Lacking
    notes: dict[str, PartNote]
    missing: tuple[int, ...]

    @classmethod
    def of(cls, incomplete: IncompleteCheckpoint) -> _Offer:
        """Return what is told of one."""
        notes = {str(rank): note for rank, note in incomplete.notes().items()}
        return cls(incomplete.lacking, notes, tuple(incomplete.missing))

    def hosts(self, ranks: Sequence[int]) -> str:
        """Return where parts of ranks lie, in words."""
        known = dict.fromkeys(self.notes[str(rank)].host for rank in ranks if str(rank) in self.notes)
        return f" (on {', '.join(known)})" if known else ""


@dataclass(frozen=True)
class BroughtParts:
    """What became of checkpoints that lack parts.

    Attributes:
        sent_bytes: of parts that this rank sent.
        hidden_step: of the newest one on this rank's disk that rank 0 does not see; -1: there is none.
    """

    sent_bytes: int
    hidden_step: int


@dataclass(frozen=True)
class _Seen:
    """What rank 0 tells at last: the tokens of what lacked parts on its disk, and why the start is refused."""

    tokens: list[int]
    refusal: str


def complete_from_machines(store: CheckpointStore, world: World, complete: Complete) -> BroughtParts:
    """Complete checkpoints that lack parts which the machines of this start have; all ranks call it together.

    Where parts are not there, the user is told which, and that another checkpoint is used.

    Args:
        complete: see `PartCollector`.

    Raises:
        UserError: the disk takes nothing for too long, another run is saving there, or no checkpoint is whole and one
            that lacks parts cannot be completed now: starting over would remove it.
    """
    if world.meeting is not None:  # machines may have disks of their own: not when the first checkpoint is due
        load_codec()
    present, unused = _usable(store) if world.leads else ([], {})
    tokens = [each.lacking.token for each in incompletes(store.folder)] if world.leads else []
    told = text_from_rank_0(json.dumps([to_plain(_Offer.of(each)) for each in present]), world)
    offers = [from_plain(_Offer, values) for values in json.loads(told)]
    home = HomeParts(store.folder.parent, world.rank)
    holders = [_holders(home, offer, world) for offer in offers]
    whys = [_why_not(offer, held_by, world) for offer, held_by in zip(offers, holders, strict=True)]
    for incomplete, why in zip(present, whys, strict=False):
        if not why:
            store.adopt(incomplete)
            continue
        store.reject(incomplete.path, why)
        if incomplete.can_come:
            unused[incomplete.path] = why
    n_sent = 0
    for i, (offer, held_by, why) in enumerate(zip(offers, holders, whys, strict=True)):
        if why:
            continue
        for rank, holder in held_by.items():
            target = present[i].arrived(rank) if world.leads else None
            n_sent += _handed_over(home.path(offer.lacking.token, rank), target, holder, world)
        if world.leads:
            unused |= _complete(store, present[i], complete)
    refusal = _refusal(store, unused) if world.leads else ""
    seen = from_plain(_Seen, json.loads(text_from_rank_0(json.dumps(to_plain(_Seen(tokens, refusal))), world)))
    if seen.refusal:
        raise UserError(seen.refusal)
    hidden = [each for each in incompletes(store.folder) if each.lacking.token not in seen.tokens]
    return BroughtParts(n_sent, max((each.step for each in hidden if each.can_come), default=-1))


def _refusal(store: CheckpointStore, unused: Mapping[Path, str]) -> str:
    """Return why a start would lose what is on the disk; empty: it would not."""
    if not unused or store.newest_step() is not None:
        return ""
    path, why = list(unused.items())[-1]
    return (
        f"no checkpoint in {store.folder} is whole, and {path.name} cannot be completed now: {why}; give the same "
        "command on the machines that saved it, the first one first, or start over with --from-scratch"
    )


def _usable(store: CheckpointStore) -> tuple[list[IncompleteCheckpoint], dict[Path, str]]:
    """Return what lacks parts and is newer than all that is whole; and where what is here was changed, in which way."""
    newest = store.newest_step()
    found, damaged = list[IncompleteCheckpoint](), dict[Path, str]()
    for each in incompletes(store.folder):
        if newest is not None and (each.step < newest or (each.step == newest and each.metric is None)):
            continue
        try:
            each.check()
            each.drop_changed()  # they come again
        except DamagedError as damage:
            store.reject(each.path, str(damage))
            damaged[each.path] = str(damage)
        else:
            found.append(each)
    return found, damaged


def _holders(home: HomeParts, offer: _Offer, world: World) -> dict[int, int]:
    """Return which rank has each part that is missing on its machine's disk, by whose part it is; -1: none has it."""
    if offer.lacking.ranks != world.size:
        return {}

    def is_here(rank: int) -> bool:
        """Whether this machine's disk has a rank's part."""
        note = offer.notes.get(str(rank))
        return note is not None and home.is_there(offer.lacking.token, rank, note)

    here = torch.tensor([world.rank if is_here(rank) else -1 for rank in offer.missing], device=world.device)
    if len(here) and world.group is not None:
        dist.all_reduce(here, dist.ReduceOp.MAX, group=world.group)
    return dict(zip(offer.missing, here.tolist(), strict=True))


def _why_not(offer: _Offer, held_by: Mapping[int, int], world: World) -> str:
    """Return why a checkpoint cannot be completed now; empty: it can."""
    if offer.lacking.ranks != world.size:
        return (
            f"parts of it lie on other machines{offer.hosts(offer.missing)}, and {offer.lacking.ranks} workers saved "
            f"it: only as many, on the same machines, can go on from it, and here {world.size} do"
        )
    gone = [rank for rank, holder in held_by.items() if holder < 0]
    if not gone:
        return ""
    ranks = f"rank {gone[0]} is" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))} are"
    what = "the part" if len(gone) == 1 else "the parts"
    return f"{what} of {ranks} on no disk of the machines that are here{offer.hosts(gone)}"


def _complete(store: CheckpointStore, incomplete: IncompleteCheckpoint, complete: Complete) -> dict[Path, str]:
    """Complete a checkpoint; returns why not, by its path, where a part came changed: another start takes it again."""
    if changed := incomplete.drop_changed():
        why = f"the part of rank {changed[0]} came changed"
        store.leave(incomplete)
        store.reject(incomplete.path, why)
        return {incomplete.path: why}
    store.complete(incomplete, as_saved if incomplete.lacking.is_agreed else complete)
    return {}


def _handed_over(source: Path, target: Path | None, holder: int, world: World) -> int:
    """Bring a file from the rank that has it to rank 0, coded; returns the bytes that this rank sent.

    Args:
        target: where rank 0 puts it; None on other ranks.
    """
    n_sent = 0
    if world.rank == holder:
        pieces = _pieces(source)
        if target is not None:
            _write(target, pieces)
            return 0
        for piece in pieces:
            data, is_coded = coded(piece)
            sizes = torch.tensor([len(data), len(piece), int(is_coded)])
            dist.send(sizes, group=world.group, group_dst=0)
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), group=world.group, group_dst=0)
            n_sent += len(data)
        dist.send(torch.zeros(3, dtype=torch.int64), group=world.group, group_dst=0)
    elif target is not None:
        _write(target, _received(holder, world))
    return n_sent


def _pieces(source: Path) -> Iterator[bytes]:
    with source.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _received(holder: int, world: World) -> Iterator[bytes]:
    while True:
        sizes = torch.zeros(3, dtype=torch.int64)
        dist.recv(sizes, group=world.group, group_src=holder)
        n_coded, n_bytes, is_coded = sizes.tolist()
        if not n_coded:
            return
        data = torch.empty(n_coded, dtype=torch.uint8)
        dist.recv(data, group=world.group, group_src=holder)
        yield decoded(data.numpy().tobytes(), bool(is_coded), n_bytes)


def _write(target: Path, pieces: Iterator[bytes]) -> None:
    unfinished = target.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(target)


def _keys(world: World) -> RunKeys:
    """Return the run's keys; where its ranks met without any, new ones."""
    if world.meeting is not None:
        return world.meeting.keys
    return derive_keys(bytes.fromhex(text_from_rank_0(secrets.token_hex(32), world)))


def _own_host(world: World) -> str:
    """Return this machine's address for the others: that of gloo's interface, else that on the way to where ranks met.

    Raises:
        UserError: no way leads there.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    for each in psutil.net_if_addrs().get(interface, []):
        if each.family == socket.AF_INET:
            return str(each.address)
    if world.meeting is not None:
        host, _, port = world.meeting.address.rpartition(":")
        met = Address(host, int(port))
    elif STORE_VARIABLE not in os.environ and "MASTER_ADDR" in os.environ:
        met = Address(os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", "1")))
    else:  # all ranks are on one machine
        return "127.0.0.1"
    try:
        return address_towards(met.host, met.port)
    except OSError as error:
        raise UserError(
            f"{met} cannot be reached by IPv4 ({error.strerror or error}), and parts of checkpoints travel by it: put "
            "--run on storage that all machines share"
        ) from error


def _addresses(address: str, world: World) -> list[str]:
    """Return where each rank answers; empty: one that sees rank 0's disk. All ranks call it."""
    row = torch.tensor(list(address.encode().ljust(_ADDRESS_BYTES, b"\0")), dtype=torch.uint8, device=world.device)
    rows = [torch.empty_like(row) for _ in range(world.size)]
    dist.all_gather(rows, row, group=world.group)
    return [bytes(each.tolist()).rstrip(b"\0").decode() for each in rows]
