"""Where the machines of a run meet: the first one tells the others their numbers, or what their processes shall do.

The first machine answers at the rendezvous for as long as its run goes. The socket is encrypted with the run's keys, so
only who has the run's secret is answered at all. A machine that comes back gets the numbers that it had before, and so
its servers find their snapshots and the scheduler knows their names.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import psutil
import zmq

from echelon.core.address import Address
from echelon.core.errors import UserError
from echelon.core.patience import may_pass
from echelon.core.units import format_seconds
from echelon.launch.addresses import listening_addresses
from echelon.messages.endpoint import Channel, Listener, Sender, ask_once
from echelon.messages.framing import Content, Message, content, vocabulary
from echelon.messages.identity import PUBLIC_SECRET, SECRET_VARIABLE, derive_keys, read_secret
from echelon.messages.key_values import KeyRequest, KeyValueTables
from echelon.messages.sockets import Limits, new_context

LIMITS = Limits(1 << 20, queued=1000)
_POLL_MS = 200
_ASK_S = 2.0
_AGAIN_S = 0.3
_LOOK_S = 1.0
_GREETING = 10  # bytes that ZeroMQ says first, whoever asks: 0xff, eight others, 0x7f (ZMTP 3.1, section 3.3)


@dataclass(frozen=True)
class SecretSource:
    """Where a machine has the run's secret from: the environment or a file in `folder`, or it needs none."""

    folder: Path
    trusted_network: bool = False

    def read(self) -> bytes:
        """Return the secret.

        Raises:
            UserError: it is not there yet, or is not one.
        """
        return PUBLIC_SECRET if self.trusted_network else read_secret(self.folder)

    @property
    def no_answer(self) -> str:
        """What may be wrong where the first machine does not answer."""
        if self.trusted_network:
            return "no answer: the run must go on there, with --trusted-network as here"
        return (
            f"no answer: the run must go on there, and the secret ({SECRET_VARIABLE}, else the file in {self.folder}) "
            "must be the one of the first machine"
        )


RequestT = TypeVar("RequestT", bound=Content)


@content(60)
class Arrival(Content):
    """What a machine says of itself: a name that stays when it comes back, its workers, and its settings.

    Settings that begin with no `--` are versions, by what they are of, and the data. As a message it asks for the
    machine's place.

    Attributes:
        since: the first `Admission.epoch` that it is for: above that of the launch that ended here, to train more.
    """

    machine: str
    workers: int
    settings: dict[str, str]
    since: int = 0


@content(61)
class Admission(Content):
    """One machine's part: its number, that of its first worker, and where the scheduler listens (empty: here).

    Attributes:
        epoch: counted from 0, in which this launch of all machines begins (of a run that trains more from one on).
    """

    machine: int = 0
    first_worker: int = 0
    scheduler: str = ""
    epoch: int = 0


@content(62)
class AskLater(Content):
    """There is nothing to tell yet."""


@content(63)
class MeetingRefusal(Content):
    """The first machine does not take the one that asked."""

    reason: str


@dataclass(frozen=True)
class Shape:
    """How many machines take part, and which servers there are: known to all machines before they meet."""

    least: int
    most: int
    servers: int
    replicas: int

    def servers_of(self, machine: int) -> list[int]:
        """Return the servers of a machine: they are spread over the machines that every start waits for."""
        return [i for i in range(self.servers) if i % self.least == machine]

    def standbys_of(self, machine: int) -> list[int]:
        """Return the standbys of a machine: each on another one than its server, where there are several.

        >>> shape = Shape(least=2, most=2, servers=2, replicas=1)
        >>> [(shape.servers_of(m), shape.standbys_of(m)) for m in range(2)]
        [([0], [1]), ([1], [0])]
        """
        return [i for i in range(self.servers * self.replicas) if (i + 1) % self.least == machine]


