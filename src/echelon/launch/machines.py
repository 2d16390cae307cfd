"""The rounds of a group on this machine, with others or alone: who holds their state, and who asks for it.

The first machine holds it, and opens what the ranks of a round find each other in: nothing in it is a pickle. A run
with servers has no rounds: there the other machines ask whether the first one, with the scheduler, is still the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import msgpack
import zmq

from echelon.core.address import Address
from echelon.core.errors import LEFT, UserError
from echelon.core.terms import Term, TermFolder, machine_prefix
from echelon.core.units import format_seconds
from echelon.launch.culprit import Elsewhere, Observed
from echelon.launch.meeting import (
    LIMITS,
    Admission,
    Arrival,
    Asker,
    MeetingRefusal,
    SecretSource,
    check_settings,
    why_silent,
)
from echelon.launch.rounds import (
    LOST_S,
    Continue,
    Left,
    Loss,
    Order,
    Over,
    Rendezvous,
    Round,
    RoundSettings,
    RoundsState,
    State,
    TermLead,
)
from echelon.launch.supervisor import FirstMachineGone
from echelon.launch.term_marks import MarkCopy, MarkLog, MarkNews, Marks
from echelon.messages.endpoint import Channel, Sender
from echelon.messages.framing import MAX_HEADER_BYTES, Content, Message, content, vocabulary
from echelon.messages.identity import derive_keys
from echelon.messages.plain import to_plain
from echelon.messages.sockets import new_context

BEAT_S = 0.5
AGAIN_S = 2.0
GOODBYE_S = 10.0
_POLL_MS = 50
_SOON_MS = 20
_TOLD_S = 30.0
_MOST_LOSSES = 100
_SOON_S = 0.02  # between questions while a member waits for what others say
_SILENT_S = 2 * LOST_S
_CALLS = 12  # of a stack in a report
_OBSERVED_BYTES = MAX_HEADER_BYTES // 2


@content(64)
class StateReport(Content):
    """Another machine's processes are in a state; `number` rises with each report.

    `observed` is what they are at, where one of them has not moved for long; `marks` are what members have said,
    and `losses` what is to be recorded of those of the last half minute, after which the others went on.
    """

    arrival: Arrival
    number: int
    state: State
    observed: tuple[Observed, ...] = ()
    marks: Marks = Marks()
    losses: tuple[Loss, ...] = ()


@content(65)
class StateOrder(Content):
    """What follows from the report `number`, for the machine with this number in the run.

    Attributes:
        checkpoints: of new steps, saved since the first machine's command began.
    """

    machine: int
    number: int
    order: Order
    news: MarkNews = MarkNews()
    checkpoints: int = 0


@dataclass(frozen=True)
class Succession:
    """What a machine goes on with where another one led.

    Attributes:
        lost: the name of the one that led.
        store: where ranks meet from now on.
    """

    state: RoundsState
    checkpoints: int
    lost: str
    store: str


class FirstMachine:
    """Holds the rendezvous; a machine that is alone is the first one. Where several may lead, the one that does.

    Other machines ask by the meeting's thread (`answer`), the supervisor by its own (`order`).

    Attributes:
        number: of the machine in the run.
        leads: it is the one that records the run.
    """

    number = 0
    leads = True
    has_left = False

    def __init__(self, arrival: Arrival, terms: RoundSettings, open_store: Callable[[str], str], scratch: Path) -> None:
        """Open rounds; `open_store` opens the store of one by its name, and returns where ranks find it.

        Args:
            scratch: a folder that this user alone can read, on this machine, for the terms of rounds.
        """
        self._arrival, self._terms, self._scratch = arrival, terms, scratch
        self._log: MarkLog | None = None
        self._checkpoints = 0
        self._told: set[tuple[str, Loss]] = set()
        self._news: list[Loss] = []
        self.open_store = open_store
        self._rendezvous = Rendezvous(terms, time.monotonic(), self)
        self._rendezvous.admit(arrival.machine, arrival.workers, time.monotonic())
        self._observed: dict[str, tuple[Observed, ...]] = {}  # by machine
        self._lock = threading.Lock()
        self._unheard: set[str] = set()

    def take_over(self, succession: Succession, copy: MarkCopy | None) -> None:
        """Go on where another machine led that is lost.

        Args:
            copy: of what members have said, as far as this machine has it; None: it has no members.
        """
        now, self._rendezvous = time.monotonic(), Rendezvous(self._terms, time.monotonic(), self)
        state, name = succession.state, self._arrival.machine
        self._checkpoints = succession.checkpoints
        self._rendezvous.take_over(state, name, succession.store, now)
        self.number = self._rendezvous.admit(name, self._arrival.workers, now)
        rounds = {p.machine: p.round for p in state.rounds}
        if copy is not None and copy.round == state.number and name in rounds:
            self._log = MarkLog(copy.folder, state.number)
        elif rounds and all(round_.elastic for round_ in rounds.values()):
            folder = TermFolder(self._scratch / f"{next(iter(rounds.values())).name}.led")
            folder.make(shared=True)
            self._log = MarkLog(folder, state.number)
        self._unheard = set(rounds) - {name, succession.lost}
        self._rendezvous.give_up(succession.lost, now)

    def begin_after(self, number: int) -> None:
        """Give rounds numbers above one that machines may still be in."""
        self._rendezvous.begin_after(number)

    def state(self) -> tuple[RoundsState, int]:
        """Return what another machine has to know to go on here, and how many checkpoints were saved."""
        with self._lock:
            return self._rendezvous.state(), self._checkpoints

    def publish(self, term: Term, number: int) -> bool:
        """Let members know a term of the round of a number, unless a newer one has begun; whether they can."""
        with self._lock:
            if self._log is None or self._log.round != number:
                return True
            newest = self._log.folder.newest()
            if newest is None or newest.number < term.number:
                with self._log.folder.patiently():
                    self._log.folder.publish(term)
            newest = self._log.folder.newest()
            return newest is not None and newest.number >= term.number

    def forgive(self) -> None:
        """Begin anew to count for how long machines are silent: this one could not listen."""
        with self._lock:
            self._rendezvous.forgive(time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self._rendezvous.over is not None

    @property
    def is_gathered(self) -> bool:
        """Whether all machines of a round that another one began have told what their members said, or are lost."""
        with self._lock:
            self._unheard &= set(self._rendezvous.others())
            return not self._unheard

    def lead(self, round_: Round) -> TermLead:
        """Return with what terms are made: they count at once."""
        return TermLead()

    def order(self, state: State) -> Order:
        """Return what follows from the state of this machine's processes."""
        with self._lock:
            return self._rendezvous.handle(self._arrival.machine, state, time.monotonic())

    def saved(self, checkpoints: int) -> None:
        """Note that checkpoints of new steps were saved."""
        with self._lock:
            self._checkpoints += checkpoints
            self._rendezvous.saved(checkpoints)

    def checkpoints_told(self) -> int:
        """Return none: the first machine's are seen here."""
        return 0

    def open_terms(self, round_: Round) -> TermFolder | None:
        """Make the folder of a round's terms; what members of other machines say comes there, too.

        Machines that come to a worker that began alone begin anew with it: it has no group to leave.
        """
        if round_.beside:  # it had led already, while its members were gone
            return self._log.folder if self._log is not None and self._log.round == round_.number else None
        has_others, folder = self._terms.most > 1, _term_folder(self._scratch, round_)
        is_elastic = not has_others or round_.environment["WORLD_SIZE"] != "1"
        if is_elastic:
            folder.make(shared=has_others)
        with self._lock:
            self._log = MarkLog(folder, round_.number) if is_elastic else None
        return folder if is_elastic else None

    def begin_anew(self) -> None:
        """Begin another round, because a machine is lost without which the others cannot go on."""
        with self._lock:
            self._rendezvous.begin_anew(time.monotonic())

    def tell(self, loss: Loss) -> None:
        """Do nothing: what is lost here is recorded here."""

    def news(self) -> list[Loss]:
        """Return what is to be recorded of other machines since the last call."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def lose(self, name: str, round_: Round) -> bool:
        """Let the others go on without a machine that is in a round; returns whether that is tried."""
        log = self._log
        is_own = name == self._arrival.machine
        if log is None or log.round != round_.number or is_own:
            return False
        log.folder.lose_machine(machine_prefix(round_.machine, round_.beside))
        if not self._terms.elastic:
            return False
        self._news.append(
            Loss(f"{name} is lost with its workers; the others go on, and they join them when it is back")
        )
        return True

    def was_asked_to_leave(self, round_: Round) -> bool:
        """Whether the members of a machine that is in a round were asked to leave, while the others go on."""
        prefix = machine_prefix(round_.machine, round_.beside)
        if self._log is None or self._log.round != round_.number or not prefix:
            return False
        return self._log.folder.machine_may_leave(prefix)

    def takes_in(self, number: int) -> bool | None:
        """Whether a machine may come beside the others in a round now; None: its machines begin and end together."""
        log = self._log
        ends_together = not self._terms.elastic or log is None or log.round != number
        return None if ends_together or log is None else not log.folder.is_closed

    def complain(self) -> bool:
        """Whether members have lost others, and nobody has said yet who that is."""
        if self._log is None:
            return False
        term = self._log.folder.newest()
        return self._log.folder.complains(term.number if term is not None else 0)

    def drain(self, ranks: Collection[int]) -> str:
        """Let the machines of some ranks leave after a checkpoint; returns why they cannot, or nothing."""
        with self._lock:
            return self._rendezvous.drain(ranks, time.monotonic())

    def resize(self, workers: int) -> None:
        """Begin later rounds with so many workers of this machine."""
        with self._lock:
            self._rendezvous.resize(self._arrival.machine, workers)

    @property
    def restarts_left(self) -> int:
        """How many restarts are left until a new checkpoint."""
        with self._lock:
            return self._rendezvous.restarts_left

    def answer(self, report: StateReport) -> StateOrder:
        """Return the order for another machine.

        Raises:
            UserError: it was started with other settings, or the run has all its machines.
        """
        arrival = report.arrival
        check_settings(self._arrival, arrival)
        with self._lock:
            now = time.monotonic()
            machine = self._rendezvous.admit(arrival.machine, arrival.workers, now)
            if self._log is None or report.marks.round == self._log.round:
                self._unheard.discard(arrival.machine)
            order = self._rendezvous.handle(arrival.machine, report.state, now)
            self._observed[arrival.machine] = report.observed
            for loss in report.losses:
                if (arrival.machine, loss) not in self._told:
                    self._told.add((arrival.machine, loss))
                    self._news.append(replace(loss, words=f"on {arrival.machine}: {loss.words}"))
            news = self._log.answer(report.marks) if self._log is not None else MarkNews()
            checkpoints = self._checkpoints
        return StateOrder(machine, report.number, order, news, checkpoints)

    def share(self, observed: Sequence[Observed]) -> None:
        """Do nothing: this machine judges."""

    def elsewhere(self) -> Elsewhere:
        """Return what the processes of the other machines are at."""
        with self._lock:
            told = [self._observed.get(name, ()) for name in self._rendezvous.others()]
        return Elsewhere(tuple(o for observed in told for o in observed), all(told))

    def close(self, reason: str = "") -> None:
        """End the run for the other machines, and wait a moment until each has heard it."""
        with self._lock:
            self._rendezvous.close(f"the first machine left the run{': ' if reason else ''}{reason}")
        ends = time.monotonic() + GOODBYE_S
        while time.monotonic() < ends and not self._all_know():
            time.sleep(0.05)

    def _all_know(self) -> bool:
        with self._lock:
            return self._rendezvous.all_know()


def _term_folder(scratch: Path, round_: Round) -> TermFolder:
    """Return the folder of a round's terms on this machine, which has a new one when it comes beside the others."""
    beside = f"-{round_.beside}" if round_.beside else ""
    return TermFolder(scratch / f"{round_.name}{beside}.terms")


