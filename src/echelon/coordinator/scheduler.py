"""The scheduler: the coordinator's state with a socket, a journal and the run's record around it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from echelon.coordinator.config import CoordinatorConfig
from echelon.coordinator.effects import Began, Effect, Evaluated, Save, Send, Tell, WindowClosed
from echelon.coordinator.journal import Journal
from echelon.coordinator.messages import TO_COORDINATOR, EvaluationDone, JoinWorker, SetupDone
from echelon.coordinator.state import Coordinator
from echelon.messages.endpoint import Listener, Sender
from echelon.messages.framing import Message
from echelon.messages.identity import RunKeys
from echelon.messages.sockets import Limits, new_context
from echelon.records.file import Recorder
from echelon.records.kinds import Steps

_FRAME_BYTES = 1 << 20
_POLL_MS = 50
_FAREWELL_S = 2.0
_LAST_WORDS_S = 0.6
_JOURNAL_LINES = 20_000  # about 2 MB


@dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler is told when it starts: what it coordinates, and where it listens and keeps its journal."""

    coordinator: CoordinatorConfig
    keys: RunKeys
    address: str
    folder: Path


@dataclass(frozen=True)
class Callbacks:
    """What others do with what happens: the run's record, the display; `waits` is given who is `awaited`, always."""

    started: Callable[[SetupDone, Sequence[JoinWorker]], None]
    window: Callable[[Steps, list[list[float]]], None]
    evaluated: Callable[[int, EvaluationDone], None]
    waits: Callable[[Sequence[str]], None]


class Scheduler:
    """One thread, one poll loop; `run` returns how the run ended."""

    def __init__(self, config: SchedulerConfig, record: Recorder, callbacks: Callbacks) -> None:
        self._record, self._callbacks = record, callbacks
        self._context = new_context()
        self._sender = Sender(config.keys, "scheduler")
        self.listener = Listener(self._context, self._sender, config.address, Limits(_FRAME_BYTES), TO_COORDINATOR)
        self._journal = Journal(config.folder / "scheduler.jsonl", record.patience)
        now_s = time.monotonic()
        self.state = Coordinator(config.coordinator, random.randrange(1, 2**30), now_s)
        self._do(self.state.restore(self._journal.read(), now_s))

    def run(self) -> str:
        """Serve until the run is over; returns `completed`, `stopped` or `failed`."""
        try:
            self._serve()
        finally:
            self.listener.close(linger_ms=1000)
            self._context.destroy()
            self._journal.close()
        return self.state.status

    def _serve(self) -> None:
        poller = zmq.Poller()
        self.listener.register(poller)
        while not self.state.status:
            poller.poll(_POLL_MS)
            while self.listener.pump(self._take):
                pass
            self._do(self.state.tick(time.monotonic()))
            self._callbacks.waits(self.state.awaited)
            if self._journal.lines > _JOURNAL_LINES:
                self._journal.replace(self.state.journal())
        self._farewell(poller)

    def _farewell(self, poller: zmq.Poller) -> None:
        """Tell everyone that the run is over, until all have gone or had the time to.

        One that came back for this knows nobody yet: it waits until those who live have been heard.
        """
        began = time.monotonic()
        until_s = began + (0.0 if self.state.members.all() else _LAST_WORDS_S)
        self._do(self.state.say_farewell(began))
        while time.monotonic() < until_s or self.state.members.workers:
            if time.monotonic() > began + _FAREWELL_S:
                break
            poller.poll(_POLL_MS)
            self.listener.pump(self._take)
        self._do(self.state.last_words())

    def _take(self, peer: bytes, message: Message) -> None:
        self._do(self.state.handle(message, peer, time.monotonic()))

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._sender.reply(self.listener.socket, effect.peer, effect.content)
                case Save():
                    self._journal.write(effect.entry)
                case Tell():
                    self._record.write(effect.record)
                case Began():
                    self._callbacks.started(effect.setup, effect.workers)
                case WindowClosed():
                    self._callbacks.window(effect.steps, effect.resources)
                case Evaluated():
                    self._callbacks.evaluated(effect.epoch, effect.result)
