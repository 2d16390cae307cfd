"""Which of a run's voters leads it: pure state, as one of them sees it, with what they say to each other.

As in Raft (Ongaro and Ousterhout, 2014): who leads an *epoch* has the votes of more than half of the voters, of which
each votes at most once in it. What the leader decides stands in its journal, and counts once more than half have it;
a voter votes for nobody whose journal is older than its own. So the next leader knows all that counts.

Before a ballot there is a trial, which changes nothing: a voter that hears nobody does not raise epochs in vain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from echelon.core.terms import Term
from echelon.launch.record_copy import RecordChunk
from echelon.launch.rounds import LOST_S, SUSPECT_S, RoundsState
from echelon.messages.framing import Content, content

BEAT_S = 0.3  # between signs of life of the leader, and between ballots
LEASE_S = 2.0  # less than `SUSPECT_S`: who leads stops to decide before others vote for another one
STAND_S = 1.0  # for which a ballot is held, and by which each voter stands later than the one before it in the list
_MOST_SENT = 256


@dataclass(frozen=True, order=True)
class Stamp:
    """Orders journals: a later leader's is newer, whatever the version."""

    epoch: int = 0
    version: int = 0


@dataclass(frozen=True)
class Journal:
    """What the next leader has to know.

    Attributes:
        leader: the name of the machine that wrote it.
        term: the newest one, which may not have begun.
    """

    stamp: Stamp = Stamp()
    leader: str = ""
    rounds: RoundsState | None = None
    term: Term | None = None
    checkpoints: int = 0


@dataclass(frozen=True)
class VoterState:
    """What a voter has to know after its own restart.

    Attributes:
        voted_for: in this epoch: a voter's number plus 1; 0: nobody yet.
    """

    epoch: int = 0
    voted_for: int = 0
    journal: Journal = Journal()


@content(68)
class Ballot(Content):
    """A voter wants to lead in an epoch; `is_trial`: it asks whether it would be voted for."""

    epoch: int
    candidate: int
    stamp: Stamp
    is_trial: bool


@content(69)
class Vote(Content):
    """What a voter says to the ballot of an epoch; `epoch` is its own."""

    ballot: int
    is_trial: bool
    voter: int
    is_granted: bool
    epoch: int


@content(70)
class LeaderBeat(Content):
    """A sign of life of the leader, with what the voter lacks.

    Attributes:
        number: rises with each.
        token: lies in the leader's folder; who sees it there shares the folder.
    """

    epoch: int
    leader: int
    number: int
    token: str
    journal: Journal | None = None
    chunk: RecordChunk | None = None


@content(71)
class BeatAnswer(Content):
    """What a voter has, after the beat of a number.

    Attributes:
        feed, position: how far its copy of the record is.
    """

    epoch: int
    voter: int
    number: int
    stamp: Stamp
    shares: bool = False
    feed: str = ""
    position: int = 0


@content(72)
class LeaderQuestion(Content):
    """Who leads?"""


@content(73)
class LeaderName(Content):
    """The voter that leads in an epoch, by its number plus 1; 0: not known."""

    epoch: int
    leader: int


