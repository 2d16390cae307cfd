"""Rank 0's thread that brings the parts of other machines to its disk, beside training, and completes checkpoints."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from echelon.checkpoint import files
from echelon.checkpoint.blocks import BLOCK_BYTES, BlockList, KnownBlocks, digest_of
from echelon.checkpoint.files import DamagedError
from echelon.checkpoint.hashed_file import yield_to_training
from echelon.checkpoint.incomplete import IncompleteCheckpoint, PartNote
from echelon.checkpoint.parts import WRITING_PART, StoredPart, part_file
from echelon.checkpoint.store import CheckpointStore, Complete
from echelon.checkpoint.transfer import NoAnswer, PartLink, TransferPace
from echelon.core.errors import UserError
from echelon.core.patience import Patience
from echelon.core.state_tree import StateView
from echelon.core.units import format_seconds
from echelon.messages.endpoint import Sender
from echelon.messages.identity import RunKeys
from echelon.messages.sockets import new_context

_LOOK_S = 0.2
_NOTE_S = 0.5
_JOIN_S = 30.0  # for an answer that is on its way
_MOST_TRIES = 3
_STUCK_S = 600.0

R = TypeVar("R")


class PartCollector:
    """Brings what checkpoints of a store lack, the oldest first, until it is closed.

    Attributes:
        failure: what ended the thread.
    """

    def __init__(
        self,
        store: CheckpointStore,
        keys: RunKeys,
        addresses: Mapping[int, str],
        complete: Complete,
        patience: Patience,
    ) -> None:
        """Begin to look for checkpoints that lack parts.

        Args:
            addresses: where ranks on other machines answer, by rank.
            complete: makes the state of a checkpoint whose replicas had not just agreed.
        """
        self._store, self._complete, self._patience = store, complete, patience
        self._hurry, self._over = threading.Event(), threading.Event()
        self._wakes = self._seen = 0
        self._context = new_context()
        self._sender = Sender(keys, "collector")
        self._pace = TransferPace(self._hurry)
        self._links = {
            rank: PartLink(self._context, self._sender, address, self._pace, self._over)
            for rank, address in addresses.items()
        }
        self._noted: dict[tuple[int, int], tuple[PartNote, BlockList]] = {}  # by token and rank
        self._written: dict[tuple[int, int], set[int]] = {}  # blocks of parts that are on their way
        self._tries = 0
        self._looked_s = self._moved_s = time.monotonic()
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="echelon-part-collector", daemon=True)
        self._thread.start()

    @property
    def sent_bytes(self) -> int:
        """Bytes that rank 0 sent for its questions."""
        return self._sender.traffic.sent_bytes

    def is_idle(self, hurries: bool) -> bool:
        """Whether all that the store has saved is whole.

        Args:
            hurries: nothing else needs the links: they are used as fast as they are.

        Raises:
            Exception: what the thread ended with.
        """
        if self.failure is not None:
            raise self.failure
        if not hurries:
            self._hurry.clear()
            return True
        if not self._hurry.is_set():
            self._wakes += 1  # a look that begins after this one counts
            self._hurry.set()
        return self._seen == self._wakes

    def end(self) -> None:
        """Let the thread end, without waiting for it: a checkpoint whose parts have all come may still become whole."""
        self._over.set()
        self._hurry.set()

    def close(self) -> None:
        """Bring nothing any more."""
        self.end()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        yield_to_training()
        try:
            while not self._over.is_set():
                wakes = self._wakes
                coming = self._insist(self._store.coming)
                if not coming:
                    self._seen, self._moved_s = wakes, time.monotonic()
                if not coming or not self._bring(coming):
                    self._over.wait(_LOOK_S)
        except Exception as error:  # noqa: BLE001 - kept for `is_idle`, which raises it where it can be handled
            self.failure = error
        finally:
            for link in self._links.values():
                link.close()
            self._context.destroy()

    def _bring(self, coming: Sequence[IncompleteCheckpoint]) -> bool:
        """Bring what the oldest lacks, and complete it; returns whether it is, or has gone."""
        oldest = coming[0]
        try:
            self._note(coming)
            if not all(self._pull(oldest, rank) for rank in oldest.missing):
                self._check_moves(oldest)
                return False
            brought_s, self._pace.busy_s = self._pace.busy_s, 0.0
            self._store.complete(oldest, as_saved if oldest.lacking.is_agreed else self._complete, brought_s)
        except NoAnswer:
            self._check_moves(oldest)
            return False
        except DamagedError as damage:
            self._give_up(oldest, str(damage))
        except FileNotFoundError:
            if oldest.path.exists():
                raise  # else what it was saved of has been rolled back
        self._moved_s = time.monotonic()
        self._forget()
        return True

    def _check_moves(self, incomplete: IncompleteCheckpoint) -> None:
        silent_s = time.monotonic() - self._moved_s
        if silent_s > _STUCK_S + self._patience.limit_s:  # the other machines have as much patience with their disks
            ranks = ", ".join(map(str, incomplete.missing))
            raise UserError(
                f"{incomplete.path}: nothing has come of the parts of ranks {ranks} for {format_seconds(silent_s)}; "
                "put --run on storage that all machines share, or look at the disks of the other machines"
            )

    def _note(self, coming: Sequence[IncompleteCheckpoint]) -> None:
        """Learn of each checkpoint where its other parts lie: with that the run can be started again from it."""
        self._looked_s = time.monotonic()
        wanted = [each.lacking.token for each in coming]
        for incomplete in coming:
            for rank in incomplete.missing:
                at = (incomplete.lacking.token, rank)
                if at not in self._noted and (known := self._links[rank].describe(at[0], wanted)) is not None:
                    self._keep_note(incomplete, rank, known[0])
                    self._noted[at] = known

    def _keep_note(self, incomplete: IncompleteCheckpoint, rank: int, note: PartNote) -> None:
        try:
            self._insist(lambda: incomplete.note(rank, note))
        except FileNotFoundError:
            if incomplete.path.exists():
                raise  # else it is needed no more

    def _pull(self, incomplete: IncompleteCheckpoint, rank: int) -> bool:
        """Bring a rank's part to the disk; returns whether it is there."""
        at = (incomplete.lacking.token, rank)
        if at not in self._noted:
            return False
        note, listed = self._noted[at]
        unfinished = incomplete.arrived(rank).with_suffix(".unfinished")
        written = self._written.setdefault(at, set())
        fd = self._insist(lambda: os.open(unfinished, os.O_RDWR | os.O_CREAT, 0o644))
        try:
            self._take_known(fd, rank, listed, written)
            if not self._take_new(fd, at, listed, written):
                return False
            self._insist(lambda: os.fsync(fd))
        finally:
            os.close(fd)
        if self._insist(lambda: files.sha256_of(unfinished)) != note.sha256:
            self._discard(incomplete, rank)
            return False
        self._insist(lambda: unfinished.replace(incomplete.arrived(rank)))
        return True

    def _take_known(self, fd: int, rank: int, listed: BlockList, written: set[int]) -> None:
        """Write the blocks that the newest whole checkpoint has as well; an earlier start may have written some."""
        if written or self._tries:
            return
        newest = files.entries(self._store.folder)[-1:]
        known = KnownBlocks.of(newest[0].path / part_file(rank)) if newest else KnownBlocks()
        for number in range(len(listed)):
            begin, end = listed.span(number)
            digest = listed.digest(number)
            block = known.read(digest)
            if block is not None:
                self._write(fd, block, begin)
            if block is not None or digest_of(self._insist(partial(os.pread, fd, end - begin, begin))) == digest:
                written.add(number)

    def _take_new(self, fd: int, at: tuple[int, int], listed: BlockList, written: set[int]) -> bool:
        """Bring the blocks that are not written; returns whether all are."""
        token, rank = at
        left = [number for number in range(len(listed)) if number not in written]
        if left:
            self._links[rank].measure(token)
        while left:
            if self._over.is_set():
                return False
            n_blocks = max(1, self._pace.blocks * BLOCK_BYTES // listed.block_bytes)
            asked, left = left[:n_blocks], left[n_blocks:]
            for number, block in zip(asked, self._links[rank].blocks(token, asked, listed), strict=True):
                self._write(fd, block, listed.span(number)[0])
                written.add(number)
            self._moved_s = time.monotonic()
            if self._moved_s - self._looked_s > _NOTE_S:
                self._note(self._insist(self._store.coming))
        return True

    def _write(self, fd: int, block: bytes, position: int) -> None:
        def write() -> None:
            """Write all of the block, where a disk that fills up takes a part."""
            view, at = memoryview(block), position
            while view:
                n_bytes = os.pwrite(fd, view, at)
                view, at = view[n_bytes:], at + n_bytes

        self._insist(write)

    def _discard(self, incomplete: IncompleteCheckpoint, rank: int) -> None:
        """Begin a part anew that is not what its rank wrote: its own disk, or this one, has changed it."""
        self._written.pop((incomplete.lacking.token, rank), None)
        self._tries += 1
        if self._tries >= _MOST_TRIES:
            raise DamagedError(f"the part of rank {rank} is not what was written: its contents changed on the disk")

    def _give_up(self, incomplete: IncompleteCheckpoint, reason: str) -> None:
        self._store.reject(incomplete.path, reason)
        self._insist(lambda: files.remove(incomplete.path))

    def _forget(self) -> None:
        """Forget what is known of parts that are here."""
        self._tries = 0
        tokens = {each.lacking.token for each in self._insist(self._store.coming)}
        self._noted = {at: known for at, known in self._noted.items() if at[0] in tokens}
        self._written = {at: written for at, written in self._written.items() if at[0] in tokens}

    def _insist(self, action: Callable[[], R]) -> R:
        return self._patience.insist(WRITING_PART, action)


def as_saved(state: StateView, stored: Sequence[StoredPart]) -> StateView:
    """Return the state as it was saved: its replicas had just agreed."""
    return state
