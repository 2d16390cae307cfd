"""The state of a run whose parameters servers hold: read from a copy that they keep, given back to them."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from echelon.checkpoint import (
    RANKS,
    WRITING,
    WRITING_PART,
    Arriving,
    BaseState,
    CheckpointStore,
    part_file,
    streamed_part,
)
from echelon.coordinator.runs import cut_runs, to_runs
from echelon.core.errors import UserError
from echelon.core.patience import Patience
from echelon.core.state_tree import StateTree, StateView
from echelon.ps.client import TagLost
from echelon.ps.copies import ServersCopy
from echelon.ps.keystore import counted_tasks
from echelon.ps.messages import BUFFERS_KEY
from echelon.ps.strategy import ParameterServer
from echelon.ps.table import KeyRange, KeyTable
from echelon.trainer.made_parts import first_put, model_name, more_puts, server_keys, streamed_tensors, without_made
from echelon.trainer.saving import Captured, WriterState, stand_by
from echelon.trainer.state import SINCE, Cursor, averaged


class ServersState:
    """What a worker saves and restores: the model, and each key's whole state.

    Attributes:
        below, beyond: tasks (where gradients are added up, steps) that what is restored has counted: all below a
            number, and runs of those beyond it.
        parts: leases that a step is cut into where workers do not wait for each other; else 1.
        begins_anew: whether more is trained than when that was saved, so that memories begin at zero.
        takes_over: whether another worker saved before this one, and does not answer.
    """

    leads = True
    bytes_sent = 0
    is_writing = False

    def __init__(
        self,
        strategy: ParameterServer,
        table: KeyTable,
        steps_per_epoch: int,
        patience: Patience,
        while_waiting: Callable[[], None] | None = None,
        frozen: Set[str] = frozenset(),
        since: int = 0,
        batch_parts: int = 1,
    ) -> None:
        """Take the servers' strategy and their keys.

        Args:
            patience: with the disk.
            while_waiting: called now and then while a checkpoint waits for the disk.
            frozen: names of what no server holds, for it stays as it is.
            since: the epoch, counted from 0, since which this is so.
            batch_parts: wanted; a checkpoint's are kept or cut further.
        """
        self.parts = batch_parts
        self._strategy, self._table, self._per_epoch = strategy, table, steps_per_epoch
        self._patience, self._while_waiting, self._frozen = patience, while_waiting, frozen
        self._since = since
        self._server_keys = server_keys(table)
        self._restored: dict[int, StateTree] | None = None
        self.below, self.beyond = 0, list[int]()
        self.begins_anew = self.takes_over = False

    def fingerprint(self) -> str:
        """Return what must be the same on all workers: the servers' keys, and the values that no server holds."""
        held = self._strategy.held.state_dict()
        hashed = hashlib.blake2b(digest_size=16)
        for name in sorted(self._frozen & held.keys()):
            hashed.update(name.encode())
            hashed.update(held[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return f"{self._table.fingerprint}-{hashed.hexdigest()}" if self._frozen else self._table.fingerprint

    def newest(self, store: CheckpointStore) -> tuple[int, StateView] | None:
        """Return the newest whole checkpoint and its step."""
        return store.newest()

    def load(self, state: StateView) -> Cursor:
        """Restore the model here; `keys` then are what the servers are to be given.

        Raises:
            UserError: the checkpoint is of a run without servers, or with others.
        """
        part = state.get("ps")
        if part is None:
            raise UserError("the checkpoint is of a run without a parameter server: start a new run with --weights")
        if state.get(SINCE, 0) != self._since:
            return self._begin_anew(state)
        if part["table"] != self._table.fingerprint:
            raise UserError("the checkpoint is of other --sync settings: resume with the same servers and chunk_kb")
        cut = self._cut_further(part.get("parts", 1))
        self.below, self.beyond = part["below"] * cut, cut_runs(part["beyond"], cut)
        self._restored = {key: _spread(of_key, cut) for key, of_key in part["keys"].items()}
        if len(part["buffers"]) == len(self._strategy.flat_buffers()) > 0:
            self._restored[BUFFERS_KEY] = {"value": part["buffers"], "version": 0}
        held = self._strategy.held  # tables of which servers alone have rows have none here
        own = {name: tensor for name, tensor in state["model"].items() if name not in self._server_keys}
        held.load_state_dict({**held.state_dict(), **own})
        return Cursor(**state["cursor"])

    def _cut_further(self, saved: int) -> int:
        """Keep a checkpoint's cut of steps, or cut each part further where more are wanted; returns into how many."""
        cut = max(1, -(-self.parts // saved))
        self.parts = saved * cut
        return cut

    def _begin_anew(self, state: StateView) -> Cursor:
        """Restore the model, of which more is trained from here on: all steps before are done, memories are zero."""
        cursor, self.begins_anew = Cursor(**state["cursor"]), True
        self.below, self.beyond = cursor.step * self.parts, []
        held = self._strategy.held
        held.load_state_dict(averaged(state))
        averages = self._strategy.key_values() if state["ema"] else {}
        held.load_state_dict(state["model"])
        rest = {"version": self.below, "optimizer": {}, "watermark": self.below, "task_runs": [], "then": {},
                "pulled": {}, "mean_square": {}}  # fmt: skip
        self._restored = {key: {"value": value, **rest} for key, value in self._strategy.key_values().items()}
        for key, average in averages.items():
            self._restored[key] |= {"average": average, "averaged": int(state["ema"]["updates"])}
        if len(buffers := self._strategy.flat_buffers()):  # as they were saved, and those of what is trained now
            self._restored[BUFFERS_KEY] = {"value": buffers, "version": 0}
        return cursor

    def keys(self) -> Mapping[int, StateTree]:
        """Return what the servers begin with: what was restored, or the parameters of this worker's new model."""
        if self._restored is not None:
            return {key: first_put(state) for key, state in self._restored.items()}
        new: dict[int, StateTree] = {key.index: {"version": 0} for keys in self._server_keys.values() for key in keys}
        return new | {key: {"value": value, "version": 0} for key, value in self._strategy.key_values().items()}

    def rows(self) -> Iterator[tuple[KeyRange, StateTree]]:
        """Yield what servers are given after `keys` of rows that exist, a part at a time, each with its key."""
        for key in self._table.keys:
            for part in more_puts(self._restored[key.index]) if self._restored is not None else ():
                yield key, part

    def prepare(self, store: CheckpointStore, begins: bool) -> WriterState:
        """Return how this worker's writer stands.

        Args:
            begins: make ready what the next `captured` needs on the disk.

        Raises:
            UserError: what is being written failed for good.
        """
        if self._while_waiting is not None:
            self._while_waiting()
        return stand_by(store, self._patience, self._take_turn if begins else None)

    def _take_turn(self, store: CheckpointStore) -> None:
        store.claim(in_turns=True, takes_over=self.takes_over)  # whom the coordinator asks saves the next one

    @contextmanager
    def captured(self, cursor: Cursor, store: CheckpointStore) -> Iterator[Captured | None]:
        """Give the state of the servers' copy, as a checkpoint holds it."""
        copy = self._strategy.copy
        assert copy is not None
        counted, beyond = copy.counted()
        steps = cursor.epoch * self._per_epoch + cursor.batch
        if self.parts > 1:
            beyond |= set(range(steps * self.parts, counted))  # parts of a step that is not complete
        with self._room(store) as room, self._strategy.saved() as average:
            moving = {name: tensor for name, tensor in average.items() if name not in self._frozen}
            ema = {"updates": copy.averaged_updates, "average": moving} if average else {}
            held = self._strategy.held.state_dict()
            stored = self._write_rows(room, copy) if room is not None else {}
            keys = {index: dict(state) for index, state in copy.keys.items()}
            for name, of_table in self._server_keys.items():
                held[name] = stored[model_name(name)]
                keys |= {key.index: without_made(keys[key.index], key, stored) for key in of_table}
            frozen = {"model": {name: tensor for name, tensor in held.items() if name in self._frozen}}
            known = store.has_base(self._frozen)
            base = BaseState(self._frozen, None if known else frozen) if self._frozen else None
            of_servers = {
                "table": self._table.fingerprint, "keys": keys, "buffers": copy.buffers,
                "below": steps * self.parts, "beyond": to_runs(beyond), "parts": self.parts,
            }  # fmt: skip
            state = {
                "model": {name: tensor for name, tensor in held.items() if name not in self._frozen},
                "optimizer": {}, "scaler": {}, "ema": ema,
                "cursor": asdict(cursor), "world_size": 1, SINCE: self._since,
                RANKS: {}, "ps": of_servers,
            }  # fmt: skip
            arriving = None if room is None else Arriving(room, [part_file(0)], lambda state, _: state, with_own=False)
            yield Captured(state, arriving, base)

    @contextmanager
    def _room(self, store: CheckpointStore) -> Iterator[Path | None]:
        """Make the folder for rows that servers make; None: they make none. Where a copy is lost nothing stays."""
        if not self._server_keys:
            yield None
            return
        room = self._patience.insist(WRITING, lambda: store.room_for_parts(time.time_ns()))
        try:
            yield room
        except TagLost:
            shutil.rmtree(room, ignore_errors=True)
            store.close()  # another worker may have the next turn
            raise

    def _write_rows(self, room: Path, copy: ServersCopy) -> StateView:
        """Write rows that servers make, from their copy, to a folder; returns what stands for each in the state."""
        tensors = streamed_tensors(self._table, copy.keys, self._strategy.copied_rows)
        return self._patience.insist(WRITING_PART, lambda: streamed_part(room / part_file(0), tensors))

    def leave(self) -> None:
        """Do nothing: no other machine's disk has a part of it."""

    def finish(self) -> None:
        """Do nothing: a checkpoint is one part."""


def _spread(of_key: StateView, cut: int) -> StateTree:
    """Return a key's state with each task that it counts cut into so many."""
    state = dict(of_key)
    if cut > 1 and "watermark" in state:
        state["watermark"] = int(state["watermark"]) * cut
        state["task_runs"] = cut_runs(to_runs(counted_tasks(state)), cut)
        if "averaged" in state:
            state["averaged"] = int(state["averaged"]) * cut
    return state
