"""The Kubernetes place: manifests that strict schemas pass, the client's calls against a small API server of the test.

No cluster is seen here: what a real one makes of the manifests is not shown by these tests.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from echelon.core.errors import UserError
from echelon.launch.places import PLACES, PlaceChoice
from echelon.launch.places.cluster import ChainedJob, JobPhase, JobState, NodeRank, PlaceFiles, PlaceSilent, Submission
from echelon.launch.places.k8s import JOB_VARIABLE, Kubernetes
from echelon.messages.identity import make_secret, read_secret
from echelon.storage.archive import Archive, ArchiveWriter, sha256_of
from echelon.storage.url import open_store

GOLDEN = Path(__file__).with_name("k8s_manifests.yaml")  # written anew by ECHELON_WRITE_GOLDEN=1
BARE_GOLDEN = Path(__file__).with_name("k8s_bare_manifests.yaml")
SUBMISSION = Submission(Path("/runs/me/digits 1"), Path("/runs/me"))
PLACE = 'k8s(image="reg/echelon:1", nodes=2, namespace=ml, claim=runs, mount="/runs", gpus=4, cores=8, memory=64gb)'
BARE = 'k8s(image="reg/echelon:1", nodes=4, namespace=ml, credentials=store)'
URL = "s3://bucket/runs/digits 1"
NO_CLIENT = """
import sys
sys.modules["kubernetes"] = None
from echelon.cli import command
sys.argv = ["echelon", "train", "digits", "--on", sys.argv[1], "--run", sys.argv[2] + "/a"]
command()
"""


def _build(text: str = PLACE) -> Kubernetes:
    place = PLACES.build(text)
    assert isinstance(place, Kubernetes)
    return place


@pytest.mark.parametrize("uid", [0, 1000])
def test_manifests_pass_strict_schemas(uid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    monkeypatch.setattr(os, "getuid", lambda: uid)
    bare = ["Service", "Secret", "ConfigMap", "Job"]
    for place, kinds in (
        (PLACE, None),
        ('k8s(image=i, claim=c, mount="/runs")', None),
        (BARE, bare),
        ("k8s(image=i)", bare),
    ):
        manifests = list(yaml.safe_load_all(_build(place).text(SUBMISSION)))
        assert [m["kind"] for m in manifests] == (kinds or ["Service", "Secret", "Job"])
        for manifest in manifests:
            schemas.validate(manifest, "1.31", strict=True)


def test_manifests_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgid", lambda: 100)
    for place, golden in ((PLACE, GOLDEN), (BARE, BARE_GOLDEN)):
        text = _build(place).text(SUBMISSION)
        if os.environ.get("ECHELON_WRITE_GOLDEN"):
            golden.write_text(text)
        assert text == golden.read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("k8s", "image must be given"),
        ('k8s(image=i, mount="/runs")', "claim and mount belong together"),
        ("k8s(image=i, claim=runs)", "claim and mount belong together"),
        ("k8s(image=i, claim=c, mount=runs)", "mount must be an absolute path"),
        ('k8s(image=i, claim=c, mount="/r", nodes=0)', "nodes must be at least 1"),
        ('k8s(image=i, claim=c, mount="/r", memory=8h)', "memory must be a size"),
        ("k8z", "did you mean k8s?"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match="--on") as refused:
        PlaceChoice(text).cluster()
    assert words in str(refused.value)


def test_a_folder_that_pods_do_not_see(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--run .* is not below mount=/runs"):
        _build().check(Submission(tmp_path, Path("/runs")), {})
    with pytest.raises(UserError, match=r"the working folder .* is not below mount=/runs"):
        _build().check(Submission(Path("/runs/a"), tmp_path), {})


@pytest.mark.parametrize("home", ["", "file:///tmp/run"])
def test_without_a_volume_a_run_must_live_at_a_url(home: str) -> None:
    with pytest.raises(UserError, match="give --run URL, such as s3://BUCKET/runs/NAME; or claim and mount"):
        _build(BARE).check(Submission(Path("/home/me/run"), Path("/home/me"), home=home), {})


def test_a_machine_without_the_client(tmp_path: Path) -> None:
    place = f'k8s(image=i, claim=c, mount="{tmp_path}")'
    command = [sys.executable, "-c", NO_CLIENT, place, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--on k8s needs kubernetes: pip install 'echelon[kubernetes]'" in done.stderr
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []


def test_the_seat_of_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    place = _build('k8s(image=i, claim=c, mount="/runs", nodes=2)')
    pod = {"JOB_COMPLETION_INDEX": "1", JOB_VARIABLE: "echelon-a-1", "HOSTNAME": "echelon-a-1-1"}
    assert place.node_rank(pod) == NodeRank(1, "echelon-a-1-1", "echelon-a-1-0.echelon-a-1", "echelon-a-1")
    with pytest.raises(UserError, match="a pod of an indexed Job"):
        place.node_rank({})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="--on asks for 4"):
        _build().node_rank(pod)


class _Api(ThreadingHTTPServer):
    """An API server that keeps jobs, services and secrets by their paths, and answers as told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kept: dict[str, dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.logs: dict[str, str] = {}  # of pods
        self.refuses = ""  # paths that end like this


class _Handler(BaseHTTPRequestHandler):
    server: _Api

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, code: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _text(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def _path(self) -> str:
        return self.path.partition("?")[0]

    def _value(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return value

    def _kept(self) -> dict[str, Any] | None:
        found = self.server.kept.get(self._path())
        if found is None:
            self._answer(404, {"message": "not found"})
        return found

    def do_GET(self) -> None:
        if self._path().endswith("/pods"):
            self._answer(200, {"items": self.server.pods})
        elif self._path().endswith("/log"):
            log = self.server.logs.get(self._path().split("/")[-2])
            self._text(log) if log is not None else self._answer(404, {"message": "no log"})
        elif self._path().endswith("/jobs"):
            kept = [value for path, value in self.server.kept.items() if path.startswith(f"{self._path()}/")]
            self._answer(200, {"items": kept})
        elif (found := self._kept()) is not None:
            self._answer(200, found)

    def do_POST(self) -> None:
        value = self._value()
        if self.server.refuses and self._path().endswith(self.server.refuses):
            self._answer(403, {"message": "services is forbidden"})
            return
        value["metadata"]["uid"] = "uid-1"
        value.setdefault("status", {})
        self.server.kept[f"{self._path()}/{value['metadata']['name']}"] = value
        self._answer(201, value)

    def do_PATCH(self) -> None:
        change = self._value()
        if (found := self._kept()) is not None:
            found["spec"] |= change["spec"]
            self._answer(200, found)

    def do_DELETE(self) -> None:
        if self.headers.get("Content-Length"):
            self._value()
        if self._kept() is not None:
            self._answer(200, self.server.kept.pop(self._path()))


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Api]:
    pytest.importorskip("kubernetes", reason="kubernetes is not installed")
    server = _Api()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    cluster = {"server": f"http://127.0.0.1:{server.server_address[1]}"}
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def _submission(tmp_path: Path) -> tuple[Kubernetes, Submission, str]:
    submission = Submission(tmp_path / "run", tmp_path)
    (submission.run / "machines").mkdir(parents=True)
    submission.files.prepare()
    key = make_secret(submission.run / "machines").hex()
    place = _build(f'k8s(image=i, nodes=2, namespace=ml, claim=c, mount="{tmp_path}")')
    place.check(submission, {})
    return place, submission, key


def test_a_job_is_made_followed_and_stopped(tmp_path: Path, api: _Api) -> None:
    place, submission, key = _submission(tmp_path)
    name = place.submit(submission)
    job = api.kept[f"/apis/batch/v1/namespaces/ml/jobs/{name}"]
    secret = api.kept[f"/api/v1/namespaces/ml/secrets/{name}"]
    assert base64.b64decode(secret["data"]["secret"]).decode() == key and len(api.kept) == 3
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert key not in json.dumps(job) and key not in submission.files.text.read_text()
    assert submission.files.meeting(NodeRank(1, "", "", name)) == f"{name}-0.{name}:29400"

    unfit = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    api.pods = [{"status": {"conditions": [unfit]}, "spec": {"containers": [{"name": "echelon"}]}}]
    states = {
        "waiting for 2 nodes (0/3 nodes are available)": (JobPhase.WAITS, {"active": 2}),
        "running": (JobPhase.RUNS, {"active": 2, "ready": 2}),
        "complete": (JobPhase.ENDED, {"conditions": [{"type": "Complete", "status": "True"}]}),
        "failed: too often": (
            JobPhase.ENDED, {"conditions": [{"type": "Failed", "status": "True", "message": "too often"}]}),
    }  # fmt: skip
    for words, (phase, status) in states.items():
        job["status"] = status
        state = place.state(name)
        assert (state.phase, state.text) == (phase, words)

    job["status"] = {"active": 2}
    place.stop(name)
    assert job["spec"]["suspend"] is True and place.state(name).phase is JobPhase.RUNS
    job["status"] = {"terminating": 2}
    assert place.state(name) == JobState(JobPhase.RUNS, "stopping"), "its pods save a checkpoint"
    job["status"] = {}
    assert place.state(name).phase is JobPhase.ENDED
    assert place.submit(submission) == name  # in the place of the one that was suspended
    assert "suspend" not in api.kept[f"/apis/batch/v1/namespaces/ml/jobs/{name}"]["spec"]


def _pod(name: str, number: int, made: str, state: dict[str, Any]) -> dict[str, Any]:
    status = {"name": "echelon", "image": "i", "imageID": "", "ready": True, "restartCount": 0, "state": state}
    return {
        "metadata": {
            "name": name, "creationTimestamp": f"2026-01-01T00:00:{made}Z",
            "annotations": {"batch.kubernetes.io/job-completion-index": str(number)},
        },
        "spec": {"containers": [{"name": "echelon"}]}, "status": {"containerStatuses": [status]},
    }  # fmt: skip


RUNNING: dict[str, Any] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


def _over(code: int, message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "message": message}}


def _bare(tmp_path: Path, api: _Api) -> tuple[Kubernetes, Path, dict[str, Any]]:
    """Submit a run without a volume whose home is a folder in the place of a bucket; returns its Job too."""
    submission = Submission(tmp_path / "copy-of-run", tmp_path, home=URL)
    (submission.run / "machines").mkdir(parents=True)
    (submission.run / "logs").mkdir()
    for name, text in (("config.yaml", "a: 1\n"), ("launch.json", "{}")):
        (submission.run / name).write_text(text)
    submission.files.prepare(f"file://{tmp_path}/bucket")
    (submission.files.folder / "versions").write_text("{}")
    make_secret(submission.run / "machines")
    place = _build("k8s(image=i, nodes=2, namespace=ml)")
    place.check(submission, {})
    name = place.submit(submission)
    submission.files.add_job(name)
    return place, submission.run, api.kept[f"/apis/batch/v1/namespaces/ml/jobs/{name}"]


def test_without_a_volume_the_description_travels_and_what_pods_print_is_brought(tmp_path: Path, api: _Api) -> None:
    place, run, job = _bare(tmp_path, api)
    name = job["metadata"]["name"]
    described = api.kept[f"/api/v1/namespaces/ml/configmaps/{name}"]
    assert described["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert described["data"] == {
        "config.yaml": "a: 1\n", "launch.json": "{}", "versions": "{}", "home": f"file://{tmp_path}/bucket",
        "meeting": json.dumps({"address": f"{name}-0.{name}:29400"}),
    }  # fmt: skip
    secret = read_secret(run / "machines").hex()
    assert secret not in json.dumps([described, job]) + PlaceFiles(run).text.read_text()

    writer = ArchiveWriter(Archive(open_store(f"file://{tmp_path}/bucket")), honours_conditions=True)
    writer.claim(None)
    (tmp_path / "record").write_text("first\n")
    (tmp_path / "weights").write_text("much")
    files = {"record.jsonl": "record", "checkpoints/step-1/model": "weights", "config.yaml": "weights"}
    sent = {name: (tmp_path / of, sha256_of(tmp_path / of)) for name, of in files.items()}
    writer.commit(sent, "step 1")
    api.pods = [_pod("a-0-y", 0, "02", RUNNING), _pod("a-0-x", 0, "01", _over(143)), _pod("a-1-z", 1, "01", RUNNING)]
    api.logs = {"a-0-y": "step 1\n", "a-0-x": "old\n", "a-1-z": "second\n"}
    job["status"] = {"active": 2, "ready": 2}
    place.bring(run)
    assert (run / "logs/node0.out").read_text() == "step 1\n" and not (run / "logs/node1.out").exists()
    api.pods.append(_pod("a-0-z", 0, "03", RUNNING))
    place.bring(run)  # a log that is gone, or not there yet, is nothing
    api.logs["a-0-z"] = "step 2\n"
    place.bring(run)
    assert (run / "logs/node0.out").read_text() == "step 1\nstep 2\n", "of a pod that is replaced it stays"
    assert (run / "config.yaml").read_text() == "a: 1\n"
    assert (run / "record.jsonl").read_text() == "first\n" and not (run / "checkpoints").exists()
    place.bring_logs(run)
    assert (run / "logs/node1.out").read_text() == "second\n" and PlaceFiles(run).ended() is None


@pytest.mark.parametrize(
    ("status", "states", "is_stopped", "ended"),
    [
        ({"conditions": [{"type": "Complete", "status": "True"}]}, [_over(0), _over(0)], False, (0, "")),
        (
            {"conditions": [{"type": "Failed", "status": "True"}]},
            [_over(143), _over(2, "torch\nechelon: the pod has torch 2.0\n")], False, (2, "the pod has torch 2.0"),
        ),
        ({"conditions": [{"type": "Failed", "status": "True"}]}, [_over(1, "x: bad\n")], False, (1, "x: bad")),
        ({}, [], True, (143, "")),
    ],
)  # fmt: skip
def test_without_a_volume_the_end_is_what_the_cluster_says(
    status: dict[str, Any], states: list[dict[str, Any]], is_stopped: bool, ended: tuple[int, str], tmp_path: Path,
    api: _Api,
) -> None:  # fmt: skip
    place, run, job = _bare(tmp_path, api)
    job["status"] = status
    if is_stopped:
        PlaceFiles(run).stop.write_text("")
        place.stop(job["metadata"]["name"])
    api.pods = [_pod(f"p-{number}", number, "01", state) for number, state in enumerate(states)]
    api.logs = {f"p-{number}": "" for number in range(len(states))}
    place.bring(run)
    assert PlaceFiles(run).ended() == ended


def test_a_flow_needs_a_volume() -> None:
    with pytest.raises(UserError, match="for a flow needs claim and mount"):
        _build(BARE).chained_text(ChainedJob("a", Path("/a.sh"), {0: ["python", "x"]}))


def test_steps_of_a_flow_are_jobs(tmp_path: Path, api: _Api) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    place = _build(f'k8s(image=i, namespace=ml, claim=c, mount="{tmp_path}", python="/opt/python")')
    commands = {0: ["python", "-m", "echelon.flows.child", "tune[lr=0.1]"], 3: ["python", "x"]}
    job = ChainedJob("echelon-Tune_a-12ab34cd", tmp_path / "tune.sh", commands, True, (), 2, 1e9, 1, 60.0)
    for manifest in yaml.safe_load_all(place.chained_text(job)):
        schemas.validate(manifest, "1.31", strict=True)
        assert manifest["spec"]["template"]["spec"]["containers"][0]["resources"] == {
            "requests": {"cpu": "2", "nvidia.com/gpu": "1", "memory": "1000000000"},
            "limits": {"nvidia.com/gpu": "1", "memory": "1000000000"},
        }
    names = {0: "echelon-tune-a-12ab34cd-0", 3: "echelon-tune-a-12ab34cd-3"}
    assert place.submit_chained(job) == names == place.chained(job.name) and job.script.exists()
    kept = api.kept[f"/apis/batch/v1/namespaces/ml/jobs/{names[0]}"]
    (word,) = kept["spec"]["template"]["spec"]["containers"][0]["command"][2:]
    assert word.startswith("exec /opt/python -m echelon.flows.child 'tune[lr=0.1]' >>")
    kept["status"] = {"active": 1, "ready": 1}
    assert place.state(names[0]).phase is JobPhase.RUNS
    kept["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    place.stop(names[3])
    assert place.chained(job.name) == {}, "what is over or was stopped is handed over again"
    with pytest.raises(UserError, match="all that pods see"):
        place.submit_chained(replace(job, script=Path("/elsewhere/tune.sh")))


def test_what_the_server_refuses_leaves_nothing(tmp_path: Path, api: _Api) -> None:
    place, submission, _ = _submission(tmp_path)
    api.refuses = "services"
    with pytest.raises(UserError, match="--on k8s: kubernetes: services is forbidden"):
        place.submit(submission)
    assert api.kept == {} and place.state("echelon-x").phase is JobPhase.ENDED
    api.shutdown()
    api.server_close()
    with pytest.raises(PlaceSilent):
        place.stop("echelon-x")
