"""Leases: each batch counted once whatever dies, joins or is slow."""

from __future__ import annotations

import random

import pytest

from echelon.coordinator.leases import FreeLeases, StepCount
from echelon.coordinator.shares import MAX_SHARES, SharedLeases

WORK = StepCount(30, 10)


@pytest.mark.parametrize(("seed", "parts"), [(seed, 1 + seed % 3) for seed in range(20)])
def test_every_lease_once_under_random_deaths(seed: int, parts: int) -> None:
    draw, leases, done = random.Random(seed), FreeLeases(WORK, batch_parts=parts), list[int]()
    out: dict[str, list[int]] = {}
    for turn in range(2000):
        worker = f"w{draw.randrange(4)}"
        event = draw.random()
        if worker not in out:
            leases.join(worker, (), turn)
            out[worker] = []
        elif event < 0.1:
            leases.leave(worker)
            del out[worker]
        elif event < 0.5 and (lease := leases.take(worker, turn)) is not None:
            out[worker].append(lease.task)
        elif out[worker] and leases.finish(task := out[worker].pop(0), worker, turn, False):
            done.append(task)
            assert leases.steps == sum(map(leases.step_complete, range(30)))
    assert leases.complete
    assert sorted(done) == list(range(30 * parts))


def test_a_step_is_done_with_its_last_part() -> None:
    """Whoever has the parts, and in whatever order they come; a checkpoint may lie between two of them."""
    leases = FreeLeases(StepCount(4, 2), batch_parts=2)
    leases.join("a", (), 0)
    leases.join("b", (), 0)
    tasks = [task for worker in "abab" if (task := leases.take(worker, 0)) is not None]
    assert [(t.task, t.step, t.epoch, t.batch, t.share, t.shares) for t in tasks] == [
        (0, 0, 0, 0, 0, 2), (1, 0, 0, 0, 1, 2), (2, 1, 0, 1, 0, 2), (3, 1, 0, 1, 1, 2),
    ]  # fmt: skip
    for task in (1, 2, 3):
        assert leases.finish(task, "b", 0, False)
    assert (leases.done_steps, leases.steps, leases.watermark) == (0, 1, 0)
    assert [leases.step_complete(step) for step in range(3)] == [False, True, False]
    again = FreeLeases(StepCount(4, 2), batch_parts=2)
    again.restore(*leases.counted())
    again.join("c", (), 0)
    left = [task.task for _ in range(2) if (task := again.take("c", 0)) is not None]
    assert left == [0, 4]
    assert again.finish(0, "c", 0, False) and (again.done_steps, again.steps) == (2, 2)


def test_nobody_runs_further_ahead_than_the_bound() -> None:
    leases = FreeLeases(WORK, bound=2)
    for worker in ("fast", "slow"):
        leases.join(worker, (), 0)
    stuck = leases.take("slow", 0)
    taken = 0
    while (task := leases.take("fast", 0)) is not None:
        leases.finish(task.task, "fast", 0, False)
        taken += 1
    assert taken == 3  # clocks 0, 1 and 2 while the slowest is at 0
    assert stuck is not None
    leases.finish(stuck.task, "slow", 0, False)
    assert leases.take("fast", 0) is not None


def test_who_evaluates_holds_nobody_back() -> None:
    leases = FreeLeases(WORK, bound=1)
    for worker in ("fast", "lead"):
        leases.join(worker, (), 0)
    leases.pause("lead", True)
    for _ in range(10):
        task = leases.take("fast", 0)
        assert task is not None
        leases.finish(task.task, "fast", 0, False)
    leases.pause("lead", False)
    assert leases.clocks["lead"] == 10
    assert leases.finished == {"fast": 10, "lead": 0}  # which together are the steps that are done


def test_a_step_counts_for_who_finished_it_first() -> None:
    leases = FreeLeases(WORK)
    for worker in ("a", "b"):
        leases.join(worker, (), 0)
    task = leases.take("a", 0)
    assert task is not None and leases.finish(task.task, "b", 0, False) and not leases.finish(task.task, "a", 0, False)
    assert leases.finished == {"a": 0, "b": 1}


def test_what_takes_too_long_is_given_to_another_and_counts_once() -> None:
    leases = FreeLeases(StepCount(2, 2))
    for worker in ("a", "b"):
        leases.join(worker, (), 0)
    first, second = leases.take("a", 0), leases.take("b", 0)
    assert first and second
    assert leases.finish(second.task, "b", 1, False)
    assert leases.take("b", 2) is None
    again = leases.take("b", 100)
    assert again is not None and again.task == first.task
    assert leases.finish(again.task, "b", 101, False)
    assert not leases.finish(first.task, "a", 102, False)


