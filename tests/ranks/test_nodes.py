"""Workers that are asked to leave a run: the others do their share, and nothing counts twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from echelon.launch.link import ShapedNetwork, parse_link
from tests.ranks.counting_parts import EPOCHS, moved
from tests.ranks.links import LINK, NEEDS_LINKS, start_machine
from tests.ranks.runs import Run, Runs
from tests.ranks.test_elastic import Case, check_counted, start

pytestmark = pytest.mark.timeout(400)


def nodes(runs: Runs, run: Run, *words: str) -> Run:
    """Give `echelon nodes` for a run, and wait for its end."""
    command = runs.start("nodes", run.folder, *words)
    command.end()
    return command


def names(runs: Runs, run: Run, role: str = "worker") -> list[str]:
    """Return the members of a role, as `echelon nodes --json` has them."""
    command = nodes(runs, run, "--json")
    return [m["name"] for m in json.loads(command.output.read_text())["members"] if m["role"] == role]


def check_left(run: Run, command: Run, pids: Sequence[int]) -> None:
    """Check that processes have left, as they were asked to, and none of them died or was started again."""
    assert command.process.returncode == 0, command.text() + run.text()[-3000:]
    left = run.events("worker_left")
    assert [event["pid"] for event in left] == list(pids) and left[-1]["message"] in command.text()
    assert not run.events("worker_died") and not run.events("worker_gone"), run.text()[-3000:]


@pytest.mark.long
def test_ranks_leave_an_elastic_run_the_one_that_leads_too(tmp_path: Path) -> None:
    """With one weight per sample each has moved exactly once an epoch."""
    with Runs(tmp_path) as runs:
        run = start(runs, Case("drained", 3, ()), pace_s=0.2)
        run.wait_for_step(2)
        pids = run.pids()
        check_left(run, nodes(runs, run, "drain", "rank0"), pids[:1])
        run.wait_for(lambda: run.pids() == pids[1:], "that two go on")
        assert run.end() == 0, run.text()[-3000:]
        check_counted(run)
        assert len(run.records("start")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["local(4)", "easgd(4)"])
def test_replicas_leave_where_all_agree(sync: str, tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = start(runs, Case("drained", 3, ()), f"sync={sync}", pace_s=0.3)
        run.wait_for_step(2)
        pids = run.pids()
        check_left(run, nodes(runs, run, "drain", "rank1"), pids[1:2])
        assert run.end() == 0, run.text()[-3000:]
        (term,) = run.records("start")[1:]
        assert term["pids"] == [pids[0], pids[2]] and term["start_step"] % 4 == 0


@pytest.mark.slow
def test_the_whole_group_starts_again_without_who_has_left(tmp_path: Path) -> None:
    """An error that a rank raises is all ranks' matter: those that stayed begin again, from a checkpoint."""
    with Runs(tmp_path) as runs:
        case = Case("drained", 3, (("rank0.0", "error in forward", 24),))
        run = start(runs, case, "checkpoint_every=3", pace_s=0.3)
        run.wait_for_step(2)
        command = nodes(runs, run, "drain", "rank1")
        assert command.process.returncode == 0, command.text()
        assert run.end() == 0, run.text()[-3000:]
        assert run.events("rank_failed") and run.records("start")[-1]["world_size"] == 2
        assert torch.equal(moved(run.folder), torch.full_like(moved(run.folder), EPOCHS)), run.text()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync", "sync, order=priority", "ssp, staleness=2"])
