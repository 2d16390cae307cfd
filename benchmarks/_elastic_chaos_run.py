"""One run of the elastic chaos benchmark: a counting run under random faults, and what became of it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.ranks.counting_parts import BATCH, HURRY, SAMPLES, WIDTH, moved, waiting
from tests.ranks.links import LINK
from tests.ranks.runs import Run, Runs, TooLate, marked_processes, state
from tests.ranks.test_elastic import Case, check_recorded, start
from tests.ranks.test_elastic_machines import Group

from echelon.launch.link import ShapedNetwork, parse_link

TOPK, POWER = "topk(0.05, warmup_steps=0, finish_steps=0)", "powersgd(2, warmup_steps=0, finish_steps=0)"
ADAPTIVE = "adaptive(error=0.3, follow_link=false)"
CODECS = ("none", TOPK, POWER, ADAPTIVE)
SYNCS = (
    "allreduce", "local(4)", "local(4, overlap=2)", "local(4, start=300)", "diloco(4, outer_lr=1, outer_momentum=0)",
    "easgd(4)",
)  # fmt: skip
LAYOUTS = {"fsdp=2": 2, "fsdp=4": 4, "dp=2,zero1": 2, "dp=3,zero1": 3, "dp=2,fsdp=2": 4}  # workers; one machine's
CODED_LAYOUTS = ("dp=2,fsdp=2",)  # of which codecs encode what replicas tell each other
SHAPES = ((2, 1), (3, 1), (2, 2))  # machines, and workers of each
VOTERS = 3
PACE_S = {True: 0.3, False: 0.1}  # of a forward pass; whether there are several machines
EPOCHS_A_FAULT = 5  # with the pace, more than a fault takes
WHOLE_S = 150.0  # in which all workers are there again
SETTLED_S = 1.0  # who has been there for so long has what is trained
SILENCE_S = 10.0  # after an outage: who was cut off may yet be told that it is lost
KINDS = (
    "kill", "kill the leading one", "kill two", "kill one on its way", "stop", "kill elsewhere", "kill a machine",
    "cut a link",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What is trained, where."""

    seed: int
    faults: int
    sync: str
    codec: str
    machines: int
    workers: int  # of each
    layout: str = ""  # of one that divides the model or the optimizer's state
    voters: bool = False  # each machine may lead, and be lost
    path: str = "backend"

    @classmethod
    def draw(cls, seed: int, faults: int, only: str) -> Plan:
        """Draw a plan; `only`: on `one` machine or `several`, or `split`: a layout that divides something."""
        draws = random.Random(seed)
        if only == "split" or (not only and draws.random() < 0.25):
            layout = draws.choice(list(LAYOUTS))
            codec = draws.choice(("none", TOPK)) if layout in CODED_LAYOUTS else "none"
            return cls(seed, faults, "allreduce", codec, 1, LAYOUTS[layout], layout)
        several = only == "several" or (only != "one" and draws.random() < 0.5)
        machines, workers = draws.choice(SHAPES) if several else (1, draws.randrange(2, 5))
        sync = draws.choice(SYNCS)
        codec = draws.choice(("none", *CODECS)) if sync == "allreduce" and not several else "none"
        voters = machines == VOTERS and draws.random() < 0.5
        path = draws.choice(("backend", "ring")) if sync == "allreduce" and codec == "none" else "backend"
        return cls(seed, faults, sync, codec, machines, workers, voters=voters, path=path)

    @property
    def epochs(self) -> int:
        """How many epochs are sure to take longer than the faults."""
        return self.faults * EPOCHS_A_FAULT

    @property
    def settings(self) -> tuple[str, ...]:
        """The run's settings."""
        codec = () if self.codec == "none" else (f"compression={self.codec}",)
        several = (f"nodes={self.machines}",) if self.machines > 1 else ()
        layout = (f"parallel={self.layout}",) if self.layout else ()
        path = (f"collective={self.path}",) if self.path != "backend" else ()
        timeout_s = 60 if several else 30  # after which others wait no more for one that is stopped at its start
        own = (f"sync={self.sync}", f"epochs={self.epochs}", "checkpoint_every=50", f"timeout={timeout_s}s")
        return (*several, *layout, *path, *codec, *own, "max_restarts=1000")


@dataclass
class Fault:
    """What was done when, in unix seconds; `calm`: all workers were there."""

    kind: str
    t: float
    calm: bool


