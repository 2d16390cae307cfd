"""A Slurm cluster: one batch job with one task per node, which is queued again until the run is complete.

The job is a plain `sbatch` script (`--dry-run` shows it). Before its time limit, and when it is preempted or stopped,
it gets a signal and saves a checkpoint. It is then queued again, or submitted again if the site does not allow that.
After a node's failure, Slurm itself queues it again.

Helps: Runs on a Slurm cluster, also longer ones than its time limit.
Needs: a disk that all nodes share.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.spec import Quantity
from echelon.core.units import many
from echelon.launch.places.cluster import (
    ArrayCluster,
    ChainedJob,
    JobPhase,
    JobState,
    NodeRank,
    PlaceSilent,
    RunArray,
    Submission,
    ask,
)
from echelon.launch.plan import usable_cores, visible_gpus
from echelon.messages.identity import SECRET_VARIABLE

_OVER = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "NODE_FAIL", "PREEMPTED",
    "REVOKED", "SPECIAL_EXIT",
}  # fmt: skip
_BEFORE = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"}
_NOTICE_S = 120
_MOST_NOTICE_S = 65535  # what sbatch takes

_STEPS = """\
job=$SLURM_JOB_ID
# A task of an array has a name of its own: the number alone may be that of the whole array.
[ -n "$SLURM_ARRAY_JOB_ID" ] && job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID && unset ${{!SLURM_ARRAY_@}}
# A signal lets every node save a checkpoint and end: before the time limit, at a preemption, at a stop.
trap 'scancel --signal=TERM "$job"' TERM  # to the tasks alone: srun itself would kill them
rm -f {exit}
# srun has not taken the batch job's cores for its tasks since Slurm 22.05.
[ -n "$SLURM_CPUS_PER_TASK" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun --kill-on-bad-exit=1 --open-mode=append --output={output} {command} &
step=$!
until wait "$step"; code=$?; ! kill -0 "$step" 2>/dev/null; do :; done
# What was noted is how the run ended, whatever became of the tasks that srun killed after it.
[ -e {exit} ] && read -r code _ <{exit}
case "$code" in 0|1|2|126|127) exit "$code" ;; esac  # completed, failed, refused; there is no such command

