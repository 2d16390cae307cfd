"""What a pod runs, as process 1 of a process namespace: its signal leaves a checkpoint, from which a new pod goes on.

No cluster is seen here: the kubelet's part (SIGTERM to process 1, then the grace period) is this test's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.config import build
from echelon.launch.places import PLACES
from echelon.launch.places.cluster import Submission
from echelon.launch.places.k8s import JOB_VARIABLE, SECRETS_FOLDER, Kubernetes
from echelon.messages.identity import SECRET_VARIABLE, read_secret
from echelon.records.file import read_records
from echelon.records.kinds import Checkpoint, Steps
from echelon.run.elsewhere import prepared

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