@dataclass
class Result:
    """What a run gave. `why`: what was wrong. `stalls`: kind, and seconds from it to the survivors' next step."""

    plan: Plan
    faults: list[Fault] = field(default_factory=list)
    finished: bool = False
    counted: bool = False
    recorded: bool = False
    restarts: int = 0
    stalls: list[tuple[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    why: str = ""


class Chaos:
    """A run under faults."""

    def __init__(self, plan: Plan, runs: Runs, network: ShapedNetwork | None) -> None:
        self.plan, self._draws = plan, random.Random(plan.seed + 1_000_000)
        os.environ[WIDTH] = width = "1" if plan.codec == "none" else "32"
        pace_s = PACE_S[network is not None]
        settings = plan.settings
        if plan.voters and network:
            settings += (f"rendezvous={','.join(f'{address}:29400' for address in network.addresses)}",)
        self._group = Group(runs, network, *settings, pace_s=pace_s) if network else None
        self._commands = (
            [self._group.start(i, workers=plan.workers) for i in range(plan.machines)] if self._group
            else [start(runs, Case("", plan.workers, ()), *plan.settings, pace_s=pace_s, width=int(width))]
        )  # fmt: skip
        self._doubtful = [0.0] * plan.machines  # until when a machine's workers may yet be lost
        self._blamed: set[int] = set()  # who was killed or stopped

    @property
    def leader(self) -> Run:
        """The command that keeps the record now."""

        if not self.plan.voters:
            return self._commands[0]

        def newest(command: Run) -> tuple[bool, float]:
            starts = command.records("start") if command.folder.exists() else []
            return bool(starts and command.records("end")), starts[-1]["t"] if starts else 0.0

        living = [command for command in self._commands if command.process.poll() is None]
        return max(living or self._commands, key=newest)

    def strike(self, result: Result) -> None:
        """Wait for a random moment, and do a random thing."""
        calm = not result.faults or self._draws.random() < 0.5
        if calm or self.plan.layout:  # two at once may be all who have a piece of a split model
            self._wait_until_whole()
            calm = True
        time.sleep(self._draws.uniform(0.0, 2.0))  # not for something to happen: this is the random moment
        kinds: dict[str, Callable[[], bool]] = {
            "kill": lambda: self._end(self._draws.choice(self._present() or [0])),
            "kill the leading one": lambda: self._end(*self._present()[:1]),
            "kill two": lambda: self._end(*self._some(self._present(), 2)),
            "kill one on its way": lambda: self._end(*self._some(self._booting(), 1)),
            "stop": lambda: self._end(*self._some(self._present(), 1), how=signal.SIGSTOP),
        }
        if self.plan.layout:  # two at once may be all who have a piece
            del kinds["kill two"]
        if self._group:
            kinds |= {
                "kill elsewhere": lambda: self._end(*self._some(self._elsewhere(), 1)),
                "kill a machine": self._end_machine,
                "cut a link": self._cut,
            }
        for kind in self._draws.sample(list(kinds), len(kinds)):
            now = time.time()
            if kinds[kind]():
                result.faults.append(Fault(kind, now, calm))
                print(f"{self.plan.seed}: {len(result.faults)} {kind}", file=sys.stderr, flush=True)
                return
        self._wait_until_whole()

    def hurry(self) -> list[int]:
        """Once all workers are there, let them train as fast as they can; returns the exit codes of the commands."""
        if self.leader.process.poll() is None:
            self._wait_until_whole()
        Path(os.environ[HURRY]).touch()
        return [command.end() for command in self._commands]

    def _pids(self) -> list[int]:
        starts = self.leader.records("start")
        return starts[-1]["pids"] if starts else []

    def _present(self) -> list[int]:
        """Return the workers of the newest term that live, by rank."""
        ours = {pid for command in self._commands for pid in marked_processes(command.mark)}
        return [pid for pid in self._pids() if pid in ours and pid not in self._blamed and state(pid) not in "TZ"]

    def _elsewhere(self) -> list[int]:
        return [pid for pid in self._present() if pid not in marked_processes(self.leader.mark)]

    def _booting(self) -> list[int]:
        """Return the workers that are on their way: what a command's fork server has forked."""
        found = [worker.pid for command in self._commands for worker in _workers(command)]
        return [pid for pid in found if pid not in self._pids()]

    def _settled(self) -> list[int]:
        """Return those of whom it is sure that they have what is trained, and stay."""
        starts, now = self.leader.records("start"), time.time()
        there = {pid for s in starts if s["t"] < now - SETTLED_S for pid in s["pids"]} & set(self._present())
        doubtful = [i for i, until in enumerate(self._doubtful) if until > now]
        return list(there - {pid for i in doubtful for pid in marked_processes(self._commands[i].mark)})

    def _some(self, pids: Sequence[int], count: int) -> list[int]:
        return self._draws.sample(pids, count) if len(pids) >= count else []

    def _end(self, *pids: int, how: signal.Signals = signal.SIGKILL) -> bool:
        """Kill or stop workers, where one is left; returns whether that was done."""
        if not pids or 0 in pids or not set(self._settled()) - set(pids):
            return False
        self._blamed |= set(pids)  # who is killed is there for another moment
        for pid in pids:
            try:
                os.kill(pid, how)
            except ProcessLookupError:
                return False
        return True

    def _end_machine(self) -> bool:
        """Kill all processes of a machine that may be lost, and give its command again after a while."""
        assert self._group is not None
        i = self._draws.randrange(0 if self.plan.voters else 1, self.plan.machines)
        doomed = marked_processes(self._commands[i].mark)
        if not set(self._settled()) - set(doomed):
            return False
        for pid in doomed:
            _kill(pid)
        self._commands[i].process.wait()
        time.sleep(self._draws.uniform(0.0, 9.0))  # less, or more, than the others take to see that it is lost
        self._commands[i] = self._group.start(i, workers=self.plan.workers)
        return True

    def _cut(self) -> bool:
        """Cut a machine's link for 1 to 10 s."""
        assert self._group is not None
        i = self._draws.randrange(self.plan.machines)
        cut_off = marked_processes(self._commands[i].mark)
        leads_alone = i == 0 and not self.plan.voters
        stay = [pid for pid in self._settled() if (pid in cut_off) == leads_alone]
        if not stay:
            return False
        self._group.cut(i, is_up=False)
        time.sleep(self._draws.uniform(1.0, 10.0))
        self._group.cut(i, is_up=True)
        for each in range(1, self.plan.machines) if leads_alone else [i]:
            self._doubtful[each] = time.time() + SILENCE_S
        return True

    def _wait_until_whole(self) -> None:
        count = self.plan.machines * self.plan.workers
        self.leader.wait_for(lambda: len(self._settled()) == count, f"{count} workers", WHOLE_S)


def _workers(command: Run) -> list[psutil.Process]:
    try:
        return [worker for each in psutil.Process(command.process.pid).children() for worker in each.children()]
    except psutil.NoSuchProcess:
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@contextmanager
def _place(plan: Plan) -> Iterator[tuple[Runs, ShapedNetwork | None]]:
    """Give a folder and the machines, which are gone at the end; the folder of a run that failed stays."""
    root = Path(tempfile.mkdtemp(prefix=f"elastic-chaos-{plan.seed}-"))
    os.environ[HURRY] = str(root / "hurry")
    with ExitStack() as stack:
        network = ShapedNetwork(plan.machines, parse_link(LINK)) if plan.machines > 1 else None
        if network is not None:
            stack.enter_context(network)
        yield stack.enter_context(Runs(root)), network
    shutil.rmtree(root)


def try_one(plan: Plan) -> Result:
    """Run once, under faults."""
    result, began = Result(plan), time.monotonic()
    try:
        with _place(plan) as (runs, network):
            chaos = Chaos(plan, runs, network)
            while len(result.faults) < plan.faults and chaos.leader.process.poll() is None:
                chaos.strike(result)
            codes = chaos.hurry()
            assert codes == [0] * plan.machines, f"exit codes {codes}: {chaos.leader.text()[-2000:]}"
            result.finished = True
            _judge(chaos.leader, plan, result)
    except (AssertionError, TooLate) as error:
        result.why = str(error)[-3000:] or "an assertion"
    result.seconds = time.monotonic() - began
    return result


def _judge(run: Run, plan: Plan, result: Result) -> None:
    starts = run.records("start")
    result.restarts = max(len(run.events("resumed")), *(s["attempt"] for s in starts))
    for fault in result.faults:
        after = [s["t"] - fault.t for s in starts if s["t"] > fault.t]
        if fault.calm and after and fault.kind not in ("kill one on its way", "cut a link"):
            result.stalls.append((fault.kind, after[0]))
    check_recorded(run, plan.epochs * SAMPLES // BATCH)
    result.recorded = True
    waits = plan.codec in (TOPK, POWER) and not plan.layout
    weights = moved(run.folder) + (waiting(run.folder) if waits else 0.0)
    least, most = float(weights.min()) - plan.epochs, float(weights.max()) - plan.epochs
    deaths = len(run.events("worker_died"))
    if plan.codec == TOPK:  # what waited in the memories of the dead is lost, and with it what bf16 had rounded up
        result.counted = most < 0.01 * (1 + deaths)
    elif plan.codec == ADAPTIVE:  # what it rounds up or down waits, too
        result.counted = most < 0.1 * (1 + deaths)
    elif plan.codec == POWER:
        result.counted = most < 0.34 * deaths and least > -0.67 * deaths
    else:
        result.counted = most < 1e-6 and least > (-plan.epochs if plan.sync == "easgd(4)" else -1e-6)
    assert result.counted, f"weights moved {least:+.6f} to {most:+.6f} beside {plan.epochs}"
    lost = [event["lost_steps"] for event in run.events("resumed")]
    assert not any(lost), f"steps that were lost: {lost}"
    if not plan.layout:
        assert not result.restarts, f"{result.restarts} restarts of the whole group: {run.text()[-2000:]}"