class Register:
    """Which machine has which number. Pure bookkeeping: the first entry is the first machine itself."""

    def __init__(self, shape: Shape, first: Arrival, epoch: int = 0) -> None:
        """Take how many machines there are; `epoch`: see `Admission`."""
        self._shape, self._first, self._epoch = shape, first, epoch
        self._places: dict[str, Admission] = {first.machine: Admission()}
        self._workers: dict[str, int] = {first.machine: first.workers}

    def admit(self, arrival: Arrival) -> Admission:
        """Give a machine its place.

        Raises:
            UserError: the run has all its machines, or this one was started with other settings.
        """
        check_settings(self._first, arrival)
        known = self._places.get(arrival.machine)
        if known is not None and arrival.workers == self._workers[arrival.machine]:
            return known
        if known is not None:
            raise UserError(
                f"{arrival.machine} comes back with {arrival.workers} workers, and had "
                f"{self._workers[arrival.machine]}: use that --workers"
            )
        if len(self._places) >= self._shape.most:
            raise UserError(f"the run has its {self._shape.most} machines already: use a larger --nodes on all of them")
        place = Admission(len(self._places), sum(self._workers.values()))
        self._places[arrival.machine], self._workers[arrival.machine] = place, arrival.workers
        return place

    def answer(self, scheduler_file: Path, arrival: Arrival) -> Admission | AskLater:
        """Return a machine's admission, or that it shall wait for the scheduler's address.

        Raises:
            UserError: it is not admitted.
        """
        if not scheduler_file.exists() or arrival.since > self._epoch:  # this launch is the one that ended there
            return AskLater()
        address = str(json.loads(scheduler_file.read_text())["address"])
        return replace(self.admit(arrival), scheduler=address, epoch=self._epoch)


def check_settings(first: Arrival, arrival: Arrival) -> None:
    """Refuse a machine that was started with other settings, or has other versions, than the first one.

    Raises:
        UserError: names the setting and both values.
    """
    for name, value in first.settings.items():
        if arrival.settings.get(name) == value:
            continue
        if not name.startswith("--"):
            has = arrival.settings.get(name, "another one")
            raise UserError(f"{arrival.machine} has {name} {has}, the first machine has {value}: use the same on all")
        here, there = (text if text != "" else '""' for text in (arrival.settings.get(name), value))
        raise UserError(
            f"{arrival.machine} was started with {name} {here}, the first machine with {there}: start the same command "
            "on each machine"
        )


class Meeting(Generic[RequestT]):
    """The first machine's side, in a thread of its own: `with Meeting(...)`."""

    def __init__(
        self,
        rendezvous: Address,
        secret: bytes,
        requests: type[RequestT] | tuple[type[RequestT], ...],
        answer: Callable[[RequestT], Content],
        tables: KeyValueTables | None = None,
    ) -> None:
        """Bind to the port of `rendezvous`, on this machine's address and, where its name leads there, on loopback.

        Args:
            requests: what the other machines ask.
            answer: is called by the thread, and may refuse by a `UserError`.
            tables: where the ranks of all machines find each other.

        Raises:
            UserError: the port is taken.
        """
        self._requests = requests if isinstance(requests, tuple) else (requests,)
        self._answer, self._tables = answer, tables or KeyValueTables()
        self._context = new_context()
        self._sender = Sender(derive_keys(secret), "meeting")
        try:
            first, *others = (f"tcp://{host}:{rendezvous.port}" for host in listening_addresses(rendezvous))
            known = vocabulary(*self._requests, KeyRequest)
            self.listener = Listener(self._context, self._sender, first, LIMITS, known)
            self.listener.listen_also(others)
        except zmq.ZMQError as error:
            self._context.destroy()
            taken = error.errno == zmq.EADDRINUSE
            reason = "the port is taken by another program" if taken else error.strerror
            raise UserError(f"--rendezvous {rendezvous}: {reason}; choose another, the same on all machines") from None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="echelon-meeting", daemon=True)

    def __enter__(self) -> Meeting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def _serve(self) -> None:
        poller = zmq.Poller()
        self.listener.register(poller)
        try:
            while not self._over.is_set():
                poller.poll(_POLL_MS)
                self.listener.pump(self._take)
        finally:
            self.listener.close()
            self._context.destroy()

    def _take(self, peer: bytes, message: Message) -> None:
        if isinstance(message.content, KeyRequest):
            self._sender.reply(self.listener.socket, peer, self._tables.handle(message, message.content))
            return
        assert isinstance(message.content, self._requests)
        try:
            answer = self._answer(message.content)
        except UserError as error:
            answer = MeetingRefusal(str(error))
        except OSError as error:  # the thread goes on in any case: nobody else answers
            answer = AskLater() if may_pass(error) else MeetingRefusal(f"the first machine: {error}")
        self._sender.reply(self.listener.socket, peer, answer)