def waits_for_return(first: str, most_s: float) -> str:
    """Return the sentence for who waits for a first machine that does not answer."""
    return (
        f"{first} gives no answer: waiting up to {format_seconds(most_s)} for its return (--machine-patience); if it "
        "does not come back by itself, give the run's command there again"
    )


def _fitting(observed: Sequence[Observed]) -> tuple[Observed, ...]:
    """Return what fits a report: with short stacks, and where there are very many without those least to blame."""
    short = [o.shortened(_CALLS) for o in observed]
    short.sort(key=lambda o: (o.waits, not o.is_stopped, -o.still_s))
    bytes_until = accumulate(len(msgpack.packb(to_plain(o))) for o in short)
    return tuple(o for o, size in zip(short, bytes_until, strict=True) if size <= _OBSERVED_BYTES)


class OtherMachine:
    """Asks the first machine, by messages that a thread sends again and again: they are its signs of life as well.

    Attributes:
        number: of the machine in the run, as far as it has been told.
    """

    leads = False

    def __init__(
        self,
        rendezvous: Address,
        secret: SecretSource,
        arrival: Arrival,
        terms: RoundSettings,
        scratch: Path,
        title: str = "the first machine",
    ) -> None:
        """Take the address of the first machine, and where the run's secret is, which may come later than this.

        Args:
            scratch: a folder that this user alone can read, on this machine, for the terms of rounds.
            title: what the other machine is called.
        """
        self._title = title
        self._rendezvous, self._secret, self._arrival, self._terms = rendezvous, secret, arrival, terms
        self._scratch = scratch
        self._context = new_context()
        self._channel: Channel | None = None
        self._connected = self._sent = 0.0
        self._number = 0  # of the newest question
        self._changed = threading.Condition()  # guards what follows
        self._state: State | None = None
        self._first_number = 0  # of the questions about this state
        self._order: Order | None = None
        self._observed: tuple[Observed, ...] = ()
        self._copy: MarkCopy | None = None
        self._losses: list[tuple[float, Loss]] = []
        self._checkpoints = self._checkpoints_taken = 0
        self._error: Exception | None = None
        self._known = False
        self.number = 1
        self._begun = self._heard = time.monotonic()
        self._reason = ""
        self._over = False
        self._turns_to: Address | None = None
        self._is_paused = False
        self._thread = threading.Thread(target=self._ask, name="echelon-machine", daemon=True)

    def order(self, state: State) -> Order:
        """Return what follows from the state of this machine's processes, or to go on while that is not known.

        Raises:
            UserError: there is no secret, no answer, or the first machine refuses this one.
        """
        with self._changed:
            if state != self._state:
                self._state, self._first_number, self._order = state, self._number + 1, None
            if not self._thread.is_alive() and self._error is None:
                self._thread.start()
            if self._order is None:
                self._changed.wait(_POLL_MS / 1000)
            if self._error is not None:
                raise self._error
            now, order = time.monotonic(), self._order
            is_silent = now - self._heard > LOST_S and not isinstance(order, Over)
            return self._unanswered(now) if order is None or is_silent else order

    def turn_to(self, address: Address) -> None:
        """Ask another machine from now on, which leads instead of the one before, and has yet to be told all."""
        with self._changed:
            self._turns_to, self._is_paused, self._order, self._state = address, False, None, None
            self._heard = time.monotonic()
            if self._copy is not None:
                self._copy = MarkCopy(self._copy.folder, self._copy.round)

    def pause(self) -> None:
        """Ask nobody: this machine leads."""
        with self._changed:
            self._is_paused = True

    def arrive_as(self, arrival: Arrival) -> None:
        """Say this of the machine from now on: it has changed while it led."""
        with self._changed:
            self._arrival = arrival

    @property
    def copy(self) -> MarkCopy | None:
        """What this machine has of what members said in the present round."""
        return self._copy

    def take_copy(self) -> MarkCopy | None:
        """Return what this machine has of what members said in the present round, and keep it no more."""
        with self._changed:
            copy, self._copy = self._copy, None
        return copy

    def lead(self, round_: Round) -> None:
        """Return nothing: the first machine makes the terms."""

    def share(self, observed: Sequence[Observed]) -> None:
        """Tell the first machine, with the next report, what this one's processes are at."""
        fitting = _fitting(observed)
        with self._changed:
            self._observed = fitting

    def elsewhere(self) -> Elsewhere:
        """Return nothing: the first machine judges."""
        return Elsewhere(is_complete=False)

    def saved(self, checkpoints: int) -> None:
        """Do nothing: the first machine counts restarts of the whole group, and sees what its first rank saves."""

    def checkpoints_told(self) -> int:
        """Return of how many new checkpoints the first machine has told since the last call."""
        with self._changed:
            new, self._checkpoints_taken = self._checkpoints - self._checkpoints_taken, self._checkpoints
        return new

    def tell(self, loss: Loss) -> None:
        """Let the first machine record what is lost here, after which the others go on."""
        with self._changed:
            self._losses.append((time.monotonic(), loss))

    def news(self) -> list[Loss]:
        """Return nothing: the first machine records."""
        return []

    def open_terms(self, round_: Round) -> TermFolder | None:
        """Make the folder of a round's terms, which is kept like that of the first machine."""
        if not (round_.elastic and self._terms.has_terms):
            return None
        folder = _term_folder(self._scratch, round_)
        folder.make(shared=True)
        with self._changed:
            self._copy = MarkCopy(folder, round_.number)
        return folder

    def begin_anew(self) -> None:
        """Do nothing: the first machine sees who is lost."""

    def drain(self, ranks: Collection[int]) -> str:
        """Return why nobody can leave by a word to this machine."""
        return "give this command on the first machine"

    @property
    def has_left(self) -> bool:
        """Whether this machine has left the run, as it was asked to."""
        return isinstance(self._order, Over) and self._order.status == LEFT

    def resize(self, workers: int) -> None:
        """Do nothing: members of groups that span machines do not leave."""

    @property
    def restarts_left(self) -> None:
        """Nothing: the first machine knows."""
        return None

    def _unanswered(self, now: float) -> Order:
        first, silent_s = f"{self._title} at {self._rendezvous}", now - self._heard
        if not self._known and now - self._begun > self._terms.arrival_s:
            waited = format_seconds(self._terms.arrival_s)
            reason = self._reason or why_silent(self._rendezvous, self._secret)
            raise UserError(f"--rendezvous {self._rendezvous}: {reason} (waited {waited}: --timeout)")
        if self._known and silent_s > self._terms.return_s:
            return Over("failed", f"{first} gave no answer for {silent_s:.0f} s (--machine-patience)")
        if self._known and silent_s > LOST_S:
            return Continue(waits_for_return(first, self._terms.return_s))
        return Continue(f"waiting for {first}: {self._reason}" if self._reason else "")

    def _ask(self) -> None:
        """Ask and take answers until the end, in a thread of its own."""
        try:
            while not self._over:
                now = time.monotonic()
                self._turn()
                self._connect(now)
                if self._channel is None or self._is_paused:
                    time.sleep(_POLL_MS / 1000)
                    continue
                with self._changed:
                    state, is_new = self._state, self._number < self._first_number
                waited_for = self._is_waited_for()
                if state is not None and (is_new or now - self._sent > (_SOON_S if waited_for else BEAT_S)):
                    self._send(state, now)
                self._channel.socket.poll(_SOON_MS if self._copy is not None else _POLL_MS)
                self._channel.pump(self._take)
        except (UserError, OSError, zmq.ZMQError) as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _turn(self) -> None:
        with self._changed:
            address, self._turns_to = self._turns_to, None
            if address is None:
                return
            self._rendezvous = address
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _is_waited_for(self) -> bool:
        copy = self._copy
        return copy is not None and copy.is_waited_for()

    def _connect(self, now: float) -> None:
        """Open the channel; anew while nothing was ever heard, for the secret may be of an earlier launch."""
        if self._channel is not None and (self._known or now - self._connected < AGAIN_S):
            return
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            self._reason = why_silent(self._rendezvous, self._secret)
        try:
            keys = derive_keys(self._secret.read())
        except UserError as error:
            self._reason = str(error)
            return
        known = vocabulary(StateOrder, MeetingRefusal)
        self._channel = Channel(self._context, Sender(keys, "machine"), f"tcp://{self._rendezvous}", LIMITS, known)
        self._connected, self._sent = now, 0.0

    def _send(self, state: State, now: float) -> None:
        assert self._channel is not None
        with self._changed:
            self._number, self._sent = self._number + 1, now
            observed, marks = self._observed, self._copy.tell() if self._copy is not None else Marks()
            losses = tuple(loss for t, loss in self._losses[-_MOST_LOSSES:] if now - t < _TOLD_S)
        self._channel.send(StateReport(self._arrival, self._number, state, observed, marks, losses))

    def _take(self, message: Message) -> None:
        answer = message.content
        if isinstance(answer, MeetingRefusal):
            raise UserError(answer.reason)
        assert isinstance(answer, StateOrder)
        with self._changed:
            if self._turns_to is not None or self._is_paused:  # it is of a machine that leads no more
                return
            if not self._known:
                self._checkpoints_taken = answer.checkpoints
            self._checkpoints = answer.checkpoints
            self._checkpoints_taken = min(
                self._checkpoints_taken, answer.checkpoints
            )  # its command may have begun anew
            self._known, self._heard, self._reason, self.number = True, time.monotonic(), "", answer.machine
            if self._copy is not None:
                self._copy.take(answer.news)
            if answer.number >= self._first_number:  # not an answer to a state of before
                self._order = answer.order
                self._changed.notify_all()

    def close(self, reason: str = "") -> None:
        """Tell the first machine that this one goes, unless the run is over."""
        self._over = True
        if self._thread.ident is not None:
            self._thread.join()
        if self._channel is not None:
            if self._known and not isinstance(self._order, Over):
                left = self._state if isinstance(self._state, Left) else Left(reason)
                self._send(left, time.monotonic())
            self._channel.socket.close(linger=int(1000 * AGAIN_S))
        self._context.destroy()