def test_workers_leave_a_parameter_server(mode: str, tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", "--workers", "3", "--sync", f"ps(mode={mode})", "--epochs", "40", folder="run")
        run.wait_for_step(20)
        pids = {r["name"]: r["pid"] for r in run.records("worker")}
        command = nodes(runs, run, "drain", "worker0", "worker2")
        left = {event["pid"] for event in run.events("worker_left")}
        assert left == {pids["worker0"], pids["worker2"]}, command.text() + run.text()
        assert names(runs, run) == ["worker1"] and names(runs, run, "server") == ["server0"]
        last = nodes(runs, run, "drain", "worker1")
        assert last.process.returncode == 2 and "nobody would be left to train" in last.errors()
        assert run.end() == 0, run.text()
        assert not run.events("worker_died") and not run.events("worker_gone")
        lines = [json.loads(line) for line in (run.folder / "ps" / "scheduler.jsonl").read_text().splitlines()]
        done = Counter(line["task"] for line in lines if line["kind"] == "done")
        assert set(done.values()) == {1} and run.summary()["metrics"]["top1"] > 0.9
        over = nodes(runs, run)
        assert "does not go on (completed)" in over.output.read_text()


@pytest.mark.slow
@NEEDS_LINKS[0]
@NEEDS_LINKS[1]
@pytest.mark.parametrize("servers", [1, 2])
def test_a_machine_leaves_a_parameter_server(servers: int, tmp_path: Path) -> None:
    """Its command ends with its last worker; where a server lives there, with the run."""
    settings = ("--nodes", "2", "--sync", f"ps(mode=async, servers={servers})", "--epochs", "60", "--lr", "0.02")
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        machines = [start_machine(runs, network, i, *settings, folder=f, secret="5a" * 32) for i, f in enumerate("ab")]
        first, second = machines
        first.wait_for_step(20)
        command = nodes(runs, first, "drain", "worker1")
        assert command.process.returncode == 0 and first.events("worker_left"), command.text() + first.text()
        if servers == 1:
            assert second.end() == 0 and first.process.poll() is None, second.text()
        assert [first.end(), second.end()] == [0, 0], first.text() + second.text()
        assert "have left the run" in second.text() and first.summary()["metrics"]["top1"] > 0.8


@pytest.mark.slow
def test_ranks_join_an_elastic_run(tmp_path: Path) -> None:
    """One that had left comes back, and a new one with it; each weight has moved once an epoch."""
    with Runs(tmp_path) as runs:
        run = start(runs, Case("joined", 2, ()), pace_s=0.6)
        run.wait_for_step(2)
        pids = run.pids()
        check_left(run, nodes(runs, run, "drain", "rank1"), pids[1:])
        command = nodes(runs, run, "add", "2")
        assert command.process.returncode == 0, command.text() + run.text()[-3000:]
        assert names(runs, run) == ["rank0", "rank1", "rank2"] and run.pids()[0] == pids[0]
        assert run.end() == 0, run.text()[-3000:]
        check_counted(run)
        refused = nodes(runs, run, "add", "1")
        assert refused.process.returncode == 2 and "does not go on here" in refused.errors()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync", "sync, order=priority"])
def test_workers_join_a_parameter_server(mode: str, tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", "--workers", "2", "--sync", f"ps(mode={mode})", "--epochs", "80", folder="run")
        run.wait_for_step(20)
        command = nodes(runs, run, "drain", "worker1")
        assert command.process.returncode == 0, command.text() + run.text()
        command = nodes(runs, run, "add", "2")
        assert command.process.returncode == 0, command.text() + run.text()
        assert names(runs, run) == ["worker0", "worker1", "worker2"]
        elsewhere = nodes(runs, run, "add", "hostb")
        assert elsewhere.process.returncode == 2 and "--nodes 1:4" in elsewhere.errors()
        assert run.end() == 0, run.text()
        assert (run.folder / "report.html").exists() and "Traceback" not in run.text()
        lines = [json.loads(line) for line in (run.folder / "ps" / "scheduler.jsonl").read_text().splitlines()]
        done = [line for line in lines if line["kind"] == "done"]
        assert set(Counter(line["task"] for line in done).values()) == {1}
        assert {line["worker"] for line in done} == {"worker0", "worker1", "worker2"}


@pytest.mark.slow
@NEEDS_LINKS[0]
@NEEDS_LINKS[1]
def test_a_machine_leaves_an_all_reduce_run_and_the_others_go_on(tmp_path: Path) -> None:
    """It goes after a checkpoint, from which the other one goes on; each step is trained once."""
    settings = ("--nodes", "1:2", "--epochs", "100000", "--eval-every", "0", "--max-steps", "4000")
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        machines = [start_machine(runs, network, i, *settings, folder=f, secret="5a" * 32) for i, f in enumerate("ab")]
        first, second = machines
        first.wait_for(lambda: [s["world_size"] for s in first.records("start")][-1:] == [2], "both machines")
        first.wait_for_step(first.records("start")[-1]["start_step"] + 5)
        refused = nodes(runs, first, "drain", "rank0")
        assert refused.process.returncode == 2 and "the first machine leads" in refused.errors(), refused.text()
        command = nodes(runs, first, "drain", "rank1")
        assert command.process.returncode == 0 and "rank1 leaves with its machine" in command.text(), command.text()
        assert second.end() == 0 and "have left the run" in second.text(), second.text()
        first.wait_for(lambda: [s["world_size"] for s in first.records("start")][-1] == 1, "the one that goes on")
        assert first.end() == 0, first.text()
        steps = [s for r in first.records("steps") for s in range(r["step"] - len(r["losses"]) + 1, r["step"] + 1)]
        assert steps == list(range(1, 4001)) and not first.events("worker_died")


@pytest.mark.slow
def test_who_begins_and_ends_together_is_told_what_works(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", "--workers", "2", "--epochs", "400", folder="run")
        run.wait_for_step(2)
        assert names(runs, run) == ["rank0", "rank1"]
        command = nodes(runs, run, "drain", "rank1")
        assert command.process.returncode == 2 and "echelon stop" in command.errors(), command.text()
        run.process.terminate()
        run.check_stopped(15)
