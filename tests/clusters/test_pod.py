"""What a pod runs, as process 1 of a process namespace: its signal leaves a checkpoint, from which a new pod goes on.

Without a volume each pod has file systems of its own, and a new one goes on from the run's URL. No cluster is seen:
the kubelet's part (mounts, names of hosts, SIGTERM to process 1, then the grace period) is these tests'.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.config import build
from echelon.launch.places import PLACES
from echelon.launch.places.cluster import MEETING, NodeRank, Submission
from echelon.launch.places.k8s import JOB_VARIABLE, SECRETS_FOLDER, Kubernetes
from echelon.launch.places.k8s_bare import bring_told, description
from echelon.messages.identity import SECRET_VARIABLE, read_secret
from echelon.records.file import read_records
from echelon.records.kinds import Checkpoint, End, Start, Steps
from echelon.run.elsewhere import prepared
from echelon.run.home import bring
from echelon.storage.archive import Archive
from echelon.storage.url import open_store

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"),
    pytest.mark.timeout(600),
]
DEADLINE_S = 200.0
STEPS = 4000


def _submission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Kubernetes, Submission]:
    """Return a place and a run of it whose folder is made; no API server is asked."""
    spec = f'k8s(image=i, claim=c, mount="{folder}", python="{sys.executable}", grace=1m)'
    place = PLACES.build(spec)
    assert isinstance(place, Kubernetes)
    monkeypatch.setattr(Kubernetes, "check", lambda *_: None)
    monkeypatch.chdir(folder)
    settings = {
        "data.source": "digits", "model.name": "mlp", "launch.on": spec, "launch.workers": "1", "launch.threads": "1",
        "training.device": "cpu", "training.epochs": "1000", "training.max_steps": str(STEPS), "run": "run",
        "training.eval_every": "0",
    }  # fmt: skip
    return place, prepared(build(None, settings).config, place, "mlp")


class _Pod:
    """A container of the manifest, in a process namespace of its own."""

    def __init__(self, job: dict[str, Any], key: str) -> None:
        (container,) = job["spec"]["template"]["spec"]["containers"]
        told = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        assert set(told) == {JOB_VARIABLE} and {each["name"] for each in container["env"]} == {*told, SECRET_VARIABLE}
        environment = {**os.environ, **told, SECRET_VARIABLE: key, "JOB_COMPLETION_INDEX": "0"}
        self.process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *container["command"]],
            cwd=container["workingDir"], env=environment,
        )  # fmt: skip

    def stop(self) -> None:
        """Send SIGTERM to process 1, as the kubelet does."""
        (first,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)

    def wait_for(self, ready: Callable[[], Any], what: str) -> None:
        ends = time.monotonic() + DEADLINE_S
        while not ready():
            assert self.process.poll() is None and time.monotonic() < ends, what
            time.sleep(0.1)


def test_a_signal_to_process_1_leaves_a_checkpoint_and_a_new_pod_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, submission = _submission(tmp_path, monkeypatch)
    job, run = place.manifests(submission)[2], submission.run
    key = read_secret(run / SECRETS_FOLDER).hex()
    pod = _Pod(job, key)
    try:
        pod.wait_for(lambda: read_records(run, Steps), "a step")
        pod.stop()
        code = pod.process.wait(place.stop_s)
    finally:
        pod.process.kill()
    assert code == 143, (run / "logs" / "node0.out").read_text()  # which the pod failure policy has a new pod follow
    last, saved = read_records(run, Steps)[-1].step, read_records(run, Checkpoint)[-1]
    assert (saved.step, saved.reason) == (last, "stop") and last < STEPS
    again = _Pod(job, key)
    try:
        assert again.process.wait(DEADLINE_S) == 0, (run / "logs" / "node0.out").read_text()
    finally:
        again.process.kill()
    steps = read_records(run, Steps)
    assert steps[-1].step == STEPS and sum(len(each.losses) for each in steps) == STEPS


MOUNT = """
set -e
mount -t tmpfs none /mnt
mkdir -p /mnt/echelon/runs /mnt/echelon/described/place
cp "$DESCRIBED"/*.* /mnt/echelon/described/
cp "$DESCRIBED"/place/* /mnt/echelon/described/place/
mount --bind "$HOSTS" /etc/hosts
cd /
exec "$@"
"""


def _bare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Kubernetes, Submission, str]:
    """Return a place without a volume and a run of it that lives at a URL, and the URL."""
    spec, url = f'k8s(image=i, nodes=2, python="{sys.executable}", grace=1m)', f"file://{folder}/bucket/run"
    place = PLACES.build(spec)
    assert isinstance(place, Kubernetes)
    monkeypatch.setattr(Kubernetes, "check", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    settings = {
        "data.source": "digits", "model.name": "mlp", "launch.on": spec, "launch.workers": "1", "launch.threads": "1",
        "training.device": "cpu", "training.epochs": "1000", "training.max_steps": str(STEPS), "run": url,
        "training.eval_every": "0", "checkpoint.every": "200",
    }  # fmt: skip
    return place, prepared(build(None, settings).config, place, "mlp"), url


class _BarePods:
    """Pods that share nothing but the network and the bucket."""

    def __init__(self, folder: Path, place: Kubernetes, submission: Submission) -> None:
        self._folder, self.names = folder, 0
        self.described = folder / "described"
        *_, job = place.manifests(submission)
        name = job["metadata"]["name"]
        submission.files.meet_at(NodeRank(0, name, "", name), f"{name}-0.{name}:{_free_port()}")
        data = description(submission.files, submission.run, f"{MEETING}{name}")
        volumes = {each["name"]: each for each in job["spec"]["template"]["spec"]["volumes"]}
        for item in volumes["described"]["configMap"]["items"]:
            path = self.described / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(data[item["key"]])
        (folder / "hosts").write_text(f"127.0.0.1 localhost {name}-0.{name}\n")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        self._command, self._job = container["command"], name
        self._key = read_secret(submission.run / SECRETS_FOLDER).hex()

    def start(self, number: int) -> tuple[subprocess.Popen[bytes], Path]:
        """Start the pod of a number; returns it, and what it prints."""
        self.names += 1
        log = self._folder / f"pod-{number}-{self.names}.log"
        environment = {
            **os.environ, JOB_VARIABLE: self._job, SECRET_VARIABLE: self._key, "JOB_COMPLETION_INDEX": str(number),
            "HOSTNAME": f"{self._job}-{number}", "DESCRIBED": str(self.described), "HOSTS": str(self._folder / "hosts"),
            "XDG_CACHE_HOME": f"/mnt/cache{number}", "TMPDIR": "/mnt",
        }  # fmt: skip
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with log.open("wb") as file:
            command = [*unshare, "/bin/sh", "-c", MOUNT, "_", *self._command]
            return subprocess.Popen(command, env=environment, stdout=file, stderr=file), log


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_without_a_volume_a_new_pod_goes_on_from_the_run_s_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, submission, url = _bare(tmp_path, monkeypatch)
    pods = _BarePods(tmp_path, place, submission)
    running = {number: pods.start(number) for number in range(2)}
    everyone = list(running.values())
    archive = Archive(open_store(url))

    def printed() -> str:
        return "\n".join(log.read_text(errors="replace") for _, log in everyone)

    def wait_for(ready: Callable[[], Any], what: str) -> None:
        ends = time.monotonic() + DEADLINE_S
        while not ready():
            assert time.monotonic() < ends, f"{what}: {printed()}"
            time.sleep(0.1)

    def steps_saved() -> int:
        newest = archive.newest()
        return int(newest.label.split()[1]) if newest is not None and newest.label.startswith("step") else 0

    try:
        wait_for(lambda: steps_saved() >= 400, "a checkpoint")
        running[0][0].kill()  # with all that is in its process namespace, and its folder
        running[0][0].wait()
        running[0] = pods.start(0)
        everyone.append(running[0])
        for number in range(2):
            process = running[number][0]
            wait_for(lambda process=process: process.poll() is not None, f"the end of pod {number}")  # type: ignore[misc]
            assert process.returncode == 0, printed()
    finally:
        for process, _ in everyone:
            process.kill()
            process.wait()
    run = bring(url, tmp_path / "brought")
    assert read_records(run, Steps)[-1].step == STEPS and read_records(run, End)[-1].status == "completed"
    assert len(read_records(run, Start)) >= 2, "the new pod went on"
    trained = [step for each in read_records(run, Steps) for step in range(each.step - len(each.losses), each.step)]
    assert sorted(set(trained)) == list(range(STEPS))
    bring_told(url, tmp_path / "told")
    assert read_records(tmp_path / "told", End)[-1].status == "completed"
    assert not (tmp_path / "told" / "checkpoints").exists() and (tmp_path / "told" / "report.html").exists()
