"""A Ray cluster: a Ray job with a placement group, and one node command on each of its machines.

Ray queues the job and gives it machines; an autoscaling cluster starts new ones for it. If a machine is lost, the job
starts the node commands again on new machines, or with a range of machines on those that are left, from the newest
checkpoint.

Helps: Runs on a Ray cluster.
Needs: echelon[ray], Ray's dashboard, and a disk that all machines share.
"""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.spec import Range
from echelon.core.units import many
from echelon.launch.places.cluster import (
    ANSWER_S,
    ChainedJob,
    Cluster,
    JobPhase,
    JobState,
    NodeRank,
    PlaceSilent,
    Submission,
)
from echelon.launch.plan import visible_gpus

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

JOB_MODULE = "echelon.launch.ray_job"
RANK_VARIABLE = "ECHELON_RAY_RANK"
_NOT_YET = {"PENDING", "RESCHEDULING", "PREPARED"}  # of placement groups: not all machines are there
_NO_AGENT = "No available agent"  # what takes jobs on the head starts after the head
_TRY_S = 1.0
_OVER = {"STOPPED", "SUCCEEDED", "FAILED"}


@dataclass(frozen=True)
class RayCluster(Cluster):
    """A Ray cluster.

    Attributes:
        nodes: number of machines, or a range such as 1:4: at each start as many of them as there are.
        gpus: GPUs of each machine.
        cores: CPU cores that Ray reserves for the run on each machine.
        address: address of the dashboard, such as "http://head:8265"; auto: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or the
            cluster on this machine.
    """

    nodes: int | Range = 1
    gpus: int = 0
    cores: int = 1
    address: str = "auto"

    holds_order: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse what no job can be.

        Raises:
            ValueError: names the setting.
        """
        if self.least_machines < 1 or self.cores < 1 or self.gpus < 0:
            raise ValueError("nodes and cores must be at least 1, gpus at least 0")

    @property
    def machines(self) -> int:
        """How many machines a run is given, at most."""
        return self.nodes.most if isinstance(self.nodes, Range) else self.nodes

    @property
    def least_machines(self) -> int:
        """How many it needs."""
        return self.nodes.least if isinstance(self.nodes, Range) else self.nodes

    @property
    def bundle(self) -> dict[str, float]:
        """What the placement group asks for on each machine."""
        return {"CPU": self.cores, **({"GPU": self.gpus} if self.gpus else {})}

    def check(self, submission: Submission, versions: Mapping[str, str]) -> None:
        """Refuse a machine without Ray, or one from which the cluster is not reached.

        Raises:
            UserError: says what to install, or what Ray says.
        """
        try:
            self._client()
        except PlaceSilent as silent:
            raise UserError(f"--on ray: {silent}") from None

    def _job(self, submission: Submission) -> dict[str, Any]:
        command = [submission.python, "-m", JOB_MODULE, str(submission.run), str(submission.folder)]
        return {"entrypoint": shlex.join(command), "runtime_env": self._environment()}

    def _environment(self) -> dict[str, dict[str, str]]:
        variables = {
            # at a stop the nodes save a checkpoint before they end; Ray alone would wait for 3 seconds
            "RAY_JOB_STOP_WAIT_TIME_S": f"{self.stop_s:.0f}",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # below `uv run` Ray would build an environment of its own
        }
        return {"env_vars": variables}

    def text(self, submission: Submission) -> str:
        """Return the job as Ray gets it, and the placement group that it asks for."""
        least = {"or_fewer_bundles": self.least_machines} if self.least_machines < self.machines else {}
        group = {"strategy": "STRICT_SPREAD", "bundles": [self.bundle] * self.machines, **least}
        return json.dumps({"job": self._job(submission), "placement_group": group}, indent=2) + "\n"

    def submit(self, submission: Submission) -> str:
        """Hand the job to Ray; returns its submission id.

        Raises:
            UserError: Ray is not reached, or refuses.
        """
        submission.files.text.write_text(self.text(submission))
        ends = time.monotonic() + ANSWER_S
        while True:
            try:
                job: str = self._client().submit_job(**self._job(submission))
            except (PlaceSilent, RuntimeError) as error:
                if _NO_AGENT not in str(error) or time.monotonic() > ends:
                    raise UserError(f"--on ray: {_one_line(error)}") from None
                time.sleep(_TRY_S)
            else:
                return job

    def chained_text(self, job: ChainedJob) -> str:
        """Return the jobs of steps as Ray gets them."""
        return json.dumps([self._step(job, number) for number in job.commands], indent=2) + "\n"

    def _step(self, job: ChainedJob, number: int) -> dict[str, Any]:
        cores = {"entrypoint_num_cpus": job.cores, **({"entrypoint_num_gpus": job.gpus} if job.gpus else {})}
        memory = {"entrypoint_memory": math.ceil(job.memory_bytes)} if job.memory_bytes else {}
        return {
            "entrypoint": shlex.join(job.commands[number]), "submission_id": f"{job.name}-{number}",
            "runtime_env": self._environment(), **cores, **memory,
        }  # fmt: skip

    def submit_chained(self, job: ChainedJob) -> dict[int, str]:
        """Hand jobs of steps to Ray; what one of the same name left that is over goes.

        Raises:
            UserError: Ray is not reached, or refuses.
        """
        write_atomic(job.script, self.chained_text(job))
        try:
            client = self._client()
            before = {info.submission_id for info in client.list_jobs()}
            given = {}
            for number in job.commands:
                step = self._step(job, number)
                if step["submission_id"] in before:
                    client.delete_job(step["submission_id"])
                given[number] = str(client.submit_job(**step))
        except (PlaceSilent, RuntimeError) as error:
            raise UserError(f"--on ray: {_one_line(error)}") from None
        return given

    def chained(self, name: str) -> dict[int, str]:
        """Return how Ray calls the jobs of a name that wait or run, by their numbers.

        Raises:
            PlaceSilent: Ray does not answer now.
        """
        try:
            known = [(info.submission_id or "", str(info.status.value)) for info in self._client().list_jobs()]
        except RuntimeError as error:
            raise PlaceSilent(_one_line(error)) from None
        going = [job for job, status in known if job.startswith(f"{name}-") and status not in _OVER]
        return {int(job.removeprefix(f"{name}-")): job for job in going}

    def state(self, job: str) -> JobState:
        """Return where a job is.

        Raises:
            PlaceSilent: Ray does not answer now.
        """
        client = self._client()
        try:
            info = client.get_job_info(job)
        except RuntimeError as error:
            if "does not exist" in str(error):
                return JobState(JobPhase.ENDED, "not known to Ray any more")
            raise PlaceSilent(_one_line(error)) from None
        status = str(info.status.value)
        if status in _OVER:
            return JobState(JobPhase.ENDED, status.lower() if status != "FAILED" else _failure(info.message))
        is_run = JOB_MODULE in info.entrypoint  # a step has no placement group
        if status == "PENDING" or (is_run and self._wants_machines(client, info.job_id)):
            return JobState(JobPhase.WAITS, f"waiting for {many(self.least_machines, 'node')}")
        return JobState(JobPhase.RUNS, "running")

    def _wants_machines(self, client: JobSubmissionClient, ray_job: str | None) -> bool:
        """Whether a job has yet to get machines for its placement group.

        Raises:
            PlaceSilent: Ray does not answer now.
        """
        from ray.util.state import list_placement_groups
        from ray.util.state.exception import RayStateApiException

        if ray_job is None:  # it has not yet connected to the cluster
            return True
        own = [("creator_job_id", "=", ray_job)]
        try:
            groups = list_placement_groups(client.get_address(), filters=own, timeout=int(ANSWER_S))
        except (RayStateApiException, OSError) as error:
            raise PlaceSilent(_one_line(error)) from None
        return not groups or any(group.state in _NOT_YET for group in groups)

    def stop(self, job: str) -> None:
        """Ask Ray to stop a job: its nodes get SIGTERM, and time for a checkpoint.

        Raises:
            PlaceSilent: Ray does not answer now.
        """
        try:
            self._client().stop_job(job)
        except RuntimeError as error:
            raise PlaceSilent(_one_line(error)) from None

    def node_rank(self, environment: Mapping[str, str]) -> NodeRank:
        """Return this node's part.

        Raises:
            UserError: this was not started by the job, or the machine has other GPUs than were asked for.
        """
        if RANK_VARIABLE not in environment:
            raise UserError(f"{RANK_VARIABLE} is not set: this is started by {JOB_MODULE}, as a job of Ray's")
        if self.gpus and visible_gpus() != self.gpus:
            raise UserError(f"Ray gives {visible_gpus()} GPUs on this node, --on asks for {self.gpus}")
        return NodeRank.from_json(environment[RANK_VARIABLE])

    def _client(self) -> JobSubmissionClient:
        """Return a connection to Ray's own interface for jobs.

        Raises:
            UserError: Ray is not installed.
            PlaceSilent: it is not reached.
        """
        try:
            from ray.job_submission import JobSubmissionClient
        except ImportError:
            raise UserError("--on ray needs ray: pip install 'echelon[ray]'") from None
        try:
            return JobSubmissionClient(None if self.address == "auto" else self.address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise PlaceSilent(_one_line(error)) from None


PLACE = RayCluster


def _failure(message: str | None) -> str:
    """Return why a job failed: the last line of what it printed, where Ray gives that."""
    lines = [line.strip() for line in (message or "").splitlines() if line.strip()]
    return f"failed: {lines[-1]}" if lines else "failed"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