def test_shares_of_the_dead_go_to_others() -> None:
    leases = SharedLeases(StepCount(2, 2))
    for worker in ("a", "b"):
        leases.join(worker, (), 0)
    mine, other = leases.take("a", 0), leases.take("b", 0)
    assert mine and other and {mine.share, other.share} == {0, 1}
    assert leases.finish(mine.task, "a", 0, False)
    assert leases.take("a", 0) is None  # b has the other share
    assert leases.leave("b") == [other.task]
    again = leases.take("a", 0)
    assert again is not None and again.task == other.task
    leases.finish(again.task, "a", 0, False)
    assert leases.done_steps == 1
    task = leases.take("a", 0)
    assert task is not None and task.shares == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_worker_has_the_same_share_in_every_step_whoever_asks_first_and_while_it_evaluates(seed: int) -> None:
    draw, leases, workers = random.Random(seed), SharedLeases(StepCount(20, 20)), ["a", "b", "c"]
    for worker in workers:
        leases.join(worker, (), 0)
    evaluates = ""
    while not leases.complete:
        worker = draw.choice(workers)
        if worker == evaluates:
            leases.pause(worker, False)
            evaluates = ""
        elif not evaluates and draw.random() < 0.2:
            leases.pause(worker, True)
            evaluates = worker
        elif (task := leases.take(worker, 0)) is not None:
            assert (task.share, task.shares) == (workers.index(worker), 3)
            leases.finish(task.task, worker, 0, False)


def test_a_step_that_has_begun_is_finished_before_a_copy() -> None:
    leases = SharedLeases(StepCount(2, 2))
    for worker in ("a", "b"):
        leases.join(worker, (), 0)
    first = leases.take("a", 0)
    leases.hold_back(True)
    second = leases.take("b", 0)
    assert first and second and second.step == first.step
    for task, worker in ((first, "a"), (second, "b")):
        leases.finish(task.task, worker, 0, False)
    assert leases.at_boundary and leases.take("a", 0) is None
    leases.hold_back(False)
    assert leases.take("a", 0) is not None


def test_backup_shares_may_be_late() -> None:
    leases = SharedLeases(StepCount(3, 3), backup=1)
    for worker in ("a", "b", "slow"):
        leases.join(worker, (), 0)
    tasks = {w: leases.take(w, 0) for w in ("a", "b", "slow")}
    for worker in ("a", "b"):
        assert leases.finish(tasks[worker].task, worker, 0, False)  # type: ignore[union-attr]
    assert leases.done_steps == 1
    assert not leases.finish(tasks["slow"].task, "slow", 0, True)  # type: ignore[union-attr]


def test_backup_shares_of_the_dead_are_done_by_others_where_too_few_are_left() -> None:
    leases = SharedLeases(StepCount(2, 2), backup=1)
    for worker in ("a", "b", "c", "d"):
        leases.join(worker, (), 0)
    for worker in ("a", "b", "c", "d"):
        assert leases.take(worker, 0) is not None
    leases.leave("c")
    leases.leave("d")
    for worker in ("a", "b"):
        leases.finish(next(t for t, lease in leases._out.items() if lease.worker == worker), worker, 0, False)
    assert leases.take("a", 0) is not None  # three of four are needed


def test_a_restart_goes_on_where_the_journal_ends() -> None:
    leases = SharedLeases(StepCount(3, 3))
    leases.restore(1, ())
    leases.cut(1, 2, {1 * MAX_SHARES})
    leases.join("a", [1 * MAX_SHARES + 1], 0)
    assert leases.finish(1 * MAX_SHARES + 1, "a", 0, False)
    assert leases.done_steps == 2
    free = FreeLeases(WORK)
    free.restore(3, {5, 6})
    free.join("a", (), 0)
    assert [free.take("a", 0).task for _ in range(3)] == [3, 4, 7]  # type: ignore[union-attr]


def test_shares_that_a_server_lost_are_done_again() -> None:
    leases = SharedLeases(WORK)
    for worker in ("a", "b"):
        leases.join(worker, (), 0)
    tasks = {worker: leases.take(worker, 0) for worker in ("a", "b")}
    assert tasks["a"] is not None and tasks["b"] is not None
    leases.finish(tasks["a"].task, "a", 0, False)
    leases.leave("a")
    assert leases.lost({tasks["a"].task}, 0) == []
    assert leases.lost(set(), 1) == []  # complete there
    assert leases.lost(set(), 0) == [tasks["a"].task]
    leases.finish(tasks["b"].task, "b", 0, False)
    again = leases.take("b", 0)
    assert again is not None and again.task == tasks["a"].task
    leases.finish(again.task, "b", 0, False)
    assert leases.done_steps == 1