# Stopped or died before its last epoch: go on later, unless somebody stopped it, or Slurm does that itself.
[ -e {stop} ] && exit "$code"
[ "$(squeue -h -j "$job" -o %T)" = RUNNING ] || exit "$code"
scontrol requeue "$job" || sbatch --parsable {script} >>{jobs}
exit "$code"
"""

_ARRAY = """\
# Each task is a run, by its own script, with its own output.
case "$SLURM_ARRAY_TASK_ID" in
{runs}esac
exec bash "$run/{script}" >>"$run/logs/slurm.out" 2>&1
"""


@dataclass(frozen=True)
class Slurm(ArrayCluster):
    """A Slurm cluster.

    Attributes:
        nodes: number of nodes.
        gpus: GPUs of each node.
        cores: CPU cores of each node; 0: the site's default.
        time: time limit of a job, such as 8h; the run may take several jobs.
        partition: partition of the cluster; empty: its default.
        notice: how long before the time limit the run saves and ends, and how long any stop may take; left out: 2m, at
            most half of the time limit.
        setup: shell commands before the run, such as "module load cuda".
        extra: other options of sbatch, passed on unchanged: "--account=x --constraint=y".
    """

    nodes: int = 1
    gpus: int = 0
    cores: int = 0
    time: Quantity | None = None
    partition: str = ""
    notice: Quantity | None = None
    setup: str = ""
    extra: str = ""

    holds_order: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse what no job can be.

        Raises:
            ValueError: names the setting.
        """
        if self.nodes < 1 or self.gpus < 0 or self.cores < 0:
            raise ValueError("nodes must be at least 1, gpus and cores at least 0")
        for name, value in (("time", self.time), ("notice", self.notice)):
            if value is not None and (value.kind != "duration" or value.value < 1):
                raise ValueError(f"{name} must be a duration of at least 1s, such as 8h")
        if self._notice_s() > _MOST_NOTICE_S:
            raise ValueError(f"notice must be at most {_MOST_NOTICE_S}s")
        if self.time is not None and self._notice_s() >= 60 * self._minutes():
            raise ValueError(f"notice={self.notice} leaves nothing of time={self.time}")
        for name, text in (("partition", self.partition), ("extra", self.extra)):
            if "\n" in text:
                raise ValueError(f"{name} must be one line")

    @property
    def machines(self) -> int:
        """How many machines a run is given."""
        return self.nodes

    @property
    def stop_s(self) -> float:
        """The notice: after it the job is killed."""
        return self._notice_s()

    def _minutes(self) -> int:
        assert self.time is not None
        return math.ceil(self.time.value / 60)  # Slurm counts in minutes

    def _notice_s(self) -> int:
        if self.notice is not None:
            return math.ceil(self.notice.value)
        return _NOTICE_S if self.time is None else min(_NOTICE_S, 30 * self._minutes())

    def _options(self, name: str, output: Path, folder: Path) -> Iterator[str]:
        yield f"--job-name={shlex.quote(f'echelon-{name}')}"
        yield f"--nodes={self.nodes}"
        yield "--ntasks-per-node=1"
        if self.gpus:
            yield f"--gpus-per-node={self.gpus}"
        if self.cores:
            yield f"--cpus-per-task={self.cores}"
        if self.time is not None:
            yield f"--time={self._minutes()}"
        if self.partition:
            yield f"--partition={self.partition}"
        yield f"--signal=B:TERM@{self._notice_s()}"
        yield "--requeue"
        yield "--open-mode=append"
        yield f"--output={_output_file(output.parent, _literal(output.name))}"
        yield f"--chdir={shlex.quote(str(folder))}"
        if self.extra:
            yield self.extra

    def text(self, submission: Submission) -> str:
        """Return the batch script."""
        files = submission.files
        steps = _STEPS.format(
            exit=shlex.quote(str(files.exit)),
            stop=shlex.quote(str(files.stop)),
            script=shlex.quote(str(files.text)),
            jobs=shlex.quote(str(files.jobs)),
            output=_output_file(submission.run / "logs", "node%n.out"),
            command=shlex.join(submission.command),
        )
        options = self._options(submission.run.name, submission.run / "logs" / "slurm.out", submission.folder)
        return "\n".join([_head(options), *([f"{self.setup}\n"] if self.setup else []), steps])

    def submit(self, submission: Submission) -> str:
        """Write the batch script into the run's folder and submit it; returns the job's number.

        Raises:
            UserError: there is no sbatch, or it refuses.
        """
        write_atomic(submission.files.text, self.text(submission))
        return _sbatch(submission.files.text)

    def array_text(self, array: RunArray) -> str:
        """Return the script of an array, whose tasks run the scripts of its runs."""
        output = array.script.with_suffix(".out")  # of what goes wrong before a run's own script
        options = [*self._options(array.name, output, array.runs[0].folder)]
        options += [f"--array=0-{len(array.runs) - 1}%{array.at_once}"]
        runs = "".join(f"{number}) run={shlex.quote(str(each.run))} ;;\n" for number, each in enumerate(array.runs))
        script = array.runs[0].files.text.relative_to(array.runs[0].run)
        return f"{_head(options)}\n{_ARRAY.format(runs=runs, script=script)}"

    def submit_array(self, array: RunArray) -> list[str]:
        """Write the script of each run into its folder, and submit an array of them; returns the jobs' numbers.

        Raises:
            UserError: there is no sbatch, or it refuses.
        """
        for each in array.runs:
            write_atomic(each.files.text, self.text(each))
        write_atomic(array.script, self.array_text(array))
        given = _sbatch(array.script)
        return [f"{given}_{number}" for number in range(len(array.runs))]

    def chained_text(self, job: ChainedJob) -> str:
        """Return the script of a job of one node that waits for others, or of an array of such."""
        options = [f"--job-name={shlex.quote(job.name)}", "--nodes=1", "--ntasks=1", f"--cpus-per-task={job.cores}"]
        options += [
            "--requeue",
            "--open-mode=append",
            "--kill-on-invalid-dep=yes",
            f"--signal=B:TERM@{self._notice_s()}",
        ]
        output = f"{_literal(job.script.stem)}{'-%a' * job.is_array}.out"
        options += [f"--output={_output_file(job.script.parent, output)}"]
        options += [f"--array={','.join(map(str, job.commands))}"] if job.is_array else []
        # The step's process keeps to its time itself; Slurm gives notice before its own, up to a minute early.
        options += [f"--time={math.ceil((job.time_s + self._notice_s()) / 60) + 1}"] if job.time_s else []
        options += [f"--mem={math.ceil(job.memory_bytes / 1e6)}M"] if job.memory_bytes else []
        options += [f"--gpus={job.gpus}"] if job.gpus else []
        options += [f"--partition={self.partition}"] if self.partition else []
        options += [f"--dependency=afterok:{':'.join(job.after)}"] if job.after else []
        options += [self.extra] if self.extra else []
        lines = "".join(f"#SBATCH {option}\n" for option in options)
        setup = f"{self.setup}\n" if self.setup else ""
        runs = {number: f"exec {shlex.join(command)}" for number, command in job.commands.items()}
        cases = "".join(f"{number}) {run} ;;\n" for number, run in runs.items())
        body = f'case "$SLURM_ARRAY_TASK_ID" in\n{cases}esac\n' if job.is_array else f"{runs[0]}\n"
        return f"#!/bin/bash\n{lines}\n{setup}{body}"

    def submit_chained(self, job: ChainedJob) -> dict[int, str]:
        """Submit a job of one node that waits for others, or an array of such; queued again after a node's failure.

        Raises:
            UserError: there is no sbatch, or it refuses.
        """
        write_atomic(job.script, self.chained_text(job))
        given = _sbatch(job.script)
        return {number: f"{given}_{number}" if job.is_array else given for number in job.commands}

    def chained(self, name: str) -> dict[int, str]:
        """Return how the queue calls the jobs of a name that wait or run, by their numbers in the array; alone 0.

        Raises:
            PlaceSilent: Slurm does not answer now.
        """
        found = ask(["squeue", "-h", "--array", "--name", name, "-o", "%i"]).split()
        return {int(job.partition("_")[2] or 0): job for job in found}

    def state(self, job: str) -> JobState:
        """Return where a job is.

        Raises:
            PlaceSilent: Slurm does not answer now.
        """
        return self.states([job])[job]

    def states(self, jobs: Sequence[str]) -> dict[str, JobState]:
        """Return where jobs are, those of arrays by their own numbers, in one question.

        Raises:
            PlaceSilent: Slurm does not answer now.
        """
        numbers = ",".join(sorted({job.partition("_")[0] for job in jobs}))
        try:
            lines = ask(["squeue", "-h", "--array", "-j", numbers, "-t", "all", "-o", "%i|%T|%r|%N|%S"]).splitlines()
        except UserError as error:
            if "Invalid job id" not in str(error):
                raise PlaceSilent(str(error)) from None
            lines = []  # they are over for some time
        told = dict(line.split("|", 1) for line in lines if line)
        over = JobState(JobPhase.ENDED, "no more in the queue")
        return {job: self._state(told[job]) if job in told else over for job in jobs}

    def _state(self, told: str) -> JobState:
        """Read what the queue says of a job."""
        word, reason, nodes, begins = told.split("|")
        if word in _BEFORE:
            when = f", expected at {begins}" if begins not in ("", "N/A") else ""
            return JobState(JobPhase.WAITS, f"waiting for {many(self.nodes, 'node')} ({reason}{when})")
        return JobState(
            JobPhase.ENDED if word in _OVER else JobPhase.RUNS, f"{word.lower()}{f' on {nodes}' * bool(nodes)}"
        )

    def stop(self, job: str) -> None:
        """Signal a job that runs, and take one that waits from the queue.

        Raises:
            PlaceSilent: Slurm does not answer now.
        """
        command = ["scancel", "--batch", "--signal=TERM", job]
        if self.state(job).phase is JobPhase.WAITS:
            command = ["scancel", job]
        try:
            ask(command)
        except UserError as error:
            raise PlaceSilent(str(error)) from None

    def node_rank(self, environment: Mapping[str, str]) -> NodeRank:
        """Return this node's part.

        Raises:
            UserError: this is no task of a job, or the allocation is unlike the request.
        """
        try:
            nodes, tasks, number = (int(environment[f"SLURM_{name}"]) for name in ("NNODES", "NTASKS", "NODEID"))
            job, address = environment["SLURM_JOB_ID"], environment["SLURM_LAUNCH_NODE_IPADDR"]
        except KeyError as missing:
            raise UserError(f"{missing} is not set: this is started by srun, one task per node") from None
        given = {"nodes": (self.nodes, nodes), "tasks": (self.nodes, tasks)}
        if self.gpus:
            given["GPUs on each node"] = (self.gpus, visible_gpus())
        for what, (asked, got) in given.items():
            if asked != got:
                raise UserError(
                    f"the allocation has {got} {what}, --on asks for {asked}: see `extra` and the site's rules"
                )
        cores = min(usable_cores(), int(environment.get("SLURM_CPUS_ON_NODE", "0")) or usable_cores())
        if cores < self.cores:
            raise UserError(f"the allocation has {cores} cores on this node, --on asks for {self.cores}")
        name = environment.get("SLURMD_NODENAME", f"node {number}")
        return NodeRank(number, name, address, f"{job}-{environment.get('SLURM_RESTART_COUNT', '0')}")


def _head(options: Iterable[str]) -> str:
    """Return the first lines of a batch script."""
    return "".join(["#!/bin/bash\n", *(f"#SBATCH {option}\n" for option in options)])


def _output_file(folder: Path, pattern: str) -> str:
    """Return a file for Slurm's --output, quoted: what begins with % in the pattern alone stands for something."""
    return shlex.quote(f"{_literal(str(folder))}/{pattern}")


def _literal(text: str) -> str:
    return text.replace("%", "%%")


def _sbatch(script: Path) -> str:
    """Submit a script; returns the job's number.

    Raises:
        UserError: there is no sbatch, or it refuses.
    """
    environment = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
    try:
        answer = ask(["sbatch", "--parsable", str(script)], environment)
    except PlaceSilent as silent:
        raise UserError(str(silent)) from None
    return answer.strip().partition(";")[0]


PLACE = Slurm
