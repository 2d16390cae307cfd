"""Strangers who connect and say nothing: few of them stay, and those with the run's keys are heard meanwhile."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from echelon.messages.connection_cap import most_unknown
from echelon.messages.endpoint import Channel, Listener, Sender, ask_once
from echelon.messages.framing import Message
from echelon.messages.identity import derive_keys
from echelon.messages.key_values import KeyAnswer, KeyRequest, Operation
from echelon.messages.sockets import Limits

KEYS = derive_keys(b"k" * 32)
LIMITS = Limits(1 << 20)
MOST = 16
STRANGERS = 300
DEADLINE_S = 30.0


@dataclass
class Echo:
    """A listener that answers each request, in a thread, until it is told to end."""

    listener: Listener
    over: threading.Event

    def serve(self) -> None:
        """Answer."""
        poller = zmq.Poller()
        self.listener.register(poller)
        while not self.over.is_set():
            poller.poll(20)
            self.listener.pump(self._answer)

    def _answer(self, peer: bytes, message: Message) -> None:
        assert isinstance(message.content, KeyRequest)
        self.listener.sender.reply(self.listener.socket, peer, KeyAnswer(message.content.number, is_there=True))


@pytest.fixture
def echo() -> Iterator[Echo]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = Listener(context, Sender(KEYS, "echo"), "tcp://127.0.0.1:0", LIMITS, {KeyRequest.kind: KeyRequest})
    assert listener.cap is not None
    listener.cap.most = MOST
    echo = Echo(listener, threading.Event())
    thread = threading.Thread(target=echo.serve)
    thread.start()
    yield echo
    echo.over.set()
    thread.join()
    listener.close()
    context.term()


def _until(done: Callable[[], bool]) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < ends, "not in time"
        time.sleep(0.01)


def _ask(channel: Channel, number: int) -> KeyAnswer:
    return ask_once(channel, KeyRequest("t", number, Operation.COUNT), KeyAnswer, DEADLINE_S)


def test_strangers_are_shut_and_a_peer_is_heard(echo: Echo) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address, cap = echo.listener.address, echo.listener.cap
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    assert cap is not None
    before = Channel(context, Sender(KEYS, "before"), address, LIMITS, {KeyAnswer.kind: KeyAnswer})
    assert _ask(before, 1).number == 1
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with ExitStack() as strangers:
        for _ in range(STRANGERS):
            strangers.enter_context(socket.create_connection((host, int(port)), timeout=DEADLINE_S))
        _until(lambda: cap.shut >= STRANGERS - MOST)
        _until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= open_before + STRANGERS + MOST)
        after = Channel(context, Sender(KEYS, "after"), address, LIMITS, {KeyAnswer.kind: KeyAnswer})
        assert _ask(after, 2).number == 2 and _ask(before, 3).number == 3
        after.close()
    before.close()
    context.term()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let handshakes have little time."""
    monkeypatch.setattr("echelon.messages.sockets.HANDSHAKE_MS", 200)


@pytest.mark.parametrize("word", [b"", b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"], ids=["nothing", "a greeting"])
def test_a_stranger_who_falls_silent_is_shut_in_time(impatient: None, echo: Echo, word: bytes) -> None:
    host, _, port = echo.listener.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
        stranger.sendall(word)
        while stranger.recv(1000):  # what it is greeted with, and then the end
            pass


def test_peers_are_never_shut(echo: Echo) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    names = [f"peer{i}" for i in range(3 * MOST)]
    channels = [
        Channel(context, Sender(KEYS, n), echo.listener.address, LIMITS, {KeyAnswer.kind: KeyAnswer}) for n in names
    ]
    assert [_ask(channel, i).number for i, channel in enumerate(channels)] == list(range(len(names)))
    assert [_ask(channel, i + 100).number for i, channel in enumerate(channels)] == [i + 100 for i in range(3 * MOST)]
    for channel in channels:
        channel.close()
    context.term()


def test_the_cap_leaves_room_for_a_processs_own_files() -> None:
    assert 8 <= most_unknown() <= 256 and os.sysconf("SC_OPEN_MAX") >= most_unknown()
