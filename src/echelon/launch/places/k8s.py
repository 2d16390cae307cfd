"""A Kubernetes cluster: an indexed Job with one pod per machine, and a headless Service by which the pods meet.

If a pod loses its node, Kubernetes makes a new one, and the other pods wait for it. Not yet seen on a real cluster.

Helps: Runs on a Kubernetes cluster.
Needs: echelon[kubernetes], a kubeconfig, an image with the same versions as here; and a volume that all pods and this
    machine see at the same path, or a URL at which the run lives (--run), with code and data in the image or at URLs.
"""

from __future__ import annotations

import base64
import math
import os
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import yaml

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.spec import Quantity
from echelon.launch.places import k8s_bare
from echelon.launch.places.base import checked_grace
from echelon.launch.places.cluster import (
    ANSWER_S,
    MEETING,
    NODE_MODULE,
    ChainedJob,
    Cluster,
    JobPhase,
    JobState,
    NodeRank,
    PlaceFiles,
    PlaceSilent,
    Submission,
)
from echelon.launch.places.k8s_client import client_for, in_words, silent
from echelon.launch.plan import visible_gpus
from echelon.messages.identity import SECRET_VARIABLE, read_secret

PORT = 29400  # of the first pod, whose network is its own
_FLOW_LABEL, _NUMBER_LABEL = "echelon/flow", "echelon/step"
JOB_VARIABLE = "ECHELON_K8S_JOB"
SECRETS_FOLDER = "machines"  # below a run's folder
_KEY = "secret"
_GPU = "nvidia.com/gpu"
_COMPLETE = "complete"
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
        claim: persistent volume claim with the runs, the data and the code; left out: pods share nothing, and the run
            lives at a URL (--run).
        mount: path at which the claim is mounted, in the pods and on this machine.
        credentials: Secret of the namespace whose keys are set as environment variables in the pods, such as those of
            an object store.
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
    credentials: str = ""
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
        if not self.image:
            raise ValueError('image must be given: k8s(image="I", nodes=2)')
        if bool(self.claim) != bool(self.mount):
            raise ValueError('claim and mount belong together: k8s(image="I", claim=runs, mount="/runs")')
        if self.mount and not PurePosixPath(self.mount).is_absolute():
            raise ValueError("mount must be an absolute path")
        if self.nodes < 1 or self.gpus < 0 or self.cores < 0:
            raise ValueError("nodes must be at least 1, gpus and cores at least 0")
        if self.memory is not None and self.memory.kind != "size":
            raise ValueError("memory must be a size, such as 64gb")
        checked_grace("grace", self.grace)

    @property
    def shares_disk(self) -> bool:
        """Whether pods and this machine see the volume of a claim."""
        return bool(self.claim)

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
        if lacking := self.lacking(submission):
            raise UserError(lacking)
        for what, path in (("--run", submission.run), ("the working folder", submission.folder)):
            if self.shares_disk and not path.is_relative_to(self.mount):
                raise UserError(f"--on k8s: {what} {path} is not below mount={self.mount}, which is all that pods see")
        with in_words():
            client_for(self.context)

    def lacking(self, submission: Submission) -> str:
        """Return what a run without a volume lacks."""
        return "" if self.shares_disk else k8s_bare.lacking_home(submission.home)

    def manifests(self, submission: Submission) -> list[Manifest]:
        """Return the Service, the Secret without what it holds, for pods without a volume a ConfigMap, and the Job."""
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
        described = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        return [
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
            {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"},
            *([] if self.shares_disk else [described]),
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
            "volumes": self._volumes(name),
        }
        return pod | self._user()

    def _user(self) -> Manifest:
        """Return as whom a pod runs: files on the volume are its user's."""
        if not self.shares_disk or not os.getuid():
            return {}
        return {"securityContext": {"runAsUser": os.getuid(), "runAsGroup": os.getgid()}}

    def _credentials(self) -> Manifest:
        return {"envFrom": [{"secretRef": {"name": self.credentials}}]} if self.credentials else {}

    def _volumes(self, name: str) -> list[Manifest]:
        shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
        if self.shares_disk:
            return [{"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}}, shm]
        return [{"name": "runs", "emptyDir": {}}, k8s_bare.described_volume(name, f"{MEETING}{name}"), shm]

    def _mounts(self) -> list[Manifest]:
        shm = {"name": "shm", "mountPath": "/dev/shm"}
        if self.shares_disk:
            return [{"name": "runs", "mountPath": self.mount}, shm]
        described = {"name": "described", "mountPath": str(k8s_bare.DESCRIBED), "readOnly": True}
        return [{"name": "runs", "mountPath": str(k8s_bare.RUNS)}, described, shm]

    def _shell_text(self, submission: Submission) -> str:
        """Return what a pod's shell runs; it becomes the node command, which gets the signal that ends a pod."""
        node_command = f"{shlex.quote(self.python)} -m {NODE_MODULE}"
        if not self.shares_disk:
            return k8s_bare.shell_text(submission.run, node_command)
        run = shlex.quote(str(submission.run))
        output = f'{shlex.quote(str(submission.run / "logs"))}/node"$JOB_COMPLETION_INDEX".out'
        return f"exec {node_command} {run} >>{output} 2>&1"

    def _container(self, submission: Submission, name: str) -> Manifest:
        secret = {"secretKeyRef": {"name": name, "key": _KEY}}
        container: Manifest = {
            "name": k8s_bare.CONTAINER, "image": self.image, "command": ["/bin/sh", "-c", self._shell_text(submission)],
            "env": [{"name": JOB_VARIABLE, "value": name}, {"name": SECRET_VARIABLE, "valueFrom": secret}],
            "volumeMounts": self._mounts(),
        }  # fmt: skip
        if self.shares_disk:
            container["workingDir"] = str(submission.folder)
        else:  # for the log is all that is left of a pod
            container["terminationMessagePolicy"] = "FallbackToLogsOnError"
        memory_bytes = self.memory.value if self.memory is not None else 0.0
        return container | self._credentials() | {"resources": _resources(self.gpus, memory_bytes, self.cores)}

    def text(self, submission: Submission) -> str:
        """Return the manifests; what the Secret holds is added when they are submitted, and shown nowhere."""
        return yaml.safe_dump_all(self.manifests(submission), sort_keys=False)

    def submit(self, submission: Submission) -> str:
        """Create the Job, then the Service and the Secret that go with it; returns the Job's name.

        Raises:
            UserError: the cluster is not reached, or refuses.
        """
        write_atomic(submission.files.text, self.text(submission))
        service, secret, *described, job = self.manifests(submission)
        name = job["metadata"]["name"]
        submission.files.meet_at(_node_rank(0, name, name), f"{name}-0.{name}:{PORT}")
        key = read_secret(submission.run / SECRETS_FOLDER).hex()
        secret["data"] = {_KEY: base64.b64encode(key.encode()).decode()}
        for part in described:
            part["data"] = k8s_bare.description(submission.files, submission.run, f"{MEETING}{name}")
        with in_words():
            self._remove(name)
            batch, core = self._apis()
            made = batch.create_namespaced_job(self.namespace, job, _request_timeout=ANSWER_S)
            owner = {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "name": name,
                "uid": made.metadata.uid,
                "blockOwnerDeletion": True,
            }
            for part in (service, secret, *described):
                part["metadata"] = part["metadata"] | {"ownerReferences": [owner]}
            try:
                core.create_namespaced_service(self.namespace, service, _request_timeout=ANSWER_S)
                core.create_namespaced_secret(self.namespace, secret, _request_timeout=ANSWER_S)
                for part in described:
                    core.create_namespaced_config_map(self.namespace, part, _request_timeout=ANSWER_S)
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

    def bring(self, run: Path) -> None:
        """Bring what the first pod printed, what the run's URL tells, and how the run ended, where there is no volume.

        Raises:
            PlaceSilent: the cluster or the store does not answer now.
        """
        if self.shares_disk:
            return
        self._bring_logs(run, first_alone=True)
        files = PlaceFiles(run)
        if files.home:
            k8s_bare.bring_told(files.home, run)

    def bring_logs(self, run: Path) -> None:
        """Bring what all pods printed, likewise.

        Raises:
            PlaceSilent: the cluster does not answer now.
        """
        if not self.shares_disk:
            self._bring_logs(run, first_alone=False)

    def _bring_logs(self, run: Path, first_alone: bool) -> None:
        files = PlaceFiles(run)
        if not (job := files.job()):
            return
        with silent():
            state, (_, core) = self.state(job), self._apis()
            ends = k8s_bare.bring_logs(core, self.namespace, job, run, first_alone)
        if state.phase is JobPhase.ENDED and files.ended() is None:
            k8s_bare.note_end(files, state.text == _COMPLETE, files.stop.exists(), ends)

    def chained_text(self, job: ChainedJob) -> str:
        """Return the Jobs of steps, one pod each.

        Raises:
            UserError: there is no volume, by which steps tell each other what they made.
        """
        if not self.shares_disk:
            raise UserError("--on k8s for a flow needs claim and mount: its steps read what others wrote")
        return yaml.safe_dump_all(self._steps(job).values(), sort_keys=False)

    def _steps(self, job: ChainedJob) -> dict[int, Manifest]:
        """Return the Job of each step by its number: a pod that its node loses is made anew, one that failed is not."""
        found = {}
        for number, command in job.commands.items():
            name = _step_name(job.name, number)
            labels = {"app": "echelon", _FLOW_LABEL: _step_name(job.name), _NUMBER_LABEL: str(number)}
            output = shlex.quote(str(job.script.with_name(f"{name}.out")))
            words = shlex.join([self.python, *command[1:]])
            container = {
                "name": k8s_bare.CONTAINER, "image": self.image,
                "command": ["/bin/sh", "-c", f"exec {words} >>{output} 2>&1"],
                "volumeMounts": self._mounts(),
                "resources": _resources(job.gpus, job.memory_bytes, job.cores), **self._credentials(),
            }  # fmt: skip
            pod: Manifest = {
                "restartPolicy": "Never", "terminationGracePeriodSeconds": math.ceil(self.stop_s),
                "containers": [container], "volumes": self._volumes(name), **self._user(),
            }  # fmt: skip
            found[number] = {
                "apiVersion": "batch/v1", "kind": "Job",
                "metadata": {"name": name, "namespace": self.namespace, "labels": labels},
                "spec": {
                    "backoffLimit": 0, "podFailurePolicy": {"rules": [_node_lost()]},
                    "template": {"metadata": {"labels": labels}, "spec": pod},
                },
            }  # fmt: skip
        return found

    def submit_chained(self, job: ChainedJob) -> dict[int, str]:
        """Create the Jobs of steps; what one of the same name left goes.

        Raises:
            UserError: the cluster is not reached, or refuses.
        """
        text = self.chained_text(job)
        if not job.script.is_relative_to(self.mount):
            raise UserError(
                f"--on k8s: {job.script.parent} is not below mount={self.mount}, which is all that pods see"
            )
        write_atomic(job.script, text)
        given = {}
        with in_words():
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
        with silent():
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

        with silent():
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
                going = (status.active or 0) + (status.terminating or 0)  # these save a checkpoint
                return JobState(JobPhase.RUNS if going else JobPhase.ENDED, "stopping" if going else "stopped")
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
        with silent():
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

        client = client_for(self.context)
        return BatchV1Api(client), CoreV1Api(client)


PLACE = Kubernetes


def _resources(gpus: int, memory_bytes: float, cores: int) -> Manifest:
    """Return what a container gets; 0: as the cluster has it."""
    limits = {_GPU: str(gpus)} if gpus else {}
    limits |= {"memory": str(math.ceil(memory_bytes))} if memory_bytes else {}
    resources = {"limits": limits, "requests": limits | ({"cpu": str(cores)} if cores else {})}
    return {kind: amounts for kind, amounts in resources.items() if amounts}


def _node_lost() -> Manifest:
    return {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _failure_rules() -> list[Manifest]:
    def of_exit(values: list[int]) -> Manifest:
        """Return the rule's condition."""
        return {"containerName": k8s_bare.CONTAINER, "operator": "In", "values": values}

    return [
        {"action": "FailJob", "onExitCodes": of_exit(_FINAL_CODES)},
        _node_lost(),
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
