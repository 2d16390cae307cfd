"""Runs over ssh on three hosts: the same bits as here, a host that is lost and comes back, no common disk, refusals."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from echelon.checkpoint import CheckpointStore
from echelon.messages.identity import SECRET_FILE
from tests.clusters.sshd import SshHosts, no_hosts, ssh_hosts
from tests.ranks.runs import DEADLINE_S, SMALL, Run, Runs, losses_of

pytestmark = [
    pytest.mark.skipif(bool(no_hosts()), reason=no_hosts() or "there are some"),
    pytest.mark.timeout(900),
]
SETTINGS = ("train", "digits", *SMALL, "--model", "mlp", "--batch-size", "96", "--timeout", "10m", "--eval-every", "0")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as hosts:
        yield hosts


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    newest = CheckpointStore(folder / "checkpoints", keep=1).newest()
    assert newest is not None
    return {name: value for name, value in newest[1]["model"].items() if isinstance(value, torch.Tensor)}


def _check_same(here: Run, there: Run) -> None:
    assert losses_of(there.folder) == losses_of(here.folder)
    ours, theirs = _tensors(here.folder), _tensors(there.folder)
    assert ours and ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def _told(*words: str, cwd: Path) -> str:
    """Return what a command prints."""
    command = [sys.executable, "-m", "echelon", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _wait_for(*words: str, until: str, cwd: Path) -> str:
    """Give a command again and again until it says something; returns all that it says then."""
    ends = time.monotonic() + DEADLINE_S
    while until not in (told := _told(*words, cwd=cwd)):
        assert time.monotonic() < ends, told
    return told


@pytest.mark.long
def test_the_same_bits_as_here(tmp_path: Path, hosts: SshHosts) -> None:
    steps = ("--workers", "1", "--max-steps", "10")
    with Runs(tmp_path) as runs:
        there = runs.start(*SETTINGS, *steps, "--on", hosts.place("a", "b"), folder="there")
        assert there.end() == 0, there.text()
        here = runs.start(*SETTINGS, *steps, "--workers", "2", folder="here")
        assert here.end() == 0, here.text()
        _check_same(here, there)
        assert "running on a, b" in there.text() and "Completed after 10 steps" in there.text()
        secret = (there.folder / "machines" / SECRET_FILE).read_text().strip()
        written = [file for part in ("place", "logs") for file in (there.folder / part).rglob("*") if file.is_file()]
        assert [file for file in written if secret in file.read_text(errors="replace")] == [] and len(secret) == 64


@pytest.mark.long
def test_what_is_refused(tmp_path: Path, hosts: SshHosts) -> None:
    with Runs(tmp_path) as runs:
        refused = runs.start(*SETTINGS, "--on", hosts.place("a", "nobody"), folder="a")
        wrong = runs.start(*SETTINGS, "--on", hosts.place("a", more=', python="/usr/bin/python3"'), folder="b")
        assert refused.end() == 2 and "nobody does not answer" in refused.errors(), refused.text()
        assert wrong.end() == 2 and "a has no echelon" in wrong.errors(), wrong.text()
        assert not refused.folder.exists() and not wrong.folder.exists()


@pytest.mark.long
def test_logs_are_followed_to_the_end_without_a_common_disk(tmp_path: Path, hosts: SshHosts) -> None:
    place = hosts.place("a", "b", more=f', folder="{hosts.disk}", python="{sys.executable}", code=false')
    with Runs(tmp_path) as runs:
        settings = (*SETTINGS, "--workers", "1", "--epochs", "40")
        there = runs.start(*settings, "--on", place, "--detach", folder="there")
        assert there.end() == 0, there.text()
        followed = [runs.start("logs", there.folder, "-f", *which) for which in ((), ("--rank", "1"))]
        followed[0].wait_for(lambda: "epoch 1/" in followed[0].text(), "the first host's words")
        assert followed[0].process.poll() is None
        assert [each.end() for each in followed] == [0, 0], [each.errors() for each in followed]
        assert "epoch 40/40" in followed[0].text()
        assert (there.folder / "logs" / "rank1.log").read_text() in followed[1].text()


@pytest.mark.slow
def test_without_a_common_disk(tmp_path: Path, hosts: SshHosts) -> None:
    (tmp_path / ".gitignore").write_text("*.secret\n")
    (tmp_path / "own.py").write_text("")
    (tmp_path / "key.secret").write_text("")
    place = hosts.place("a", "b", more=f', folder="{hosts.disk}", python="{sys.executable}"')
    with Runs(tmp_path) as runs:
        settings = (*SETTINGS, "--schedule", "constant", "--epochs", "4000")
        there = runs.start(*settings, "--workers", "1", "--on", place, "--detach", folder="there")
        assert there.end() == 0 and "files of the working folder" in there.text(), there.text()
        runs_says = _wait_for("runs", ".", until="60000 steps", cwd=tmp_path)
        assert "running on a, b" in runs_says
        assert "mlp on digits" in _told("watch", "there", "--once", cwd=tmp_path)
        assert "waiting for 1 more" in _told("logs", "there", cwd=tmp_path)
        assert _told("logs", "there", "--rank", "1", cwd=tmp_path) == (there.folder / "logs/rank1.log").read_text()
        assert "saves a checkpoint" in _told("stop", "there", cwd=tmp_path)
        _wait_for("runs", ".", until="stopped", cwd=tmp_path)
        most = str(there.records("checkpoint")[-1]["step"] + 10)
        _told("resume", "there", "--max-steps", most, "--detach", cwd=tmp_path)
        _wait_for("runs", ".", until="completed", cwd=tmp_path)
        here = runs.start(*settings, "--max-steps", most, "--workers", "2", folder="here")
        assert here.end() == 0, here.text()
        _check_same(here, there)
        for host in ("a", "b"):
            sent = hosts.ask(host, f"ls {hosts.disk}/*/code").stdout.split()
            assert "own.py" in sent and "key.secret" not in sent and "there" not in sent
        assert not list(hosts.disk.iterdir()), "the hosts' disk is not this machine's"


@pytest.mark.slow
def test_a_run_that_lives_at_a_url_outlives_all_disks(
    tmp_path: Path, hosts: SshHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, more = f"file://{tmp_path}/store/run", f', folder="{hosts.disk}", python="{sys.executable}", code=false'
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = (*SETTINGS, "--schedule", "constant", "--max-steps")
    with Runs(tmp_path) as runs:
        place = hosts.place("a", "b", more=more)
        there = runs.start(*settings, "10", "--workers", "1", "--on", place, "--run", url)
        assert there.end() == 0, there.text()
        again = runs.start(*settings, "10", "--workers", "1", "--on", place, "--run", url)
        assert again.end() == 2 and f"continue it with `echelon resume {url}`" in again.errors(), again.text()
        shutil.rmtree(tmp_path / "cache")
        for host in ("a", "b"):
            hosts.ask(host, f"rm -rf {hosts.disk}/*")
        _told("resume", url, "--max-steps", "20", "--on", hosts.place("c", "b", more=more), cwd=tmp_path)
        here = runs.start(*settings, "20", "--workers", "2", folder="here")
        assert here.end() == 0, here.text()
        _told("copy", url, "brought", cwd=tmp_path)
        ours, theirs = _tensors(here.folder), _tensors(tmp_path / "brought")
        assert ours and [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.slow
def test_a_host_is_lost_and_comes_back(tmp_path: Path, hosts: SshHosts) -> None:
    settings = ("--workers", "1", "--epochs", "4000", "--checkpoint-every", "20")
    with Runs(tmp_path) as runs:
        there = runs.start(*SETTINGS, *settings, "--on", hosts.place("a", "b"), "--timeout", "1m", folder="there")
        there.wait_for_step(40)
        hosts.fail("b")
        there.wait_for(lambda: "b does not answer" in there.text(), "the host's silence")
        last = there.records("steps")[-1]
        hosts.begin("b")
        there.wait_for(lambda: "b is back" in there.text(), "a start of the lost part")
        there.wait_for_step(last["step"] + 20, after_t=last["t"] + 1)
        there.process.send_signal(signal.SIGINT)
        assert there.end() == 130, there.text()
        saved = there.records("checkpoint")[-1]
        assert saved["reason"] == "stop" and saved["step"] == there.records("steps")[-1]["step"]


@pytest.mark.slow
def test_a_host_leaves_a_run_with_servers(tmp_path: Path, hosts: SshHosts) -> None:
    """The command for the first host is given here; the part of the host that left has ended well."""
    place = hosts.place("a", "b", more=f', folder="{hosts.disk}", python="{sys.executable}"')
    with Runs(tmp_path) as runs:
        settings = ("--workers", "1", "--sync", "ps(mode=async)", "--epochs", "4000", "--on", place, "--detach")
        there = runs.start(*SETTINGS, *settings, folder="there")
        assert there.end() == 0, there.text()
        _wait_for("nodes", "there", until="worker1", cwd=tmp_path)
        assert "worker1 leaves" in _told("nodes", "there", "drain", "worker1", cwd=tmp_path)
        members = json.loads(_told("nodes", "there", "--json", cwd=tmp_path))
        assert [m["name"] for m in members["members"] if m["role"] == "worker"] == ["worker0"]
        refused = runs.start("nodes", there.folder, "drain", "worker0")
        assert refused.end() == 2 and "nobody would be left to train" in refused.errors(), refused.text()
        assert "worker2" in _told("nodes", "there", "add", "1", cwd=tmp_path)
        _told("stop", "there", cwd=tmp_path)
        _wait_for("runs", ".", until="stopped", cwd=tmp_path)