def join_meeting(
    rendezvous: Address,
    secret: SecretSource,
    arrival: Arrival,
    deadline_s: float,
    say: Callable[[str], None],
    flag: str = "--timeout",
) -> Admission:
    """Ask the first machine for this one's place; the secret may come later than this machine.

    Args:
        rendezvous: of the first machine.
        say: is told, once, what is waited for.
        flag: what the deadline is set with.

    Raises:
        UserError: no secret, no answer in time, or the first machine refuses this one.
    """
    ends, said = time.monotonic() + deadline_s, False
    with closing(Asker(rendezvous, secret, arrival)) as asker:
        while True:
            answer, why = asker.ask()
            if isinstance(answer, MeetingRefusal):
                raise UserError(answer.reason)
            if isinstance(answer, Admission):
                return answer
            if why == secret.no_answer:
                why = why_silent(rendezvous, secret)
            if time.monotonic() + _ASK_S > ends:
                waited = f"waited {format_seconds(deadline_s)}; {flag} says how long"
                raise UserError(f"--rendezvous {rendezvous}: {why} ({waited})")
            if not said:
                say(f"waiting for the first machine at {rendezvous}: {why}")
                said = True
            time.sleep(_AGAIN_S)


class Asker:
    """Asks the first machine for this one's place, as often as it is told to.

    Without files to open it asks later: a new context of ZeroMQ's would abort the process then.
    """

    def __init__(self, rendezvous: Address, secret: SecretSource, arrival: Arrival) -> None:
        self._address, self._secret, self._arrival = f"tcp://{rendezvous}", secret, arrival
        self._context = new_context()
        self._context.socket(zmq.DEALER).close()  # from now on it has its threads

    def ask(self) -> tuple[Content, str]:
        """Ask once; returns the answer, or where there is none, to ask later and why."""
        known = vocabulary(Admission, AskLater, MeetingRefusal)
        try:
            sender = Sender(derive_keys(self._secret.read()), "machine")
            line = Channel(self._context, sender, self._address, LIMITS, known)
        except UserError as error:
            return AskLater(), str(error)
        except zmq.ZMQError as error:
            return AskLater(), f"cannot ask: {error.strerror}"
        try:
            return ask_once(line, self._arrival, Content, _ASK_S), "its scheduler is not there yet"
        except TimeoutError:
            return AskLater(), self._secret.no_answer
        finally:
            line.close()

    def close(self) -> None:
        """Ask no more."""
        self._context.destroy()


def why_silent(rendezvous: Address, secret: SecretSource) -> str:
    """Say what is wrong where the first machine gives no answer, as far as a connection without keys tells."""
    try:
        line = socket.create_connection((rendezvous.host, rendezvous.port), _LOOK_S)
    except OSError as error:
        why = "the first machine must be at this host and port, and may not have begun yet"
        return f"nothing answers there ({error.strerror or error}): {why}"
    with line, line.makefile("rb") as stream, suppress(OSError):
        greeting = stream.read(_GREETING)
        if len(greeting) == _GREETING and (greeting[0], greeting[-1]) == (0xFF, 0x7F):
            return secret.no_answer
    return "what listens there is another service, no run: name the first machine, and a port that is free there"


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address; empty when none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == address for a in addresses):
            return name
    return ""
