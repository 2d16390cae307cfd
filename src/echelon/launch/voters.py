"""A machine of a run of which several may lead: it follows the one that does, and leads where it is elected.

Each voter answers at its own address: reports of the others while it leads, ballots and the leader's beats, and what
members look for in their store. A thread asks the other voters. Whatever this machine was before, `FirstMachine` or
`OtherMachine` does the rest.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import zmq

from echelon.core.address import Address
from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.patience import Patience
from echelon.core.terms import Term, TermFolder
from echelon.core.units import format_seconds
from echelon.launch.culprit import Elsewhere, Observed
from echelon.launch.machines import FirstMachine, OtherMachine, StateOrder, StateReport, Succession
from echelon.launch.meeting import LIMITS, Arrival, AskLater, Meeting, SecretSource
from echelon.launch.record_copy import RecordCopy, RecordFeed
from echelon.launch.rounds import (
    LOST_S,
    SUSPECT_S,
    Continue,
    Go,
    Loss,
    Order,
    Over,
    Round,
    RoundSettings,
    State,
    TermLead,
)
from echelon.launch.voting import (
    BEAT_S,
    Ballot,
    BeatAnswer,
    Journal,
    LeaderBeat,
    LeaderName,
    LeaderQuestion,
    Vote,
    VoterState,
    Voting,
)
from echelon.messages.endpoint import Channel, Sender
from echelon.messages.framing import Content, Message, vocabulary
from echelon.messages.identity import RunKeys, derive_keys, make_secret
from echelon.messages.key_values import KeyValueTables
from echelon.messages.plain import Malformed, from_plain, to_plain
from echelon.messages.sockets import new_context
from echelon.records.going import take_launch_from_record

TERMS = 1_000_000  # more than one leader makes: the next one's terms have greater numbers
_POLL_MS, _SOON_MS = 50, 20
_TOKEN_FILE = "leader"
_SECRET_S = 0.5


@dataclass(frozen=True)
class VoterSetup:
    """Where a machine stands among those that may lead.

    Attributes:
        voters: their addresses, in the order in which they follow each other.
        own: the number of this machine among them; None: it is none of them.
        folder: of the run, where the leader keeps the record.
        shared: a folder of that, where secrets lie.
    """

    voters: tuple[Address, ...]
    own: int | None
    folder: Path
    shared: Path


@dataclass
class _Peer:
    """Another voter, as this one talks to it."""

    number: int
    channel: Channel
    sent_s: float = 0.0
    is_asked: bool = False  # and has not answered
    ballot: Ballot | None = None  # that it was asked last
    shares: bool = False
    feed: RecordFeed | None = None


@dataclass
class _Reign:
    """What this machine does while it leads.

    Attributes:
        members, round, after: of the round that another machine began: who is in it, its number, and that of its terms.
        pending: the newest term, with its round, until it counts.
    """

    first: FirstMachine
    token: str
    members: tuple[str, ...] = ()
    round: int = 0
    after: int = 0
    term: Term | None = None
    term_round: int = 0
    pending: bool = False
    holds: bool = False
    led_s: float = 0.0  # when more than half of the voters were heard last


class VoterMachine:
    """One machine of a run with several voters; the supervisor asks it what to do, as it asks any other.

    Attributes:
        number: see `OtherMachine`.
    """

    def __init__(
        self,
        setup: VoterSetup,
        secret: SecretSource,
        arrival: Arrival,
        terms: RoundSettings,
        scratch: Path,
        patience: Patience,
    ) -> None:
        """Take this machine's place; nothing is asked before the first `order`.

        Args:
            patience: with the disk of `setup.shared`; while it takes nothing this machine tells the others nothing.
        """
        self._setup, self._secret, self._arrival, self._terms, self._scratch = setup, secret, arrival, terms, scratch
        self._other = OtherMachine(setup.voters[0], secret, arrival, terms, scratch, "the machine that leads")
        self._tables = KeyValueTables()
        self._lock = threading.RLock()  # guards what follows
        self._voting: Voting | None = None
        self._reign: _Reign | None = None
        self._followed: int | None = None
        self._epoch = 0  # of the leader that is followed, where this machine is no voter
        self._copy = RecordCopy(setup.shared)
        self._saved: VoterState | None = None
        self._patience = patience
        self._error: Exception | None = None
        self._reason = ""
        self._begun = self._led_s = time.monotonic()
        self._has_met = self._over = False
        self._peers: list[_Peer] = []
        self._thread = threading.Thread(target=self._run, name="echelon-voters", daemon=True)

    # What the supervisor asks.

    @property
    def leads(self) -> bool:
        """Whether this machine records the run."""
        return self._reign is not None

    @property
    def number(self) -> int:
        """The number of this machine in the run, as far as it is known."""
        return self._now.number

    @property
    def _now(self) -> FirstMachine | OtherMachine:
        reign = self._reign
        return reign.first if reign is not None else self._other

    def order(self, state: State) -> Order:
        """Return what follows from the state of this machine's processes.

        Raises:
            UserError: the voters do not meet in time, or the leader refuses this machine.
        """
        if self._thread.ident is None:
            self._thread.start()
        if self._error is not None:
            raise self._error
        with self._lock:
            if self._reign is not None:
                return self._order_here(self._reign, state)
            if (waits := self._without_leader(time.monotonic())) is not None:
                return waits
        return self._other.order(state)

    def _order_here(self, reign: _Reign, state: State) -> Order:
        assert self._voting is not None
        now = time.monotonic()
        if self._voting.has_lease(now) or reign.first.is_over:
            reign.led_s = now
            return self._settled(reign, reign.first.order(state))
        silent = " and ".join(str(self._setup.voters[voter]) for voter in self._voting.silent(now))
        what = f"no answer of {silent}, and nobody goes on without more than half of the voters"
        waited_s = now - reign.led_s
        if waited_s > self._terms.return_s:
            return Over("failed", f"{what} (waited {waited_s:.0f} s: --machine-patience)")
        return Continue(f"{what}: waiting up to {format_seconds(self._terms.return_s)} (--machine-patience)")

    def _settled(self, reign: _Reign, order: Order) -> Order:
        """Return an order once what led to it would outlive this machine."""
        assert self._voting is not None
        outlives = self._write(reign) and self._voting.is_settled
        return Continue() if isinstance(order, Go) and not outlives else order

    def _without_leader(self, now: float) -> Order | None:
        """Return what this machine does while nobody leads; None: somebody does."""
        voting = self._voting
        if self._followed is not None and (voting is None or now - voting.heard_s <= LOST_S):
            self._has_met, self._led_s = True, now
            return None
        since, terms = now - self._led_s, self._terms
        if not self._has_met:
            half = "more than half of the voters" + ("" if self._setup.own == 0 else f", {self._setup.voters[0]} first")
            if since > terms.arrival_s:
                why = self._reason or f"a new run needs {half}"
                raise UserError(f"nobody leads the run: {why} (waited {format_seconds(terms.arrival_s)}: --timeout)")
            return Continue(f"waiting for {half}{f': {self._reason}' if self._reason else ''}")
        if since > terms.return_s:
            return Over("failed", f"nobody led the run for {since:.0f} s (--machine-patience)")
        patience = format_seconds(terms.return_s)
        return Continue(
            f"the machine that led gives no answer: waiting up to {patience} until more than half of the voters "
            "elect another one (--machine-patience)"
        )

    def lead(self, round_: Round) -> TermLead | None:
        """Return with what this machine makes the terms of a round; None: another one does, or it cannot yet."""
        with self._lock:
            reign = self._reign
            if reign is None or self._voting is None or self._setup.own is None or not reign.first.is_gathered:
                return None
            store, goes_on = str(self._setup.voters[self._setup.own]), round_.number == reign.round
            holds = not self._voting.has_lease(time.monotonic()) and not reign.first.is_over

        def propose(term: Term) -> None:
            """Let a term count as soon as more than half of the voters know it."""
            with self._lock:
                reign.term, reign.term_round, reign.pending = term, round_.number, True

        return TermLead(propose, reign.members if goes_on else (), reign.after if goes_on else 0, store, holds)

    def open_terms(self, round_: Round) -> TermFolder | None:
        """Make the folder of a round's terms."""
        return self._now.open_terms(round_)

    def saved(self, checkpoints: int) -> None:
        """Note that checkpoints of new steps were saved."""
        self._now.saved(checkpoints)

    def checkpoints_told(self) -> int:
        """Return of how many new checkpoints the leader has told since the last call."""
        return self._now.checkpoints_told()

    def begin_anew(self) -> None:
        """Begin another round, because a machine is lost without which the others cannot go on."""
        self._now.begin_anew()

    def tell(self, loss: Loss) -> None:
        """Let the leader record what is lost here, after which the others go on."""
        self._now.tell(loss)

    def news(self) -> list[Loss]:
        """Return what is to be recorded of other machines since the last call."""
        return self._now.news()

    def drain(self, ranks: Collection[int]) -> str:
        """Let the machines of some ranks leave after a checkpoint; returns why they cannot, or nothing."""
        return self._now.drain(ranks)

    def resize(self, workers: int) -> None:
        """Begin later rounds with so many workers of this machine, whoever leads them."""
        self._now.resize(workers)
        if self._reign is not None:
            self._arrival = replace(self._arrival, workers=workers)
            self._other.arrive_as(self._arrival)

    @property
    def has_left(self) -> bool:
        """Whether this machine has left the run, as it was asked to."""
        return self._now.has_left

    @property
    def restarts_left(self) -> int | None:
        """How many restarts are left until a new checkpoint; None: another machine counts them."""
        return self._now.restarts_left

    def share(self, observed: Sequence[Observed]) -> None:
        """Tell the leader, with the next report, what this machine's processes are at."""
        self._now.share(observed)

    def elsewhere(self) -> Elsewhere:
        """Return what the processes of the other machines are at, if this one judges."""
        return self._now.elsewhere()

    def close(self, reason: str = "") -> None:
        """Leave the run, and end it for the others if this machine leads."""
        now = self._now
        now.close(reason)
        self._over = True
        if self._thread.ident is not None:
            self._thread.join()
        if now is not self._other:
            self._other.close()

    # What others ask, by the meeting's thread.

    def answer(self, request: Content) -> Content:
        """Return the answer to another machine.

        Raises:
            UserError: it was started with other settings, or the run has all its machines.
        """
        with self._lock:
            voting, now = self._voting, time.monotonic()
            assert voting is not None
            match request:
                case StateReport():
                    return self._answer_report(request, now)
                case Ballot():
                    answer: Content = voting.handle_ballot(request, now)
                case LeaderBeat():
                    answer = self._answer_beat(request, voting, now)
                case _:
                    hears = voting.hears_leader(now) and voting.leader is not None
                    return LeaderName(voting.epoch, voting.leader + 1 if hears and voting.leader is not None else 0)
            self._follow(now)
            return answer if self._keep() else AskLater()

    def _answer_report(self, report: StateReport, now: float) -> Content:
        reign, voting = self._reign, self._voting
        if reign is None or voting is None or not (voting.has_lease(now) or reign.first.is_over):
            return AskLater()
        answer = reign.first.answer(report)
        order = self._settled(reign, answer.order)
        return StateOrder(answer.machine, answer.number, order, answer.news, answer.checkpoints)

    def _answer_beat(self, beat: LeaderBeat, voting: Voting, now: float) -> BeatAnswer:
        assert self._setup.own is not None
        stamp, shares = voting.state.journal.stamp, False
        if voting.handle_beat(beat, now):
            stamp, shares = voting.state.journal.stamp, self._token() == beat.token
            if beat.chunk is not None and not shares:
                self._copy.take(beat.chunk)
        return BeatAnswer(
            voting.epoch, self._setup.own, beat.number, stamp, shares, self._copy.feed, self._copy.position
        )  # fmt: skip

    def _token(self) -> str:
        try:
            return (self._setup.shared / _TOKEN_FILE).read_text()
        except OSError:
            return ""

    # The thread's work.

    def _run(self) -> None:
        context = new_context()
        try:
            keys = self._wait_for_secret()
            if keys is None:
                return
            if self._setup.own is None:
                self._look_for_leader(context, keys)
            else:
                self._vote(context, keys)
        except (UserError, OSError, zmq.ZMQError) as error:
            self._error = error
        finally:
            for peer in self._peers:
                peer.channel.close()
                if peer.feed is not None:
                    peer.feed.close()
            context.destroy()

    def _wait_for_secret(self) -> RunKeys | None:
        """Return the keys of the run, whose secret may come later than this machine; None: the run is over."""
        while not self._over:
            try:
                if self._setup.own == 0 and not self._secret.trusted_network:
                    return derive_keys(make_secret(self._secret.folder))
                return derive_keys(self._secret.read())
            except UserError as error:
                self._reason = str(error)
            time.sleep(_SECRET_S)
        return None

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], keys: RunKeys) -> zmq.Poller:
        known, poller = vocabulary(Vote, BeatAnswer, LeaderName), zmq.Poller()
        for number, address in enumerate(self._setup.voters):
            if number != self._setup.own:
                channel = Channel(context, Sender(keys, "voter"), f"tcp://{address}", LIMITS, known)
                self._peers.append(_Peer(number, channel))
                poller.register(channel.socket, zmq.POLLIN)
        return poller

    def _vote(self, context: zmq.Context[zmq.Socket[bytes]], keys: RunKeys) -> None:
        """Take part in elections, and tell the other voters what they lack while this machine leads, to the end."""
        own, voters = self._setup.own, self._setup.voters
        assert own is not None
        self._voting = Voting(len(voters), own, self._read_state(), time.monotonic())
        self._reason = ""
        requests = (StateReport, Ballot, LeaderBeat, LeaderQuestion)
        secret = self._secret.read()
        poller = self._connect(context, keys)
        with Meeting[Content](voters[own], secret, requests, self.answer, self._tables):
            while not self._over:
                with self._lock:
                    self._speak(self._voting, time.monotonic())
                poller.poll(_SOON_MS if self._voting.leads else _POLL_MS)
                for peer in self._peers:
                    peer.channel.pump(lambda message, peer=peer: self._take(peer, message))  # type: ignore[misc]

    def _speak(self, voting: Voting, now: float) -> None:
        """Say what is to be said now."""
        reign = self._reign
        if reign is None:
            ballot = voting.ballot(now, now - voting.heard_s > SUSPECT_S and self._complains())
            for peer in self._peers if self._keep() and ballot is not None else ():
                if now - peer.sent_s > BEAT_S or peer.ballot != ballot:
                    peer.ballot = ballot
                    self._send(peer, ballot, now)
            return
        if reign.holds and voting.has_lease(now):
            reign.first.forgive()
        reign.holds = not voting.has_lease(now)
        if not self._write(reign):
            return
        self._publish(reign, voting)
        for peer in self._peers:
            has_lines = not peer.is_asked and self._has_lines(peer)  # to who is silent little is sent
            if now - peer.sent_s > BEAT_S or (not peer.is_asked and (has_lines or voting.lacks(peer.number))):
                chunk = peer.feed.chunk() if peer.feed is not None and has_lines else None
                self._send(peer, replace(voting.beat(peer.number, reign.token, now), chunk=chunk), now)

    def _send(self, peer: _Peer, content: Content | None, now: float) -> None:
        if content is not None:
            peer.channel.send(content)
            peer.sent_s, peer.is_asked = now, True

    def _has_lines(self, peer: _Peer) -> bool:
        return peer.feed is not None and not peer.shares and peer.feed.has_more()

    def _complains(self) -> bool:
        copy = self._other.copy
        if copy is None:
            return False
        term = copy.folder.newest()
        return copy.folder.complains(term.number if term is not None else 0)

    def _take(self, peer: _Peer, message: Message) -> None:
        with self._lock:
            voting, answer, now = self._voting, message.content, time.monotonic()
            assert voting is not None
            peer.is_asked = False
            if isinstance(answer, Vote):
                if voting.take_vote(answer, now):
                    self._reign = self._take_lead(voting)
            elif isinstance(answer, BeatAnswer):
                voting.take_answer(answer)
                if self._reign is not None and peer.feed is not None:
                    peer.shares = answer.shares
                    if not peer.feed.take(answer.feed, answer.position) and not answer.shares:
                        peer.feed.close()
                        peer.feed = RecordFeed(self._setup.folder)
            self._follow(now)

    def _take_lead(self, voting: Voting) -> _Reign:
        """Lead from now on; what the one before has begun goes on."""
        own = self._setup.own
        assert own is not None
        address, journal = self._setup.voters[own], voting.state.journal
        self._copy.become_record(self._setup.folder)

        def open_table(name: str) -> str:
            """Begin the table of a round."""
            self._tables.open(name)
            return f"meeting:{address}"

        token = uuid4().hex
        first = FirstMachine(self._arrival, self._terms, open_table, self._scratch)
        reign = _Reign(first, token, led_s=time.monotonic())
        self._other.pause()
        state = journal.rounds
        if voting.has_followed and state is not None:
            take_launch_from_record(self._setup.folder)
            if state.rounds:
                self._tables.open(next(iter(state.rounds)).round.name)
            succession = Succession(state, journal.checkpoints, journal.leader, f"meeting:{address}")
            reign.first.take_over(succession, self._other.take_copy())
            reign.members = journal.term.members if journal.term is not None else tuple(state.members())
            reign.round, reign.after = state.number, (voting.epoch - 1) * TERMS
        elif state is not None:
            reign.first.begin_after(state.number)
        write_atomic(self._setup.shared / _TOKEN_FILE, token)
        for peer in self._peers:
            peer.shares, peer.is_asked, peer.feed = False, False, RecordFeed(self._setup.folder)
        self._has_met = True
        self._followed = None
        return reign

    def _follow(self, now: float) -> None:
        """Be what the voting says."""
        voting = self._voting
        assert voting is not None
        if self._reign is not None and not voting.leads:  # another one was elected: what runs here ends
            self._reign = None
            self._tables.open("")
            self._led_s, self._followed = now, None
            for peer in self._peers:
                if peer.feed is not None:
                    peer.feed.close()
                peer.feed = None
        if not voting.leads and voting.leader is not None and voting.leader != self._followed:
            self._followed = voting.leader
            self._other.turn_to(self._setup.voters[voting.leader])

    def _write(self, reign: _Reign) -> bool:
        """Note in the journal what has been decided since; returns what `_keep` does."""
        voting = self._voting
        assert voting is not None
        state, checkpoints = reign.first.state()
        term = reign.term if reign.term_round == state.number else None
        if term is None and reign.round == state.number:
            term = voting.state.journal.term
        voting.write(Journal(leader=self._arrival.machine, rounds=state, term=term, checkpoints=checkpoints))
        return self._keep()

    def _publish(self, reign: _Reign, voting: Voting) -> None:
        """Let the newest term begin, once it outlives this machine."""
        term, counts = reign.term, voting.is_settled and voting.has_lease(time.monotonic())
        if reign.pending and term is not None and counts and voting.state.journal.term == term:
            reign.pending = not reign.first.publish(term, reign.term_round)

    def _keep(self) -> bool:
        """Have on the disk what may be told to others from then on; returns whether it is there.

        Raises:
            OSError: the disk fails for good.
            UserError: it has failed for longer than patience lasts.
        """
        assert self._voting is not None
        file, now = self._state_file, self._voting.state
        if now is not self._saved:
            if not self._patience.attempt(file.name, lambda: write_atomic(file, json.dumps(to_plain(now)))):
                return False
            self._saved = now
        return True

    @property
    def _state_file(self) -> Path:
        return self._setup.shared / f"voter-{self._setup.own}.json"

    def _read_state(self) -> VoterState:
        try:
            return from_plain(VoterState, json.loads(self._state_file.read_text()))
        except FileNotFoundError:
            return VoterState()
        except (Malformed, ValueError) as error:
            raise UserError(f"{self._state_file} is damaged ({error}): remove it on this machine alone") from None

    def _look_for_leader(self, context: zmq.Context[zmq.Socket[bytes]], keys: RunKeys) -> None:
        """Ask the voters who leads, to the end, where this machine is none of them."""
        poller, asked_s = self._connect(context, keys), 0.0
        self._reason = ""
        while not self._over:
            if (now := time.monotonic()) - asked_s > BEAT_S:
                asked_s = now
                for peer in self._peers:
                    peer.channel.send(LeaderQuestion())
            poller.poll(_POLL_MS)
            for peer in self._peers:
                peer.channel.pump(self._hear)

    def _hear(self, message: Message) -> None:
        answer = message.content
        if not isinstance(answer, LeaderName) or not 0 < answer.leader <= len(self._setup.voters):
            return
        with self._lock:
            leader = answer.leader - 1
            if answer.epoch > self._epoch or (answer.epoch == self._epoch and self._followed is None):
                self._epoch = answer.epoch
                if leader != self._followed:
                    self._followed = leader
                    self._other.turn_to(self._setup.voters[leader])