def test_the_next_step_is_given_out_ahead_unless_a_pause_may_come_before_it() -> None:
    leases = SharedLeases(StepCount(8, 4), ahead=True, save_steps=3)
    for worker in ("a", "b"):
        leases.join(worker, (), 0)
    ahead = []
    for step in range(8):
        tasks = [task for worker in "abab" if (task := leases.take(worker, 0)) is not None]
        ahead.append(sum(task.step == step + 1 for task in tasks))
        assert all((task.share, task.shares) == (task.task % MAX_SHARES, 2) for task in tasks)
        assert leases.take("a", 0) is None, "nobody is two steps ahead"
        for share, worker in enumerate("ab"):
            assert leases.finish(step * MAX_SHARES + share, worker, 0, False)
        assert leases.done_steps == step + 1
    assert ahead == [2, 2, 0, 0, 2, 0, 2, 0]  # a checkpoint before 3 and 6, an epoch before 4 and 8


def test_what_was_begun_ahead_is_withdrawn_when_a_share_before_it_is_nobodys() -> None:
    leases = SharedLeases(WORK, ahead=True)
    for worker in ("a", "b"):
        leases.join(worker, (), 0)
    assert leases.take("a", 0) is not None and leases.take("a", 0) is not None  # b will come for its share
    assert leases.withdraw() == []
    assert [leases.take("b", 0).step for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
    assert leases.leave("b") == [1, MAX_SHARES + 1]
    assert leases.withdraw() == [("a", MAX_SHARES)]
    assert leases.finish(0, "a", 0, False)
    for task in (1, MAX_SHARES, MAX_SHARES + 1):  # step 1 stays cut in two: of its gradients some may be there
        taken = leases.take("a", 0)
        assert taken is not None and taken.task == task and leases.finish(task, "a", 0, False)
    assert leases.done_steps == 2


@pytest.mark.parametrize("seed", range(30))
def test_each_share_is_done_and_no_step_is_cut_twice_whoever_dies_ahead(seed: int) -> None:
    """A worker cannot end a step ahead: it waits for values that the present one makes complete, and does nothing else
    meanwhile. It asks for its next task when it begins one. One at a time is stuck, in every second run.
    """
    draw, steps = random.Random(seed), 24
    leases, cut = SharedLeases(StepCount(steps, 12), ahead=True, save_steps=5), dict[int, int]()
    queues: dict[str, list[int]] = {}
    done: set[int] = set()
    for turn in range(4000):
        worker, event = f"w{draw.randrange(3)}", draw.random()
        if worker not in queues:
            leases.join(worker, (), turn)
            queues[worker] = []
        elif event < 0.03:
            leases.leave(worker)
            del queues[worker]
        elif event < 0.04:  # the scheduler dies, and members tell it what they hold
            below, counted = leases.counted()
            cuts, leases = leases.cuts(), SharedLeases(StepCount(steps, 12), ahead=True, save_steps=5)
            leases.replay(below, counted, cuts)
            for name, tasks in queues.items():
                leases.join(name, tasks, turn)
        elif event < 0.6 and len(queues[worker]) < 2 and (task := leases.take(worker, turn)) is not None:
            assert cut.setdefault(task.step, task.shares) == task.shares
            queues[worker].append(task.task)
        elif seed % 2 and worker == f"w{turn // 150 % 3}":
            continue
        elif queues[worker] and queues[worker][0] // MAX_SHARES <= leases.done_steps:
            task_number = queues[worker].pop(0)
            leases.finish(task_number, worker, turn, False)
            done.add(task_number)
        for name, withdrawn in leases.withdraw():
            queues[name].remove(withdrawn)
    assert leases.complete
    assert done == {step * MAX_SHARES + share for step, shares in cut.items() for share in range(shares)}


def test_who_is_given_an_overdue_share_leaves_what_it_has_begun_ahead_even_if_the_slow_worker_then_dies() -> None:
    """It would wait there for values of a step that lacks this very share."""
    leases = SharedLeases(WORK, ahead=True)
    for worker in ("a", "b"):
        leases.join(worker, (), 0)
    assert [leases.take(worker, 0).task for worker in "aba"] == [0, 1, MAX_SHARES]  # type: ignore[union-attr]
    assert leases.finish(0, "a", 1, False) and leases.withdraw() == []
    again = leases.take("a", 1000)
    assert again is not None and again.task == 1
    assert leases.withdraw() == [("a", MAX_SHARES)] and leases.withdraw() == []
    leases.leave("b")
    assert leases.withdraw() == [] and leases.finish(1, "a", 1001, False)
    assert leases.done_steps == 1
    for task in (MAX_SHARES, MAX_SHARES + 1):
        taken = leases.take("a", 1002)
        assert taken is not None and taken.task == task and leases.finish(task, "a", 1002, False)
