"""Who leads: elections, epochs, leases and journals among voters whose links and clock are the test's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.address import parse_voters
from echelon.core.errors import UserError
from echelon.core.terms import Term
from echelon.launch.rounds import LOST_S, SUSPECT_S
from echelon.launch.voting import (
    BEAT_S,
    LEASE_S,
    Ballot,
    BeatAnswer,
    Journal,
    Stamp,
    Vote,
    VoterState,
    Voting,
)
from echelon.messages.plain import from_plain, to_plain

TICK_S = 0.1


class Network:
    """Voters, and which of them hear each other; what is sent arrives at once, or not at all."""

    def __init__(self, count: int, *kept: VoterState) -> None:
        self.now = 100.0
        self.voters = [Voting(count, i, kept[i] if kept else VoterState(), self.now) for i in range(count)]
        self.cut: set[tuple[int, int]] = set()
        self.dead: set[int] = set()
        self.led: list[tuple[int, int]] = []  # epoch and voter, in the order of elections

    def reach(self, a: int, b: int) -> bool:
        return not {a, b} & self.dead and (a, b) not in self.cut

    def partition(self, *side: int) -> None:
        """Cut all links between some voters and the others."""
        others = set(range(len(self.voters))) - set(side)
        self.cut = {pair for a in side for b in others for pair in ((a, b), (b, a))}

    def restart(self, i: int) -> None:
        """End a voter's process and start it again: it knows what it has kept."""
        self.dead.discard(i)
        self.voters[i] = Voting(len(self.voters), i, self.voters[i].state, self.now)

    def tick(self, complains: bool = False) -> None:
        self.now += TICK_S
        for i in sorted(set(range(len(self.voters))) - self.dead):
            me = self.voters[i]
            if me.leads:
                self._beat(i)
            elif (ballot := me.ballot(self.now, complains)) is not None:
                self._ask(i, ballot)

    def _ask(self, i: int, ballot: Ballot) -> None:
        for j, other in enumerate(self.voters):
            if j != i and self.reach(i, j):
                vote = other.handle_ballot(ballot, self.now)
                if self.reach(j, i) and self.voters[i].take_vote(vote, self.now):
                    self.led.append((self.voters[i].epoch, i))

    def _beat(self, i: int) -> None:
        for j, other in enumerate(self.voters):
            if j == i or not self.reach(i, j) or not self.voters[i].leads:
                continue
            beat = self.voters[i].beat(j, "", self.now)
            other.handle_beat(beat, self.now)
            if self.reach(j, i):
                answer = BeatAnswer(other.epoch, j, beat.number, other.state.journal.stamp)
                self.voters[i].take_answer(answer)

    def wait(self, seconds: float, complains: bool = False) -> None:
        """Let time pass; at no moment two voters may decide."""
        ends = self.now + seconds
        while self.now < ends:
            self.tick(complains)
            assert len(self.deciding()) <= 1, [(v.epoch, v.leads) for v in self.voters]
        epochs = [epoch for epoch, _ in self.led]
        assert len(set(epochs)) == len(epochs), f"two leaders of one epoch: {self.led}"

    def deciding(self) -> list[int]:
        """Return who leads and has its lease."""
        return [i for i, v in enumerate(self.voters) if i not in self.dead and v.has_lease(self.now)]


def test_the_first_voter_leads_a_new_run_once_more_than_half_are_there() -> None:
    network = Network(3)
    network.dead = {1, 2}
    network.wait(60.0)
    assert network.deciding() == []
    network.dead = {2}
    network.wait(2.0)
    assert network.deciding() == [0] and network.voters[1].leader == 0 and network.voters[0].epoch == 1


def test_no_other_voter_begins_a_new_run() -> None:
    network = Network(3)
    network.dead = {0}
    network.wait(60.0)
    assert network.deciding() == [] and [v.epoch for v in network.voters] == [0, 0, 0]


@pytest.mark.parametrize(("complains", "limit_s"), [(False, LOST_S + 2.5), (True, SUSPECT_S + 2.5)])
def test_the_next_in_the_list_follows_a_leader_that_is_lost(complains: bool, limit_s: float) -> None:
    network = Network(3)
    network.wait(5.0)
    network.dead = {0}
    network.wait((SUSPECT_S if complains else LOST_S) - 1.0, complains)
    assert network.deciding() == []
    network.wait(limit_s, complains)
    assert network.deciding() == [1] and network.led == [(1, 0), (2, 1)]


def test_the_side_with_more_than_half_goes_on_and_the_other_one_lets_its_lease_go() -> None:
    network = Network(3)
    network.wait(5.0)
    network.partition(0)
    network.wait(LEASE_S + 2 * TICK_S)
    assert network.deciding() == [] and network.voters[0].leads, "no other one is elected yet, and this one waits"
    network.wait(20.0)
    assert network.deciding() == [1] and network.voters[0].epoch == 1
    network.cut = set()
    network.wait(2.0)
    assert network.deciding() == [1] and network.voters[0].leader == 1 and not network.voters[0].leads


def test_a_voter_that_was_cut_off_disturbs_nobody_when_it_is_back() -> None:
    network = Network(3)
    network.wait(5.0)
    network.partition(2)
    network.wait(60.0)
    assert network.voters[2].epoch == 1, "trials raise no epoch"
    network.cut = set()
    network.wait(3.0)
    assert network.deciding() == [0] and network.led == [(1, 0)]


