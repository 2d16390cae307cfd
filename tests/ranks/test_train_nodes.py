"""A run on several machines, which are network namespaces here: they meet, one goes away, it comes back."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
from pathlib import Path

import pytest

from echelon.launch.link import ShapedNetwork, parse_link
from echelon.run.home import bring
from tests.attack.faulty_disk import small_disk
from tests.ranks.links import LINK, NEEDS_LINKS, start_machine
from tests.ranks.runs import Run, Runs, losses_of, marked_processes
from tests.ranks.test_ends import LONG, check_failed

SECRET = "5a" * 32
pytestmark = [*NEEDS_LINKS, pytest.mark.timeout(400)]


@pytest.mark.long
def test_two_machines_agree_on_one_run_and_its_folder(tmp_path: Path) -> None:
    settings = ("--nodes", "2", "--epochs", "3", "--lr", "0.02")
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        both = [start_machine(runs, network, i, *settings) for i in range(2)]
        assert [run.end() for run in both] == [0, 0], both[0].text() + both[1].text()
        assert ["the others need the run's secret" in run.text() for run in both] == [True, False]
        assert "ECHELON_RUN_SECRET" in both[0].text() and "/secret at the same place" in both[0].text()
        (folder,) = (tmp_path / "runs").iterdir()
        told = (
            f"Here ran 1 worker; the run's record and report are in {folder.relative_to(tmp_path)}: the first machine"
        )
        assert [told in run.text() for run in both] == [False, True]
        (start,) = (r for r in Run(both[0].process, folder, both[0].output, "").records("start"))
        assert start["world_size"] == 2 and len(set(start["pids"])) == 2
        alone = runs.train("digits", "--workers", "1", "--epochs", "3", "--lr", "0.02", folder="alone")
        assert alone.end() == 0
        assert losses_of(folder) == pytest.approx(alone.losses(), rel=1e-3)


@pytest.mark.slow
def test_machines_with_disks_of_their_own_share_the_secret_by_the_environment(tmp_path: Path) -> None:
    settings = ("--nodes", "2", "--epochs", "2", "--eval-every", "0")
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        second = start_machine(runs, network, 1, *settings, folder="b", secret=SECRET)  # it may be there first
        first = start_machine(runs, network, 0, *settings, folder="a", secret=SECRET)
        assert [first.end(), second.end()] == [0, 0], first.text() + second.text()
        assert _sizes(first) == [2] and first.summary()["status"] == "completed"
        assert not list(tmp_path.glob("*/machines/secret"))
        assert SECRET not in first.text() + second.text()


@pytest.mark.long
def test_machines_with_disks_of_their_own_stand_still_for_no_link_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Killed while a checkpoint's part is on its way, they go on from it: the part is where its rank has written it."""
    settings = ("--model", "resnet20", "--sync", "local(4, overlap=2)", "--compression", "sign", "--max-steps", "40",
                "--eval-every", "0", "--checkpoint-every", "8")  # fmt: skip
    with ShapedNetwork(2, parse_link("10mbit")) as network, Runs(tmp_path) as runs:

        def start() -> tuple[Run, Run]:
            """Give the same command on both machines."""
            first, second = (
                start_machine(runs, network, i, *settings, "--nodes", "2", folder="ab"[i], secret=SECRET)
                for i in range(2)
            )
            return first, second

        first, second = start()
        first.wait_for(lambda: _lacking(first), "a checkpoint that lacks a part")
        for run in (first, second):
            for pid in marked_processes(run.mark):
                os.kill(pid, signal.SIGKILL)
            run.process.wait()
        reached = _lacking(first)
        assert reached > max((r["step"] for r in first.records("checkpoint")), default=0)
        part_s = max(path.stat().st_size for path in (tmp_path / "b" / "parts").glob("*.safetensors")) * 8 / 10e6
        again = start()
        assert [run.end() for run in again] == [0, 0], again[0].text() + again[1].text()
    alone = runs.train("digits", "--workers", "2", *settings, folder="alone")
    assert alone.end() == 0, alone.text()
    assert first.records("start")[-1]["start_step"] == reached and losses_of(first.folder) == alone.losses()
    pauses = [r["seconds"] for r in first.records("pause") if r["name"] == "checkpoint"]
    assert statistics.median(pauses) < part_s / 3, f"a part takes {part_s:.1f} s over the link: {pauses}"
    assert not list((tmp_path / "a" / "checkpoints").glob("incomplete-*")), "all are whole at the end"


def _lacking(run: Run) -> int:
    """Return the newest step whose checkpoint lacks a part of which it is known where it lies; 0: there is none."""
    known = (path.parent.parent.name for path in (run.folder / "checkpoints").glob("incomplete-*/arrived/part-*.json"))
    return max((int(name.split("-")[1]) for name in known), default=0)