class Voting:
    """One voter's part. Its clock is any that rises, in seconds.

    Attributes:
        state: is to be on the disk before anything is answered.
        leader: the voter that leads, as far as this one knows.
        heard_s: when the leader was heard last, or a vote was given.
        has_followed: it has heard a leader since this process began, so what that one wrote is of now.
    """

    def __init__(self, voters: int, voter: int, known: VoterState, now: float) -> None:
        self._voters, self._own, self.state = voters, voter, known
        self.leader: int | None = None
        self.heard_s, self.has_followed = now, False
        self._begun_s = now
        self._quiet_until = now + SUSPECT_S if known.epoch else now  # it may have heard the leader just before
        self._standing: Ballot | None = None
        self._votes: set[int] = set()
        self._stood_s = self._stands_until = 0.0
        self._number = 0
        self._sent_s: dict[int, float] = {}  # by number of a beat
        self._acknowledged_s: dict[int, float] = {}  # when the newest beat left that a voter has answered
        self._stamps: dict[int, Stamp] = {}

    @property
    def epoch(self) -> int:
        """The newest epoch that this voter knows."""
        return self.state.epoch

    @property
    def leads(self) -> bool:
        """Whether this voter was elected, and has not heard of a newer epoch."""
        return self.leader == self._own

    @property
    def _majority(self) -> int:
        return self._voters // 2 + 1

    def hears_leader(self, now: float) -> bool:
        """Whether there is a leader that this voter has heard, or, if it leads, that more than half have heard."""
        if self.leads:
            return self.has_lease(now)
        return self.leader is not None and now - self.heard_s <= SUSPECT_S

    def ballot(self, now: float, complains: bool = False) -> Ballot | None:
        """Return what the other voters are to be asked, again and again; None: nothing.

        Args:
            complains: members here have lost others.
        """
        if self.leads:
            return None
        if self._standing is None or now > self._stands_until:
            if now < self._stands_at(complains):
                self._standing = None
                return None
            self._standing = Ballot(self.epoch + 1, self._own, self.state.journal.stamp, is_trial=True)
            self._votes, self._stands_until = {self._own}, now + STAND_S
        return self._standing

    def _stands_at(self, complains: bool) -> float:
        """Return when this voter stands: the first one of a new run at once, others once the leader is lost."""
        if not self.epoch:
            return self._begun_s if self._own == 0 else math.inf
        if self.heard_s == self._begun_s and self.state.voted_for == self._own + 1:  # it led when it ended
            return self._begun_s
        place = self._own - (self.leader is not None and self.leader < self._own)
        return self.heard_s + (SUSPECT_S if complains else LOST_S) + STAND_S * place

    def handle_ballot(self, ballot: Ballot, now: float) -> Vote:
        """Return what this voter says to a ballot."""
        again = ballot.epoch == self.epoch and self.state.voted_for == ballot.candidate + 1
        is_open = ballot.epoch > self.epoch or (ballot.epoch == self.epoch and not self.state.voted_for)
        may = is_open and ballot.stamp >= self.state.journal.stamp
        granted = (again and not ballot.is_trial) or (may and not self.hears_leader(now) and now >= self._quiet_until)
        if granted and not ballot.is_trial and not again:
            self.state = replace(self.state, epoch=ballot.epoch, voted_for=ballot.candidate + 1)
            self.leader, self._standing = None, None
            self.heard_s, self._quiet_until = now, now + SUSPECT_S
        return Vote(ballot.epoch, ballot.is_trial, self._own, granted, self.epoch)

    def take_vote(self, vote: Vote, now: float) -> bool:
        """Take an answer to this voter's ballot; returns whether it leads from now on."""
        self._see(vote.epoch)
        standing = self._standing
        if standing is None or (vote.ballot, vote.is_trial) != (standing.epoch, standing.is_trial):
            return False
        if not vote.is_granted or now > self._stands_until:
            return False
        self._votes.add(vote.voter)
        if len(self._votes) < self._majority:
            return False
        if standing.is_trial:
            self.state = replace(self.state, epoch=standing.epoch, voted_for=self._own + 1)
            self._standing, self._votes = replace(standing, is_trial=False), {self._own}
            self._stood_s, self._stands_until = now, now + STAND_S * (1 + self._own)
            return False
        self.leader, self._standing = self._own, None
        self._acknowledged_s = dict.fromkeys(self._votes, self._stood_s)
        self._stamps, self._sent_s = {}, {}
        return True

    def _see(self, epoch: int) -> None:
        """Take note of an epoch: nobody leads in it as far as is known."""
        if epoch > self.epoch:
            self.state = replace(self.state, epoch=epoch, voted_for=0)
            self.leader, self._standing = None, None

    def write(self, journal: Journal) -> None:
        """Note what the leader, which is this voter, has decided; its stamp is given here."""
        before = self.state.journal
        stamp = Stamp(self.epoch, before.stamp.version + 1)
        if before.stamp.epoch != self.epoch or replace(journal, stamp=before.stamp) != before:
            self.state = replace(self.state, journal=replace(journal, stamp=stamp))

    def beat(self, voter: int, token: str, now: float) -> LeaderBeat:
        """Return a sign of life for another voter, with the journal if it lacks that."""
        self._number += 1
        self._sent_s[self._number] = now
        if len(self._sent_s) > _MOST_SENT:
            del self._sent_s[next(iter(self._sent_s))]
        journal = self.state.journal if self.lacks(voter) else None
        return LeaderBeat(self.epoch, self._own, self._number, token, journal)

    def lacks(self, voter: int) -> bool:
        """Whether another voter is not known to have the newest journal."""
        return self._stamps.get(voter, Stamp()) != self.state.journal.stamp

    def handle_beat(self, beat: LeaderBeat, now: float) -> bool:
        """Take a sign of life of another voter; returns whether that leads."""
        if beat.epoch < self.epoch or (beat.epoch == self.epoch and self.leads):
            return False
        if beat.epoch > self.epoch:
            self.state = replace(self.state, epoch=beat.epoch, voted_for=beat.leader + 1)
        self.leader, self.heard_s, self.has_followed, self._standing = beat.leader, now, True, None
        if beat.journal is not None and beat.journal.stamp > self.state.journal.stamp:
            self.state = replace(self.state, journal=beat.journal)
        return True

    def take_answer(self, answer: BeatAnswer) -> None:
        """Take another voter's answer to a beat of this one."""
        self._see(answer.epoch)
        sent_s = self._sent_s.get(answer.number)
        if not self.leads or answer.epoch != self.epoch or sent_s is None:
            return
        self._acknowledged_s[answer.voter] = max(sent_s, self._acknowledged_s.get(answer.voter, 0.0))
        self._stamps[answer.voter] = max(answer.stamp, self._stamps.get(answer.voter, Stamp()))

    def has_lease(self, now: float) -> bool:
        """Whether this voter leads, and no other one can have been elected yet."""
        return self.leads and self._of_majority(lambda voter: not self._is_silent(voter, now))

    def _is_silent(self, voter: int, now: float) -> bool:
        return now - self._acknowledged_s.get(voter, -math.inf) >= LEASE_S

    @property
    def is_settled(self) -> bool:
        """Whether more than half of the voters have the newest journal of this one, which leads."""
        stamp = self.state.journal.stamp
        written = self.leads and stamp.epoch == self.epoch
        return written and self._of_majority(lambda voter: self._stamps.get(voter) == stamp)

    def silent(self, now: float) -> list[int]:
        """Return the other voters that have not answered this one, which leads, for as long as its lease is."""
        others = [voter for voter in range(self._voters) if voter != self._own]
        return [voter for voter in others if self._is_silent(voter, now)]

    def _of_majority(self, does: Callable[[int], bool]) -> bool:
        """Whether more than half of the voters, this one among them, do something."""
        return 1 + sum(does(voter) for voter in range(self._voters) if voter != self._own) >= self._majority
