"""Who hangs while it runs is told from who is slow: by its own rhythm, by its processor time, and by who waits."""

from __future__ import annotations

import pytest

from echelon.launch import rhythm
from echelon.launch.culprit import Living, Observed
from echelon.launch.rhythm import HANGS_LEAST_S, Rhythm, find_late
from echelon.observe.notes import START, Note
from echelon.observe.phases import Phase
from echelon.observe.stacks import Stack, StackFrame

PID = 7


def noted(activity: str, step: int, since_s: float, changes: int) -> Note:
    return Note(activity, step, since_s, changes, PID, 0, True, False)


def late_after(
    monkeypatch: pytest.MonkeyPatch, works: float, *, activity: str = Phase.FORWARD, longest_s: float = 0.5,
    looks_s: float = 0.5, of_disk: bool = False,
) -> float:  # fmt: skip
    """Return for how long a process is in an activity before it is late, which is looked for over 100 s of --timeout.

    Args:
        works: processor seconds a second, of an activity that took one a second before.
    """
    worked = 0.0
    monkeypatch.setattr(rhythm, "processor_s", lambda pid: worked)
    monkeypatch.setattr(rhythm, "waits_for_disk", lambda pid: of_disk)
    now, changes = 1000.0, 1
    followed = Rhythm.begin(noted(Phase.FORWARD, 2, now, changes), now)
    for _ in range(8):
        begun = now
        while now < begun + longest_s:
            now, worked = now + 0.5, worked + 0.5
            followed.go_on(noted(Phase.FORWARD, 3, begun, changes), now)
        changes += 1
        followed.go_on(noted(Phase.FORWARD, 3, now, changes), now)
    began, changes = now, changes + 1
    while now < began + 100.0:
        followed.go_on(noted(activity, 9, began, changes), now)
        if followed.is_late(90.0):
            return now - began
        now, worked = now + looks_s, worked + works * looks_s
    return float("inf")


@pytest.mark.parametrize("works", [1.0, 0.0])
def test_who_turns_in_a_loop_or_waits_for_a_lock_is_late_after_ten_seconds(
    works: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert late_after(monkeypatch, works) == pytest.approx(HANGS_LEAST_S, abs=0.5)


def test_who_is_slow_in_all_its_steps_has_ten_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert late_after(monkeypatch, 1.0, longest_s=4.0) == pytest.approx(40.0, abs=1.0)


@pytest.mark.parametrize("activity", [Phase.DATA, Phase.COMMUNICATE, "evaluation", "checkpoint", START])
def test_what_may_wait_for_something_else_is_never_late(activity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert late_after(monkeypatch, 0.0, activity=activity) == float("inf")


def test_who_gets_little_of_the_processor_or_waits_for_a_disk_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert late_after(monkeypatch, 0.05) == pytest.approx(1.5 / 0.05, abs=1.0)  # three times the work of its longest
    assert late_after(monkeypatch, 0.0, of_disk=True) == float("inf")


def test_time_in_which_the_launcher_was_stopped_counts_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    assert late_after(monkeypatch, 1.0, looks_s=15.0) == pytest.approx(75.0, abs=15.0)  # 2 s a look


def observed(rank: int, activity: str, *files: str, still_s: float = 11.0) -> Observed:
    frames = tuple(StackFrame(file, 1, "f") for file in files)
    note = Note(activity, 9, 0.0, 9, rank, 0, True, False)
    return Observed(Living(f"rank{rank}", "here", rank, rank), note, still_s, Stack(frames) if frames else None)


COMPILER = "/x/site-packages/torch/_dynamo/x.py"
FORWARD = observed(1, Phase.FORWARD, "/home/me/model.py")
WAITS = observed(0, Phase.COMMUNICATE, "/x/site-packages/torch/distributed/distributed_c10d.py")


def test_it_is_blamed_where_all_others_wait_for_it() -> None:
    hang = find_late([WAITS, FORWARD], {"rank1"}, 100.0)
    assert hang is not None and hang.process.rank == 1 and [p.rank for p in hang.waiting] == [0]
    newcomer = observed(2, START, "/x/trainer/membership.py")
    assert find_late([WAITS, FORWARD, newcomer], {"rank1"}, 100.0) == hang


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param([FORWARD], id="nobody waits"),
        pytest.param([WAITS, FORWARD, observed(2, Phase.FORWARD, "/home/me/model.py", still_s=1.0)], id="another acts"),
        pytest.param([observed(0, Phase.COMMUNICATE, still_s=1.0), FORWARD], id="the other has not waited for long"),
        pytest.param(
            [WAITS, observed(1, Phase.FORWARD, COMPILER, "/home/me/model.py")],
            id="it compiles",
        ),
        pytest.param([WAITS, observed(1, Phase.FORWARD, "/usr/lib/python3/bdb.py")], id="somebody looks at it"),
        pytest.param([WAITS, observed(3, Phase.FORWARD, "/home/me/model.py")], id="it is not late"),
    ],
)
def test_else_nobody_is_blamed(seen: list[Observed]) -> None:
    assert find_late(seen, {"rank1"}, 100.0) is None