@pytest.mark.slow
def test_machines_without_a_common_disk_go_on_from_a_url(tmp_path: Path) -> None:
    url, common = f"file://{tmp_path}/store/run", ("--nodes", "2", "--eval-every", "0", "--schedule", "constant")
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        rendezvous = f"{network.addresses[0]}:29400"

        def on_both(*command: str) -> None:
            """Give a command on both machines, each with a disk of its own, and wait for its end."""
            both = []
            for i in range(2):
                own = {"ECHELON_RUN_SECRET": SECRET, "XDG_CACHE_HOME": str(tmp_path / f"cache-{i}")}
                both.append(runs.start(*command, prefix=network.command_prefix(i), environment=own))
            assert [run.end() for run in both] == [0, 0], both[0].text() + both[1].text()

        where = ("--rendezvous", rendezvous, "--workers", "1", "--threads", "1", "--device", "cpu")
        on_both("train", "digits", *where, *common, "--run", url, "--max-steps", "20")
        for i in range(2):
            shutil.rmtree(tmp_path / f"cache-{i}")
        on_both("resume", url, *where[:2], *common[:2], "--max-steps", "40")
        alone = runs.train("digits", "--workers", "2", *common[2:], "--max-steps", "40", folder="alone")
        assert alone.end() == 0
        assert losses_of(bring(url, tmp_path / "brought")) == pytest.approx(alone.losses(), rel=1e-3)


@pytest.mark.slow
def test_a_machine_goes_away_and_comes_back_and_a_stop_on_one_machine_stops_the_run_on_both(tmp_path: Path) -> None:
    settings = ("--nodes", "1:2", "--epochs", "100000", "--eval-every", "0", "--checkpoint-every", "20")
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        first = start_machine(runs, network, 0, *settings, folder="run")
        second = start_machine(runs, network, 1, *settings, folder="run")
        first.wait_for(lambda: _sizes(first)[-1:] == [2] and _steps_with(first, 2), "both machines")
        for pid in marked_processes(second.mark):
            os.kill(pid, signal.SIGKILL)
        second.process.wait()
        first.wait_for(lambda: _steps_with(first, 1), "steps of the machine that was left alone")
        third = start_machine(runs, network, 1, *settings, folder="run")
        first.wait_for(lambda: _steps_with(first, 2), "steps with the machine that came back")
        third.process.terminate()
        assert [first.end(), third.end()] == [143, 143], first.text() + third.text()
        assert _sizes(first)[-3:] == [2, 1, 2]
        assert len({start["launched_t"] for start in first.records("start")}) == 1, "the first machine's command"
        assert first.events("worker_died")
        reached = max(first.losses()) + 20
        on_one = ["--nodes", "1", "--workers", "1", "--max-steps", str(reached)]
        resumed = runs.start("resume", "run", *on_one, folder="run")
        assert resumed.end() == 0, resumed.text()
        assert list(first.losses()) == list(range(1, reached + 1))
        assert first.summary()["status"] == "completed"


@pytest.mark.parametrize(
    "sync", [pytest.param("ps(mode=async)", marks=pytest.mark.slow), pytest.param("allreduce", marks=pytest.mark.slow)]
)
def test_the_first_machine_goes_away_and_the_other_waits_for_its_return(tmp_path: Path, sync: str) -> None:
    settings = ("--nodes", "2", "--epochs", "100000", "--eval-every", "0", "--checkpoint-every", "20", "--sync", sync)
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        first = start_machine(runs, network, 0, *settings, "--timeout", "40s", folder="run")
        second = start_machine(runs, network, 1, *settings, "--timeout", "40s", folder="run")
        first.wait_for(lambda: first.records("checkpoint") and _both_train(first), "a checkpoint")
        for pid in marked_processes(first.mark):
            os.kill(pid, signal.SIGKILL)
        first.process.wait()
        reached = max(first.losses())
        second.wait_for(lambda: "waiting up to 10m 0s for its return" in second.text(), "the sentence")
        again = start_machine(runs, network, 0, *settings, "--timeout", "60s", folder="run")
        again.wait_for_step(reached + 20)
        again.process.terminate()
        assert [again.end(), second.end()] == [143, 143], again.text() + second.text()
        assert second.text().count("for its return") == 1
        assert sorted(first.losses()) == list(range(1, max(first.losses()) + 1))


