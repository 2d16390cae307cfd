"""A server process: its state with sockets, snapshots on the disk and a clock around it. One thread, one poll loop."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
import zmq

from echelon.checkpoint import CheckpointStore
from echelon.coordinator.messages import TO_SERVER, Promote
from echelon.core.patience import Patience
from echelon.messages.endpoint import Channel, Listener, Sender
from echelon.messages.framing import Message
from echelon.messages.sockets import Limits, new_context
from echelon.ps.blob import COPIES_FOLDER, write_frames
from echelon.ps.messages import TO_PS_SERVER, TO_STANDBY, Attach
from echelon.ps.server_state import ServerState
from echelon.ps.serving import Effect, FileState, Follow, Reply, SaveSnapshot, ServerConfig, TellPrimary, TellScheduler

BEAT_S = 0.2
KEEP = 2
_ALL = 1_000_000


class Server:
    """The keys of one server; `run` returns when the scheduler says that the run is over."""

    def __init__(self, config: ServerConfig, patience: Patience | None = None) -> None:
        """Begin to listen; snapshots that the disk does not take are tried again for as long as patience lasts."""
        self.config = config
        self.sender = Sender(config.keys, config.name)
        self._context = new_context()
        self._limits = Limits(config.frame_bytes, queued=20_000)
        self.listener = Listener(self._context, self.sender, config.address, self._limits, TO_PS_SERVER)
        self._scheduler = Channel(self._context, self.sender, config.scheduler, self._limits, TO_SERVER)
        self._primary: Channel | None = None
        self.state = ServerState(config, self.sender.session, self.listener.address, os.getpid())
        self._snapshots = CheckpointStore(config.folder / "servers" / f"server{config.index}", KEEP, patience=patience)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="echelon-snapshot")
        self._writing: Future[dict[bytes, int]] | None = None
        self._poller = zmq.Poller()
        self._began_s = time.monotonic()

    def run(self) -> None:
        """Serve until the run is over."""
        try:
            self._serve()
        finally:
            self._close()

    def _serve(self) -> None:
        self.listener.register(self._poller)
        self._poller.register(self._scheduler.socket, zmq.POLLIN)
        # The first optimizer of a process imports for seconds: before anyone waits for this server.
        self.config.make_optimizer([torch.nn.Parameter(torch.zeros(1, 1))], [True])
        saved = self._snapshots.newest()
        if saved is not None:
            self.state.restore(*saved, time.monotonic())
        self._do(self.state.begin())
        beat_s = 0.0
        while not self.state.ended:
            ready = dict(self._poller.poll(max(1, int(1000 * (beat_s - time.monotonic())))))
            began = time.perf_counter()
            if self._scheduler.socket in ready:
                self._scheduler.pump(self._from_scheduler)
            if self._primary is not None:
                self._primary.pump(self._from_primary)
            taken = self.listener.pump(self._from_peer)
            self._look_at_snapshot()
            self._do(self.state.tick(time.monotonic()))
            if taken:
                self.state.load.busy_s += time.perf_counter() - began
            if time.monotonic() >= beat_s:
                self._beat()
                beat_s = time.monotonic() + BEAT_S

    def _close(self) -> None:
        """Finish the snapshot that is being written, close all sockets."""
        try:
            self._pool.shutdown(wait=True)
            if self._writing is not None:
                self._writing.result()
            self._snapshots.close()
        finally:
            self.listener.close()
            self._context.destroy()

    def _beat(self) -> None:
        traffic = self.sender.traffic
        beat = replace(
            self.state.beat(), seconds=time.monotonic() - self._began_s, sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes, dropped=dict(traffic.dropped), refused=self.listener.check.refused,
        )  # fmt: skip
        self._scheduler.send(beat)

    def _from_scheduler(self, message: Message) -> None:
        if isinstance(message.content, Promote) and self._primary is not None:
            self._primary.pump(self._from_primary, most=_ALL)  # what had arrived still counts
        self._do(self.state.from_scheduler(message, time.monotonic()))

    def _from_primary(self, message: Message) -> None:
        self._do(self.state.from_primary(message, time.monotonic()))

    def _from_peer(self, peer: bytes, message: Message) -> None:
        self._do(self.state.handle(message, peer, time.monotonic()))

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply():
                    self.sender.reply(self.listener.socket, effect.peer, effect.content, effect.frames)
                case FileState():
                    self._file(effect)
                case TellScheduler():
                    self._scheduler.send(effect.content)
                case TellPrimary():
                    if self._primary is not None:
                        self._primary.send(effect.content)
                case Follow():
                    self._follow(effect)
                case SaveSnapshot():
                    self._writing = self._pool.submit(self._write, effect)

    def _file(self, effect: FileState) -> None:
        """Answer with a state in a file, where this server sees its place and the disk takes it; else by the wire."""
        folder, content = self.config.folder / COPIES_FOLDER / effect.place, effect.content
        try:
            filed = folder.is_dir()
            if filed:
                write_frames(folder / str(content.key), effect.frames)
        except OSError:
            filed = False
        frames = () if filed else effect.frames
        self.sender.reply(self.listener.socket, effect.peer, replace(content, filed=filed), frames)

    def _follow(self, to: Follow) -> None:
        if self._primary is not None:
            self._poller.unregister(self._primary.socket)
            self._primary.close()
            self._primary = None
        if to.address:
            self._primary = Channel(self._context, self.sender, to.address, self._limits, TO_STANDBY)
            self._poller.register(self._primary.socket, zmq.POLLIN)  # a push waits for this standby's word
            self._primary.send(Attach(to.membership))

    def _write(self, snapshot: SaveSnapshot) -> dict[bytes, int]:
        self._snapshots.save(snapshot.count, snapshot.state, background=False)
        return snapshot.numbers

    def _look_at_snapshot(self) -> None:
        if self._writing is not None and self._writing.done():
            numbers, self._writing = self._writing.result(), None
            self._do(self.state.snapshot_written(numbers))
