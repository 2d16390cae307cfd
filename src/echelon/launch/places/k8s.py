"""A Kubernetes cluster: an indexed Job with one pod per machine, and a headless Service by which the pods meet.

If a pod loses its node, Kubernetes makes a new one, and the other pods wait for it. Not yet seen on a real cluster.

Helps: Runs on a Kubernetes cluster.
Needs: echelon[kubernetes], a kubeconfig, an image with the same versions as here, and a volume that all pods and this
    machine see at the same path.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.spec import Quantity
from echelon.launch.places.base import checked_grace
from echelon.launch.places.cluster import (
    ANSWER_S,
    NODE_MODULE,
    ChainedJob,
    Cluster,
    JobPhase,
    JobState,
    NodeRank,
    PlaceSilent,
    Submission,
)
from echelon.launch.plan import visible_gpus
from echelon.messages.identity import SECRET_VARIABLE, read_secret

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

PORT = 29400  # of the first pod, whose network is its own
_FLOW_LABEL, _NUMBER_LABEL = "echelon/flow", "echelon/step"
JOB_VARIABLE = "ECHELON_K8S_JOB"
SECRETS_FOLDER = "machines"  # below a run's folder
_KEY = "secret"
_GPU = "nvidia.com/gpu"
_DEATHS = 20  # of pods for each node, before the Job is given up
Manifest = dict[str, Any]  # a part of one, as Kubernetes has it in JSON
_FINAL_CODES = [1, 2, 126, 127]  # failed, refused, no such command
_STOPPED_CODES = [130, 143]  # a checkpoint was saved: the run goes on in a new pod
_NOT_FOUND = 404


@dataclass(frozen=True)
class Kubernetes(Cluster):
    """A Kubernetes cluster.

    Attributes:
        image: container image with Python and Echelon.
        nodes: number of pods, each on another machine.
        namespace: namespace of the cluster.
        gpus: GPUs of each pod.
        cores: CPU cores of each pod; 0: the cluster's default.
        memory: memory of each pod, such as 64gb; left out: the cluster's default.
        claim: persistent volume claim with the runs, the data and the code.
        mount: path at which the claim is mounted, in the pods and on this machine.
        python: interpreter in the image.
        grace: how long a pod that is stopped or evicted has to save a checkpoint and end, such as 10m; left out: 10m.
        context: context of the kubeconfig; empty: its current one.
    """

    image: str = ""
    nodes: int = 1
    namespace: str = "default"
    gpus: int = 0
    cores: int = 0
    memory: Quantity | None = None
    claim: str = ""
    mount: str = ""
    python: str = "python"
    context: str = ""
    grace: Quantity | None = None

    exit_codes_decide: ClassVar[bool] = True
    holds_order: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse what no Job can be.

        Raises:
            ValueError: names the setting.
        """
        for name in ("image", "claim", "mount"):
            if not getattr(self, name):
                raise ValueError(f'{name} must be given: k8s(image="I", claim=runs, mount="/runs")')
        if not PurePosixPath(self.mount).is_absolute():
            raise ValueError("mount must be an absolute path")
        if self.nodes < 1 or self.gpus < 0 or self.cores < 0:
            raise ValueError("nodes must be at least 1, gpus and cores at least 0")
        if self.memory is not None and self.memory.kind != "size":
            raise ValueError("memory must be a size, such as 64gb")
        checked_grace("grace", self.grace)

    @property
    def machines(self) -> int:
        """How many machines a run is given."""
        return self.nodes

    @property
    def stop_s(self) -> float:
        """The grace period of a pod."""
        return checked_grace("grace", self.grace)

    def check(self, submission: Submission, versions: Mapping[str, str]) -> None:
        """Refuse what the pods would not see, and a machine without the client or its configuration.

        Raises:
            UserError: names the setting.
        """
        for what, path in (("--run", submission.run), ("the working folder", submission.folder)):
            if not path.is_relative_to(self.mount):
                raise UserError(f"--on k8s: {what} {path} is not below mount={self.mount}, which is all that pods see")
        with _in_words():
            self._client()

    def manifests(self, submission: Submission) -> list[Manifest]:
        """Return the Service, the Secret without what it holds, and the Job."""
        name = _job_name(submission)
        metadata = {"name": name, "namespace": self.namespace, "labels": {"app": "echelon"}}
        service = {
            "clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name},
            "ports": [{"name": "meeting", "port": PORT}],
        }  # fmt: skip
        job = {
            "completionMode": "Indexed", "completions": self.nodes, "parallelism": self.nodes,
            "backoffLimit": _DEATHS * self.nodes, "podFailurePolicy": {"rules": _failure_rules()},
            "template": {"metadata": {"labels": {"app": "echelon"}}, "spec": self._pod(submission, name)},
        }  # fmt: skip
        return [
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
            {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"},
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job},
        ]

    def _pod(self, submission: Submission, name: str) -> Manifest:
        apart = {"labelSelector": {"matchLabels": {"job-name": name}}, "topologyKey": "kubernetes.io/hostname"}
        pod: Manifest = {
            "restartPolicy": "Never",
            "subdomain": name,
            "terminationGracePeriodSeconds": math.ceil(self.stop_s),
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
            "containers": [self._container(submission, name)],
            "volumes": self._volumes(),
        }
        if os.getuid():  # files of the run are its user's
            pod["securityContext"] = {"runAsUser": os.getuid(), "runAsGroup": os.getgid()}
        return pod

    def _volumes(self) -> list[Manifest]:
        return [
            {"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ]

    def _container(self, submission: Submission, name: str) -> Manifest:
        run = shlex.quote(str(submission.run))
        output = f'{shlex.quote(str(submission.run / "logs"))}/node"$JOB_COMPLETION_INDEX".out'
        # exec: the signal that ends a pod goes to the node command itself, which saves a checkpoint
        command = f"exec {shlex.quote(self.python)} -m {NODE_MODULE} {run} >>{output} 2>&1"
        needs = {_GPU: str(self.gpus)} if self.gpus else {}
        needs |= {"memory": str(math.ceil(self.memory.value))} if self.memory is not None else {}
        secret = {"secretKeyRef": {"name": name, "key": _KEY}}
        container: Manifest = {
            "name": "echelon", "image": self.image, "command": ["/bin/sh", "-c", command],
            "workingDir": str(submission.folder),
            "env": [{"name": JOB_VARIABLE, "value": name}, {"name": SECRET_VARIABLE, "valueFrom": secret}],
            "volumeMounts": [{"name": "runs", "mountPath": self.mount}, {"name": "shm", "mountPath": "/dev/shm"}],
        }  # fmt: skip
        requests = needs | ({"cpu": str(self.cores)} if self.cores else {})
        resources = {"limits": needs, "requests": requests}
        return container | {"resources": {kind: amounts for kind, amounts in resources.items() if amounts}}

    def text(self, submission: Submission) -> str:
        """Return the manifests; what the Secret holds is added when they are submitted, and shown nowhere."""
        return yaml.safe_dump_all(self.manifests(submission), sort_keys=False)

    def submit(self, submission: Submission) -> str:
        """Create the Job, then the Service and the Secret that go with it; returns the Job's name.

        Raises:
            UserError: the cluster is not reached, or refuses.
        """
        write_atomic(submission.files.text, self.text(submission))
        service, secret, job = self.manifests(submission)
        name = job["metadata"]["name"]
        submission.files.meet_at(_node_rank(0, name, name), f"{name}-0.{name}:{PORT}")
        key = read_secret(submission.run / SECRETS_FOLDER).hex()
        secret["data"] = {_KEY: base64.b64encode(key.encode()).decode()}
        with _in_words():
            self._remove(name)
            batch, core = self._apis()
            made = batch.create_namespaced_job(self.namespace, job, _request_timeout=ANSWER_S)
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": made.metadata.uid}
            for part in (service, secret):
                part["metadata"] = part["metadata"] | {"ownerReferences": [owner]}
            try:
                core.create_namespaced_service(self.namespace, service, _request_timeout=ANSWER_S)
                core.create_namespaced_secret(self.namespace, secret, _request_timeout=ANSWER_S)
            except Exception:
                self._remove(name)
                raise
        return str(name)

    def _remove(self, name: str) -> None:
        """Delete a run's Job with all that goes with it, where there is one, and wait until it is gone."""
        from kubernetes.client import ApiException

        batch, ends = self._apis()[0], time.monotonic() + ANSWER_S
        try:
            while True:
                batch.delete_namespaced_job(
                    name, self.namespace, propagation_policy="Foreground", _request_timeout=ANSWER_S
                )
                if time.monotonic() > ends:
                    raise PlaceSilent(f"job {name} is not deleted in time: see `kubectl get jobs`")
                time.sleep(0.5)
        except ApiException as error:
            if error.status != _NOT_FOUND:
                raise

    def chained_text(self, job: ChainedJob) -> str:
        """Return the Jobs of steps, one pod each."""
        return yaml.safe_dump_all(self._steps(job).values(), sort_keys=False)

    def _steps(self, job: ChainedJob) -> dict[int, Manifest]:
        """Return the Job of each step by its number: a pod that its node loses is made anew, one that failed is not."""
        found = {}
        requests = {"cpu": str(job.cores), **({_GPU: str(job.gpus)} if job.gpus else {})}
        requests |= {"memory": str(math.ceil(job.memory_bytes))} if job.memory_bytes else {}
        limits = {name: amount for name, amount in requests.items() if name != "cpu"}
        for number, command in job.commands.items():
            name = _step_name(job.name, number)
            labels = {"app": "echelon", _FLOW_LABEL: _step_name(job.name), _NUMBER_LABEL: str(number)}
            output = shlex.quote(str(job.script.with_name(f"{name}.out")))
            words = shlex.join([self.python, *command[1:]])
            container = {
                "name": "echelon", "image": self.image, "command": ["/bin/sh", "-c", f"exec {words} >>{output} 2>&1"],
                "volumeMounts": [{"name": "runs", "mountPath": self.mount}, {"name": "shm", "mountPath": "/dev/shm"}],
                "resources": {"requests": requests, **({"limits": limits} if limits else {})},
            }  # fmt: skip
            pod: Manifest = {
                "restartPolicy": "Never", "terminationGracePeriodSeconds": math.ceil(self.stop_s),
                "containers": [container], "volumes": self._volumes(),
            }  # fmt: skip
            if os.getuid():
                pod["securityContext"] = {"runAsUser": os.getuid(), "runAsGroup": os.getgid()}
            lost = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
            found[number] = {
                "apiVersion": "batch/v1", "kind": "Job",
                "metadata": {"name": name, "namespace": self.namespace, "labels": labels},
                "spec": {
                    "backoffLimit": 0, "podFailurePolicy": {"rules": [lost]},
                    "template": {"metadata": {"labels": labels}, "spec": pod},
                },
            }  # fmt: skip
        return found

    def submit_chained(self, job: ChainedJob) -> dict[int, str]:
        """Create the Jobs of steps; what one of the same name left goes.

        Raises:
            UserError: the cluster is not reached, or refuses.
        """
        if not job.script.is_relative_to(self.mount):
            raise UserError(
                f"--on k8s: {job.script.parent} is not below mount={self.mount}, which is all that pods see"
            )
        write_atomic(job.script, self.chained_text(job))
        given = {}
        with _in_words():
            batch, _ = self._apis()
            for number, manifest in self._steps(job).items():
                given[number] = str(manifest["metadata"]["name"])
                self._remove(given[number])
                batch.create_namespaced_job(self.namespace, manifest, _request_timeout=ANSWER_S)
        return given

    def chained(self, name: str) -> dict[int, str]:
        """Return the names of the Jobs of steps that wait or run, by their numbers.

        Raises:
            PlaceSilent: the cluster does not answer now.
        """
        with _silent():
            batch, _ = self._apis()
            labelled = f"{_FLOW_LABEL}={_step_name(name)}"
            found = batch.list_namespaced_job(self.namespace, label_selector=labelled, _request_timeout=ANSWER_S).items
        going = [job for job in found if not _is_over(job) and not job.spec.suspend]
        return {int(job.metadata.labels[_NUMBER_LABEL]): str(job.metadata.name) for job in going}

    def state(self, job: str) -> JobState:
        """Return where a job is.

        Raises:
            PlaceSilent: the cluster does not answer now.
        """
        from kubernetes.client import ApiException

        with _silent():
            batch, core = self._apis()
            try:
                found = batch.read_namespaced_job(job, self.namespace, _request_timeout=ANSWER_S)
            except ApiException as error:
                if error.status != _NOT_FOUND:
                    raise
                return JobState(JobPhase.ENDED, "no more in the cluster")
            status = found.status
            for condition in status.conditions or ():
                if condition.status == "True" and condition.type in ("Complete", "Failed"):
                    words = f": {condition.message}" if condition.message and condition.type == "Failed" else ""
                    return JobState(JobPhase.ENDED, f"{condition.type.lower()}{words}")
            if found.spec.suspend:
                return JobState(
                    JobPhase.RUNS if status.active else JobPhase.ENDED, "stopping" if status.active else "stopped"
                )
            lacking = (found.spec.completions or 1) - (status.ready or 0) - (status.succeeded or 0)
            if lacking <= 0:
                return JobState(JobPhase.RUNS, "running")
            pods = core.list_namespaced_pod(self.namespace, label_selector=f"job-name={job}", _request_timeout=ANSWER_S)
        why = next((reason for pod in pods.items if (reason := _why_waits(pod))), "")
        return JobState(JobPhase.WAITS, f"waiting for {lacking} node{'s' * (lacking != 1)}{f' ({why})' if why else ''}")

    def stop(self, job: str) -> None:
        """Suspend a job: its pods get SIGTERM, and time for a checkpoint; no others are made.

        Raises:
            PlaceSilent: the cluster does not answer now.
        """
        with _silent():
            batch, _ = self._apis()
            batch.patch_namespaced_job(job, self.namespace, {"spec": {"suspend": True}}, _request_timeout=ANSWER_S)

    def node_rank(self, environment: Mapping[str, str]) -> NodeRank:
        """Return this pod's part.

        Raises:
            UserError: this is no pod of a Job, or it has other GPUs than were asked for.
        """
        try:
            number, job = int(environment["JOB_COMPLETION_INDEX"]), environment[JOB_VARIABLE]
        except KeyError as missing:
            raise UserError(
                f"{missing} is not set: this is started by Kubernetes, as a pod of an indexed Job"
            ) from None
        if self.gpus and visible_gpus() != self.gpus:
            raise UserError(f"the pod has {visible_gpus()} GPUs, --on asks for {self.gpus}")
        return _node_rank(number, job, environment.get("HOSTNAME", f"{job}-{number}"))

    def _apis(self) -> tuple[Any, Any]:
        from kubernetes.client import BatchV1Api, CoreV1Api

        client = self._client()
        return BatchV1Api(client), CoreV1Api(client)

    def _client(self) -> ApiClient:
        """Return the official client, for the kubeconfig's cluster or the one that this runs in.

        Raises:
            UserError: it is not installed, or not configured.
        """
        try:
            from kubernetes.client import ApiClient, Configuration
            from kubernetes.config import ConfigException, load_incluster_config, new_client_from_config
        except ImportError:
            raise UserError("--on k8s needs kubernetes: pip install 'echelon[kubernetes]'") from None
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ and not self.context:
                inside = Configuration()
                load_incluster_config(client_configuration=inside)
                return ApiClient(inside)
            return new_client_from_config(context=self.context or None)
        except ConfigException as error:
            raise UserError(f"--on k8s: {' '.join(str(error).split())}: see `kubectl config view`") from None


PLACE = Kubernetes


def _failure_rules() -> list[Manifest]:
    def of_exit(values: list[int]) -> Manifest:
        """Return the rule's condition."""
        return {"containerName": "echelon", "operator": "In", "values": values}

    return [
        {"action": "FailJob", "onExitCodes": of_exit(_FINAL_CODES)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": of_exit(_STOPPED_CODES)},
    ]


def _step_name(name: str, number: int | None = None) -> str:
    """Return the name of a step's Job, or of all of an entry, as hosts may be called: the end tells them apart."""
    word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[-50:].strip("-")
    return word if number is None else f"{word}-{number}"


def _is_over(job: Any) -> bool:
    ends = ("Complete", "Failed")
    return any(each.type in ends and each.status == "True" for each in job.status.conditions or ())


def _job_name(submission: Submission) -> str:
    """Return a name that is the same for a run whenever it is submitted, and that a host may have."""
    word = re.sub(r"[^a-z0-9]+", "-", submission.run.name.lower()).strip("-")[:30].strip("-")
    digest = blake2b(str(submission.run).encode(), digest_size=4).hexdigest()
    return f"echelon-{word}-{digest}" if word else f"echelon-{digest}"


def _node_rank(number: int, job: str, name: str) -> NodeRank:
    return NodeRank(number, name, f"{job}-0.{job}", job)


def _why_waits(pod: Any) -> str:
    """Return why a pod does not run yet, in the cluster's words; empty: it does, or nothing is said."""
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return str(condition.message or condition.reason)
    for container in pod.status.container_statuses or ():
        if container.state.waiting is not None:
            return str(container.state.waiting.reason)
    return ""


@contextmanager
def _silent() -> Iterator[None]:
    """Let what the client raises be that the cluster does not answer now."""
    try:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError  # the client brings it
    except ImportError:
        raise UserError("--on k8s needs kubernetes: pip install 'echelon[kubernetes]'") from None
    try:
        yield
    except ApiException as error:
        raise PlaceSilent(f"kubernetes: {_message(error)}") from None
    except HTTPError as error:
        raise PlaceSilent(f"kubernetes: {' '.join(str(error).split())}") from None


@contextmanager
def _in_words() -> Iterator[None]:
    """Let what the client raises be what the user is told."""
    try:
        with _silent():
            yield
    except PlaceSilent as silent:
        raise UserError(f"--on k8s: {silent}") from None


def _message(error: Any) -> str:
    """Return what the API server says of a request that it refuses."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"