@pytest.mark.parametrize(
    "sync", [pytest.param("allreduce", marks=pytest.mark.long), pytest.param("ps(mode=async)", marks=pytest.mark.slow)]
)
def test_a_first_machine_that_does_not_return_is_waited_for_until_a_deadline(tmp_path: Path, sync: str) -> None:
    settings = ("--nodes", "2", "--epochs", "100000", "--eval-every", "0", "--timeout", "60s", "--sync", sync)
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        first, second = (
            start_machine(runs, network, i, *settings, "--machine-patience", "15s", folder="run") for i in range(2)
        )
        first.wait_for(lambda: _both_train(first), "steps of both")
        for pid in marked_processes(first.mark):
            os.kill(pid, signal.SIGKILL)
        first.process.wait()
        assert second.end() == (1 if sync == "allreduce" else 2), second.text()
        assert "waiting up to 15" in second.text() and "Traceback" not in second.text()


@pytest.mark.long
def test_a_service_of_others_at_the_rendezvous_is_one_line_in_time_and_leaves_nothing(tmp_path: Path) -> None:
    settings = ("--nodes", "2", "--timeout", "10s", "--trusted-network")
    http = [sys.executable, "-m", "http.server", "29400"]
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        server = runs.start(program=http, prefix=network.command_prefix(0))
        server.wait_for(lambda: _listens(server), "the other service")
        for sync in ("allreduce", "ps(mode=async)"):
            run = start_machine(runs, network, 1, *settings, "--sync", sync)
            assert run.end() == 2, run.text()
            lines = [line for line in run.errors().splitlines() if "waiting for the first machine" not in line]
            assert len(lines) == 1 and "what listens there is another service" in lines[0], run.text()
        assert not (tmp_path / "runs").exists()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()


def _listens(run: Run) -> bool:
    """Whether a process has a listening TCP socket in its network."""
    lines = Path(f"/proc/{run.process.pid}/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[3] == "0A" for line in lines)


def _sizes(run: Run) -> list[int]:
    return [r["world_size"] for r in run.records("start")]


def _both_train(run: Run) -> bool:
    """Whether steps were recorded with the second machine: ranks need it, workers of servers do not."""
    roles = {r["role"] for r in run.records("process")}
    return bool(run.records("steps")) and (not roles or "worker1" in roles)


def _steps_with(run: Run, size: int) -> bool:
    """Whether steps were recorded after the newest start, which was of that many workers."""
    records = run.records()
    starts = [i for i, r in enumerate(records) if r["kind"] == "start"]
    newest = records[starts[-1] :]
    return newest[0]["world_size"] == size and any(r["kind"] == "steps" for r in newest)


@pytest.mark.slow
def test_a_first_machine_whose_disk_stays_full_fails_the_run_on_both(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk") as disk,
        ShapedNetwork(2, parse_link(LINK)) as network,
        Runs(tmp_path) as runs,
    ):
        first = start_machine(runs, network, 0, "--nodes", "2", *LONG, folder="disk/run", secret=SECRET)
        second = start_machine(runs, network, 1, "--nodes", "2", *LONG, folder="run", secret=SECRET)
        first.wait_for(lambda: first.records("checkpoint"), "a checkpoint")
        disk.fill()
        check_failed(first)
        assert second.end() == 1, second.text()


@pytest.mark.long
def test_a_second_command_on_a_machine_is_refused_while_the_first_one_runs(tmp_path: Path) -> None:
    settings = ("--nodes", "2", "--epochs", "100000", "--eval-every", "0", "--checkpoint-every", "20")
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        both = [start_machine(runs, network, i, *settings, folder="run") for i in range(2)]
        both[0].wait_for(lambda: both[0].records("steps"), "steps of both machines")
        launched = (tmp_path / "run" / "launch.json").read_bytes()
        for i in range(2):
            again = start_machine(runs, network, i, *settings, folder="run")
            assert again.end() == 2 and again.errors().count("\n") == 1, again.text()
            assert f"already, by the command of process {both[i].process.pid}: " in again.errors()
        assert (tmp_path / "run" / "launch.json").read_bytes() == launched
        last = both[0].records("steps")[-1]["step"]
        both[0].wait_for_step(last + 20)
        assert len(both[0].records("start")) == 1 and not both[0].events("worker_died")
        for pid in marked_processes(both[1].mark):
            os.kill(pid, signal.SIGKILL)
        both[1].process.wait()
        third = start_machine(runs, network, 1, *settings, folder="run")  # at once: the first command is dead
        both[0].wait_for(lambda: len(both[0].records("start")) > 1 and _sizes(both[0])[-1] == 2, "the machine again")
        os.kill(both[0].process.pid, signal.SIGTERM)
        assert [both[0].end(), third.end()] == [143, 143], both[0].text() + third.text()
