"""Who takes part in a run, from its record; and who cannot be asked to leave."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config import build
from echelon.core.errors import UserError
from echelon.launch.changes import Change
from echelon.records.events import WorkerDied, WorkerGone, WorkerLeft
from echelon.records.file import Recorder
from echelon.records.going import holder
from echelon.records.kinds import ProcessStarted, Record, ServerWindow, Start, Steps, WorkerJoined, WorkerWindow
from echelon.run.nodes import add, drain, how_to_come, members_of
from echelon.trainer import folder as folders


@pytest.fixture(autouse=True)
def on_a(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine be the one that leads."""
    monkeypatch.setattr(socket, "gethostname", lambda: "a")


START = Start(world_size=3, hosts=["a", "a", "b"], pids=[11, 12, 13], layout={"dp": 3})


def _run(folder: Path, *records: Record, **settings: str) -> Path:
    described = {"launch.on": "local", **{name.replace("_", ".", 1): value for name, value in settings.items()}}
    folders.prepare(folder, build(None, described).config, 1000.0)
    recorder = Recorder(folder)
    for record in records:
        recorder.write(record)
    recorder.close()
    return folder


def test_ranks_are_those_of_the_newest_start_since_they_joined(tmp_path: Path) -> None:
    after = replace(START, world_size=2, hosts=["a", "b"], pids=[11, 13], start_step=40)
    newcomer = replace(START, pids=[11, 13, 14], hosts=["a", "b", "a"], start_step=60)
    run = _run(tmp_path / "run", START, after, newcomer, Steps(step=70, losses=[1.0] * 10, seconds=2.0))
    members = members_of(run)
    assert [(m.name, m.host, m.pid, m.steps) for m in members] == [
        ("rank0", "a", 11, 70), ("rank1", "b", 13, 70), ("rank2", "a", 14, 10),
    ]  # fmt: skip
    assert {m.steps_per_s for m in members} == {5.0} and {m.share for m in members} == {1 / 3}


def test_shares_that_differ_and_models_that_are_split(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", replace(START, shares=[1, 1, 2]))
    assert [m.share for m in members_of(run)] == [0.25, 0.25, 0.5]
    run = _run(tmp_path / "b", replace(START, layout={"dp": 1, "tp": 3}))
    assert [m.share for m in members_of(run)] == [None] * 3


def test_members_that_come_and_go(tmp_path: Path) -> None:
    records = (
        ProcessStarted("scheduler", 1, "a"), ProcessStarted("server0", 2, "a"), ProcessStarted("worker0", 3, "a"),
        *(WorkerJoined(f"worker{i}", "ab"[i // 2], 3 + i) for i in range(4)),
        ServerWindow(name="server1"), WorkerLeft("it left", "worker1"), WorkerGone("it died", "worker2"),
        WorkerDied("it died", role="server0"), ProcessStarted("server0", 9, "a"), WorkerJoined("worker2", "b", 8),
        WorkerWindow(clocks={"worker0": 10, "worker2": 5, "worker3": 5}),
    )  # fmt: skip
    members = members_of(_run(tmp_path / "run", START, *records, strategy_sync="ps(mode=async)"))
    assert [(m.name, m.role, m.host, m.pid) for m in members] == [
        ("scheduler", "scheduler", "a", 1), ("server0", "server", "a", 9), ("server1", "server", "", None),
        ("worker0", "worker", "a", 3), ("worker2", "worker", "b", 8), ("worker3", "worker", "b", 6),
    ]  # fmt: skip
    assert [m.share for m in members[3:]] == [0.5, 0.25, 0.25] and members[0].steps is None


@pytest.mark.parametrize(
    ("settings", "word", "reason"),
    [
        (
            {"launch_elastic": "off"},
            "rank1",
            "--workers N; one of them can leave a run of several with --elas",
        ),
        ({}, "a", "a is asked"),
        ({"launch_elastic": "on"}, "rank4", "unknown worker or host 'rank4'"),
        ({"launch_elastic": "on"}, "a", "a is asked"),
    ],
)
def test_what_cannot_leave(
    settings: dict[str, str], word: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def noted(run: Path, pid: int, change: Change) -> None:
        """Note who would be asked."""
        asked.append(list(change.workers))
        raise UserError("a is asked")

    monkeypatch.setattr("echelon.run.nodes.ask", noted)
    run = _run(tmp_path / "run", START, **settings)
    with pytest.raises(UserError, match="does not go on here"):
        drain(run, [word])
    with folders.locked(run, shared=False):
        assert holder(run) == os.getpid()
        with pytest.raises(UserError, match=reason):
            drain(run, [word])
        with pytest.raises(UserError, match="begin and end" if "off" in settings.values() else "nobody would be"):
            drain(run, ["a", "b"])
    assert asked == ([["rank0", "rank1"]] if word == "a" else [])


def test_a_run_that_began_with_one_worker_takes_no_more(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", replace(START, world_size=1, hosts=["a"], pids=[11]), launch_elastic="on")
    with folders.locked(run, shared=False), pytest.raises(UserError, match="one of them can join a run of several"):
        add(run, 1)


def test_a_command_that_takes_no_changes(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", START, launch_elastic="on")
    with folders.locked(run, shared=False), pytest.raises(UserError, match="takes no changes of its members"):
        add(run, 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "run of one machine"),
        ({"launch_on": "ssh(hosts=a+b)"}, "with other machines in --on ssh"),
        ({"launch_nodes": "2", "launch_rendezvous": "h:1"}, "the run has --nodes 2"),
        ({"launch_nodes": "1:4", "launch_rendezvous": "h:1"}, "joins when the run's own command is given there: "),
    ],
)
def test_how_a_machine_can_come(settings: dict[str, str], said: str, tmp_path: Path) -> None:
    assert said in how_to_come(_run(tmp_path / "run", **settings), "hostb")


def test_another_machine_is_told_which_one_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path / "run", START, launch_elastic="on")
    monkeypatch.setattr(socket, "gethostname", lambda: "b")
    with (
        folders.locked(run, shared=False),
        pytest.raises(UserError, match="a leads the run, and this is b: give this command there"),
    ):
        drain(run, ["rank1"])
