"""A real Slurm on this machine: munge, one controller, three nodes that share host name and loopback."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
DEADLINE_S = 60.0
HURRY_S = 2.0
CONFIG = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/ctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=3,requeue_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=10
KillWait=10
MinJobAge=300
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[3]}] CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n[1-3] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Return why no Slurm can be had here; empty: it can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"no Slurm here ({', '.join(absent)}): apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "a Slurm of one's own needs root"


@dataclass
class SlurmCluster:
    """A cluster that runs; its daemons are ended by `slurm_cluster`."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]]
    hurried_s: float = 0.0

    @property
    def environment(self) -> dict[str, str]:
        """What its programs find it by."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """Run one of its programs, and return what it prints."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout if done.returncode == 0 else f"{done.stdout}{done.stderr}"

    def state(self, job: str) -> str:
        """Return a job's state."""
        return self.ask("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip()

    def hurry(self, job: str) -> None:
        """Let a job that was queued again begin at once, for whoever polls: Slurm's own begin is two minutes away."""
        if time.monotonic() - self.hurried_s < HURRY_S:
            return
        self.hurried_s = time.monotonic()
        if self.ask("squeue", "-h", "-j", job, "-o", "%T %r").strip() == "PENDING BeginTime":
            self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        self._start(name, ["slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf")])

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def fail_node(self, name: str) -> None:
        """Let a node vanish as a machine does that loses its power: its daemon and all that runs below it."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()
        there = _with_node_name(name)
        for each in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: none of them can report another's death
            for pid in there:
                _send(pid, each)

    def start(self) -> None:
        """Start all daemons, and wait for three idle nodes."""
        for name in ("state", "log", "spool/n1", "spool/n2", "spool/n3", "munge"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        with _free_ports(4) as ports:
            text = CONFIG.format(host=socket.gethostname(), folder=self.folder, ports=ports)
            (self.folder / "slurm.conf").write_text(text)
        munged = ["munged", "-F", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket"]
        munged += [f"--{what}-file={self.folder}/munge/{what}" for what in ("pid", "log", "seed")]
        self._start("munged", munged)
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._start("slurmctld", ["slurmctld", "-D", "-f", str(self.folder / "slurm.conf")])
        for name in ("n1", "n2", "n3"):
            self.start_node(name)
        self._wait(
            lambda: self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle"] * 3, "three nodes"
        )

    def _wait(self, ready: object, what: str) -> None:
        assert callable(ready)
        ends = time.monotonic() + DEADLINE_S
        while not ready():
            if time.monotonic() > ends:
                logs = "\n".join(f"{f.name}: {f.read_text()[-1500:]}" for f in (self.folder / "log").iterdir())
                raise AssertionError(f"{what} did not start:\n{logs}")
            time.sleep(0.1)

    def close(self) -> None:
        """Cancel all jobs, then end the daemons."""
        for job in self.ask("squeue", "-h", "-o", "%i").split():
            self.ask("scancel", job)
        ends = time.monotonic() + 20
        while self.ask("squeue", "-h", "-o", "%i").split() and time.monotonic() < ends:
            time.sleep(0.2)
        for daemon in reversed(self.daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _send(pid: int, signum: signal.Signals) -> None:
    """Send a process a signal, unless it is gone."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return


def _with_node_name(name: str) -> list[int]:
    """Return the processes that Slurm started on a node: its tasks, by their environment, and its step daemons."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"SLURMD_NODENAME={name}".encode() in environment:
            found.append(int(folder.name))
    return sorted({*found, *_step_daemons(found)})


def _step_daemons(tasks: list[int]) -> set[int]:
    """Return the daemons that started some tasks: a batch script's does not have the node's name itself."""
    found = set()
    for pid in tasks:
        with suppress(psutil.NoSuchProcess):
            found |= {each.pid for each in psutil.Process(pid).parents() if each.name().startswith("slurmstepd")}
    return found


@contextmanager
def _free_ports(count: int) -> Iterator[list[int]]:
    """Give ports in a row that are free."""
    for first in range(17000 + os.getpid() % 3000, 30000, 7):
        taken: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                taken.append(socket.create_server(("", port)))
        except OSError:
            continue
        finally:
            for each in taken:
                each.close()
        yield list(range(first, first + count))
        return
    raise AssertionError("no free ports")


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Give a cluster of three nodes, for as long as the block takes."""
    cluster = SlurmCluster(folder, {})
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
