"""`ps(...)` on several machines, and on shaped links: machines are network namespaces here."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from echelon.launch.link import ShapedNetwork, parse_link
from echelon.reporting.report import load_run
from echelon.reporting.report.tables import link_words
from echelon.trainer.start_weights import best_weights
from tests.ranks.links import LINK, NEEDS_LINKS, start_machine
from tests.ranks.runs import Run, Runs, marked_processes

SECRET = "5a" * 32


pytestmark = [*NEEDS_LINKS, pytest.mark.timeout(400)]


def _done(folder: Path) -> Counter[int]:
    lines = [json.loads(line) for line in (folder / "ps" / "scheduler.jsonl").read_text().splitlines()]
    return Counter(e["task"] for e in lines if e["kind"] == "done")


def _roles(run: Run) -> dict[str, int]:
    return {r["role"]: r["pid"] for r in run.records("process")}


SERVED = ("--nodes", "2", "--sync", "ps(mode=async, servers=2)", "--lr", "0.02", "--epochs", "3")


@pytest.mark.slow
def test_two_machines_with_disks_of_their_own(tmp_path: Path) -> None:
    with ShapedNetwork(3, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        first = start_machine(runs, network, 0, *SERVED, folder="a", secret=SECRET)
        first.wait_for(lambda: "waiting for server1 of the other machines" in first.text(), "that it waits")
        foreign = start_machine(runs, network, 2, *SERVED, "--timeout", "5s", folder="c", secret="66" * 32)
        assert foreign.end() == 2 and "the secret" in foreign.errors() and "Traceback" not in foreign.errors()
        second = start_machine(runs, network, 1, *SERVED, folder="b", secret=SECRET)
        assert [first.end(), second.end()] == [0, 0], first.text() + second.text()
        told = "Here ran 1 worker and 1 server; the run's record and report are on the first machine, at "
        assert [told in run.text() for run in (first, second)] == [False, True]
        assert {"scheduler", "server0", "worker0"} == set(_roles(first))
        assert {"server1", "worker1"} == set(_roles(second))
        assert not (tmp_path / "b" / "ps" / "secret").exists()  # it came by the environment
        done = _done(tmp_path / "a")
        assert set(done.values()) == {1} and set(done) == set(range(len(done)))
        assert first.summary()["status"] == "completed" and first.summary()["metrics"]["top1"] > 0.8
        entries = [json.loads(line) for line in (tmp_path / "a/ps/scheduler.jsonl").read_text().splitlines()]
        assert {e["worker"] for e in entries if e["kind"] == "done"} == {"worker0", "worker1"}


@pytest.mark.slow
@pytest.mark.parametrize("folders", ["ab", "aa"], ids=["disks of their own", "a common disk"])
def test_machines_begin_again_together_to_train_more(tmp_path: Path, folders: str) -> None:
    settings = ("--sync", "ps(mode=sync, servers=2)", "--model", "small_vit", "--epochs", "3",
                "--tune", 'head+unfreeze(epoch=2, pattern="norm")+unfreeze(epoch=3)')  # fmt: skip
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        machines = [
            start_machine(
                runs, network, i, "--nodes", "2", *settings, folder=folder, secret=SECRET if folders == "ab" else None
            )
            for i, folder in enumerate(folders)
        ]
        assert [machine.end() for machine in machines] == [0, 0], "".join(machine.text() for machine in machines)
        first = machines[0]
        said = [event["message"] for event in first.records("event") if event["name"] == "tuning"]
        assert ["epoch 2:" in said[1], "epoch 3:" in said[2], len(said)] == [True, True, 3], said
        steps = [step["step"] for step in first.records("steps")]
        assert steps == sorted(set(steps)) and first.summary()["status"] == "completed"
        here = runs.train("digits", "--workers", "2", "--threads", "1", *settings, folder="here")
        assert here.end() == 0, here.text()
    wanted, got = (best_weights(tmp_path / name, "newest") for name in ("here", "a"))
    assert not [name for name, tensor in wanted.items() if not torch.equal(tensor, got[name])]


@pytest.mark.slow
def test_a_machine_dies_and_comes_back_on_a_common_disk(tmp_path: Path) -> None:
    settings = ("--nodes", "2", "--sync", "ps(mode=async, servers=2, snapshot_every=5)", "--epochs", "200",
                "--eval-every", "0", "--lr", "0.02")  # fmt: skip
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        first = start_machine(runs, network, 0, *settings, folder="run")
        first.wait_for(lambda: (tmp_path / "run/ps/scheduler.json").exists(), "the scheduler")
        second = start_machine(runs, network, 1, *settings, folder="run")
        first.wait_for_step(50)
        for pid in marked_processes(second.mark):
            os.kill(pid, signal.SIGKILL)
        second.process.wait()
        third = start_machine(runs, network, 1, *settings, folder="run")
        reached = first.records("steps")[-1]["step"]
        first.wait_for_step(reached + 100)
        third.process.terminate()
        assert [first.end(), third.end()] == [143, 143], first.text() + third.text()
        assert "stopped" in first.text()
        assert set(_done(tmp_path / "run").values()) == {1}


@pytest.mark.slow
def test_another_learning_rate_is_refused(tmp_path: Path) -> None:
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        first = start_machine(runs, network, 0, *SERVED, folder="a", secret=SECRET)
        second = start_machine(runs, network, 1, *SERVED[:-3], "0.03", *SERVED[-2:], folder="b", secret=SECRET)
        assert second.end() == 2
        assert "was started with --lr 0.03, the first machine with 0.02" in second.errors()
        first.process.terminate()
        first.end()


@pytest.mark.long
def test_roles_on_links_of_their_own(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", "--workers", "2", "--sync", "ps(mode=sync, servers=2)", "--link", "100mbit",
                         "--epochs", "3", "--lr", "0.05", folder="run")  # fmt: skip
        assert run.end() == 0, run.text()
        (link,) = run.records("link")
        assert len(link["hosts"]) == 2 and set(link["servers"]) == {"server0", "server1"}
        carried = sum(
            host[f"{way}_bytes"] - 66 * host[f"{way}_packets"] for host in link["hosts"] for way in ("sent", "received")
        )
        windows, (end,) = run.records("steps"), run.records("end")
        own = sum(w["wire_bytes"] for w in windows)
        copies = sum(w["other_wire_bytes"] for w in windows)
        assert own + copies + end["other_wire_bytes"] == pytest.approx(carried, rel=0.02)
        parameters = 4 * run.records("start")[0]["parameters"]
        pushed = sum(w["wire_bytes_by_group"]["pushed"] for w in windows)
        assert pushed == pytest.approx(len(_done(run.folder)) * parameters, rel=0.02)
        # Given once; what is evaluated and saved after each epoch is read by the disk that all roles see.
        assert copies == pytest.approx(parameters, rel=0.05)
        assert end["other_wire_bytes"] < 1.05 * parameters  # at most a last copy, of servers that ended early
        (words,) = link_words(load_run(run.folder))
        assert abs(float(words.rpartition("(")[2].partition("%")[0])) <= 2
        assert run.summary()["metrics"]["top1"] > 0.8