@dataclass(frozen=True)
class FirstMachineContact:
    """Where the first machine of a run answers, and to what.

    Attributes:
        scheduler: where the run's scheduler listens; another address is that of a run that began anew.
    """

    rendezvous: Address
    secret: SecretSource
    arrival: Arrival
    scheduler: str


class FirstMachineWatch:
    """Asks the first machine of a run with servers whether it is there, again and again, in a thread of its own."""

    def __init__(
        self, first: FirstMachineContact, say: Callable[[str], None], lost_s: float, patience_s: float
    ) -> None:
        """Begin to ask.

        Args:
            say: is told, once, that there is no answer.
            lost_s: after so long without an answer what runs here is given up.
            patience_s: how long will be waited then.
        """
        self._first, self._say, self._lost_s, self._patience_s = first, say, lost_s, patience_s
        self._heard_s, self._silent, self._begun_anew = time.monotonic(), False, False
        self._over = threading.Event()
        self._asker = Asker(first.rendezvous, first.secret, first.arrival)
        self._thread = threading.Thread(target=self._ask, name="echelon-first-machine", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Look at the answers so far; called again and again.

        Raises:
            FirstMachineGone: it gave none for too long, or has begun anew.
        """
        if self._begun_anew:
            raise FirstMachineGone
        silent_s, first = time.monotonic() - self._heard_s, f"the first machine at {self._first.rendezvous}"
        if silent_s > _SILENT_S and not self._silent:
            self._silent = True
            self._say(waits_for_return(first, self._patience_s))
        elif silent_s < _SILENT_S and self._silent:
            self._silent = False
            self._say(f"{first} answers again")
        if silent_s > max(self._lost_s, _SILENT_S):
            raise FirstMachineGone

    def _ask(self) -> None:
        while not self._over.wait(AGAIN_S):
            answer, _ = self._asker.ask()
            if isinstance(answer, Admission) and answer.scheduler == self._first.scheduler:
                self._heard_s = time.monotonic()
            elif isinstance(answer, Admission | MeetingRefusal):
                self._begun_anew = True
                return

    def close(self) -> None:
        """Ask no more."""
        self._over.set()
        self._thread.join()
        self._asker.close()