def test_of_five_two_may_be_lost_and_the_fifth_cannot_go_on_with_one() -> None:
    network = Network(5)
    network.wait(5.0)
    network.dead = {0, 1}
    network.wait(20.0)
    assert network.deciding() == [2]
    network.dead = {0, 1, 2}
    network.wait(60.0)
    assert network.deciding() == []


def test_who_lacks_what_more_than_half_have_is_not_elected() -> None:
    network = Network(3)
    network.wait(5.0)
    network.partition(1)
    network.voters[0].write(Journal(leader="a", term=Term(1, ("a", "c"))))
    assert not network.voters[0].is_settled, "nobody else has it"
    network.wait(1.0)
    assert network.voters[0].is_settled
    network.cut, network.dead = set(), {0}
    network.wait(30.0)
    assert network.deciding() == [2] and network.voters[2].state.journal.term == Term(1, ("a", "c"))


def test_what_a_leader_decides_alone_does_not_count() -> None:
    network = Network(3)
    network.wait(5.0)
    network.partition(0)
    network.voters[0].write(Journal(leader="a", term=Term(7, ("a",))))
    network.wait(30.0)
    assert not network.voters[0].is_settled and network.deciding() == [1]
    network.voters[1].write(Journal(leader="b", term=Term(8, ("b", "c"))))
    network.cut = set()
    network.wait(3.0)
    assert network.voters[0].state.journal.term == Term(8, ("b", "c")), "a later leader's journal is newer"


def test_a_vote_is_given_once_whatever_is_restarted() -> None:
    voter = Voting(3, 2, VoterState(), 0.0)
    first, second = (Ballot(1, candidate, Stamp(), is_trial=False) for candidate in (0, 1))
    assert voter.handle_ballot(first, 0.0).is_granted and not voter.handle_ballot(second, 0.0).is_granted
    again = Voting(3, 2, from_plain(VoterState, to_plain(voter.state)), 0.0)
    assert not again.handle_ballot(second, 50.0).is_granted and again.handle_ballot(first, 50.0).is_granted
    assert not again.handle_ballot(replace(second, epoch=0), 50.0).is_granted


def test_a_voter_that_hears_its_leader_votes_for_nobody_and_one_that_began_anew_waits_for_it() -> None:
    network = Network(3)
    network.wait(5.0)
    ballot = Ballot(9, 1, network.voters[2].state.journal.stamp, is_trial=False)
    assert not network.voters[2].handle_ballot(ballot, network.now).is_granted
    network.restart(2)
    assert not network.voters[2].handle_ballot(ballot, network.now).is_granted, "it may have heard it just before"
    assert network.voters[2].handle_ballot(ballot, network.now + SUSPECT_S).is_granted


def test_the_old_leader_comes_back_from_its_disk_and_follows() -> None:
    network = Network(3)
    network.wait(5.0)
    network.voters[0].write(Journal(leader="a"))
    network.wait(1.0)
    network.dead = {0}
    network.wait(20.0)
    network.restart(0)
    network.wait(20.0)
    assert network.deciding() == [1] and network.led == [(1, 0), (2, 1)] and network.voters[0].leader == 1


def test_who_led_last_leads_first_when_all_begin_again() -> None:
    network = Network(3)
    network.wait(5.0)
    network.dead = {0}
    network.wait(20.0)
    network.voters[1].write(Journal(leader="b"))
    network.wait(1.0)
    for i in range(3):
        network.restart(i)
    network.wait(SUSPECT_S + 1.0)
    assert network.deciding() == [1]


def test_a_stale_answer_gives_no_lease() -> None:
    network = Network(3)
    network.wait(5.0)
    leader = network.voters[0]
    beat = leader.beat(1, "", network.now)
    late = BeatAnswer(leader.epoch, 1, beat.number, Stamp())
    network.dead = {1, 2}
    network.wait(LEASE_S + 1.0)
    leader.take_answer(late)
    assert not leader.has_lease(network.now), "it tells of the moment in which the beat left"
    assert leader.silent(network.now) == [1, 2]


def test_only_the_newest_ballot_is_counted() -> None:
    network = Network(3)
    network.wait(BEAT_S)
    voter = Voting(3, 0, VoterState(epoch=4, voted_for=1), 0.0)
    assert voter.ballot(0.0) == Ballot(5, 0, Stamp(), is_trial=True)
    assert not voter.take_vote(Vote(4, True, 1, True, 4), 0.0) and voter.epoch == 4
    assert not voter.take_vote(Vote(5, True, 1, True, 4), 0.0) and voter.epoch == 5, "now it asks in earnest"
    assert not voter.take_vote(Vote(5, True, 2, True, 4), 0.1) and not voter.leads
    assert voter.take_vote(Vote(5, False, 2, True, 5), 0.2) and voter.leads


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:1,b:1", "2 voters protect from nothing"),
        ("a:1,b:1,c:1,d:1", "4 voters survive the loss of 1, as 3 do"),
        ("a:1,b:1,a:1", "a:1 is there twice"),
        ("a:1,b,c:1", "write HOST:PORT"),
    ],
)
def test_voters_that_protect_from_nothing_are_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_voters(text)
