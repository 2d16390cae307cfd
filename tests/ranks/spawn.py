"""Runs a function on several ranks: real processes joined by gloo, a hard timeout, faults as data.

    def double(rank: Rank, value: int) -> int:
        dist.all_reduce(...)                      # the default process group stands already
        rank.reach(step=3)                        # a planned fault strikes here
        return 2 * value

    assert run_ranks(double, 2, 21) == [42, 42]

`fn` and its arguments are pickled, so `fn` stands at the top level of a test module. Ranks are forked from a server
that has imported torch once, so that starting one costs milliseconds. Each rank computes on one thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from echelon.core.system import COMPILER

PRELOAD = [
    "torch",
    COMPILER,
    "torch.distributed.fsdp",
    "echelon.parallel.tensor",
    "torch.distributed",
    "numpy",
    "pytest",
    "echelon.collectives.hook",
    "echelon.trainer.assemble",
    "tests.ranks.replicas",
    "tests.ranks.spawn",
]
GRACE_S = 5.0
ENDED_S = 20.0  # a machine that stands still for a while is no leak
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Fault:
    """One planned fault: what happens to `rank` when it reaches `step`."""

    rank: int
    step: int
    how: Literal["kill", "stop", "raise"]


def fail_at(rank: int, step: int, how: Literal["kill", "stop", "raise"] = "kill") -> Fault:
    """Plan a fault: `kill` (SIGKILL), `stop` (SIGSTOP: alive, silent) or `raise` (an exception)."""
    return Fault(rank, step, how)


class PlannedFailure(RuntimeError):
    """Raised by a rank at a fault planned with `how="raise"`."""


class RanksFailed(AssertionError):
    """A rank raised, died unplanned, did not end in time or left a process behind."""


@dataclass(frozen=True)
class Struck:
    """The result of a rank that a planned fault struck: it has no other."""

    how: str


@dataclass(frozen=True)
class Rank:
    """What a rank knows of itself; the first argument of the function under test."""

    index: int
    world_size: int
    timeout: timedelta
    folder: Path
    backend: str | None = "gloo"
    faults: tuple[Fault, ...] = ()

    def reach(self, step: int) -> None:
        """Let the fault planned for this rank and step strike; returns at once when there is none."""
        for fault in self.faults:
            if (fault.rank, fault.step) != (self.index, step):
                continue
            if fault.how == "raise":
                raise PlannedFailure(f"planned failure of rank {self.index} at step {step}")
            os.kill(os.getpid(), signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)

    def stack_file(self) -> Path:
        """Where this rank writes its stacks when the timeout asks for them."""
        return self.folder / f"stack-{self.index}.txt"


@dataclass
class _Running:
    process: Any
    results: Connection
    outcome: tuple[str, Any] | None = None
    struck: list[Fault] = field(default_factory=list)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 180,
    group_timeout_s: float | None = None,
    faults: Sequence[Fault] = (),
    backend: str | None = "gloo",
) -> list[Any]:
    """Run `fn(rank, *args)` on every rank; returns what each returned, or `Struck` where a planned fault hit.

    Args:
        timeout_s: seconds from here to the end of the last rank; then every rank is killed.
        group_timeout_s: seconds that an operation of the process group waits at most; half of `timeout_s` unless given.
        backend: backend of the default process group; None makes none.

    Raises:
        RanksFailed: shows the traceback of each rank that failed, or where each stood when the time was over.
    """
    server = fork_server()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        timeout = timedelta(seconds=group_timeout_s or timeout_s / 2)
        ranks = [Rank(i, world_size, timeout, Path(folder), backend, tuple(faults)) for i in range(world_size)]
        running = [_start(server, rank, fn, args) for rank in ranks]
        try:
            late = _collect(running, time.monotonic() + timeout_s)
            if late:
                _ask_for_stacks(running, ranks)
        finally:
            leaked = [i for i, r in enumerate(running) if _end(r)]
        return _results(running, ranks, leaked if not late else [])


def fork_server() -> Any:
    """Return the context whose processes are forked from a server that has imported what ranks need.

    Whoever starts the first process in it decides what is imported: every test that needs a process takes it from here.
    """
    server = multiprocessing.get_context("forkserver")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    server.set_forkserver_preload(PRELOAD)
    return server


def _start(server: Any, rank: Rank, fn: Callable[..., Any], args: tuple[Any, ...]) -> _Running:
    here, there = server.Pipe(duplex=False)
    work = pickle.dumps((fn, args))
    process = server.Process(target=_rank_main, args=(rank, work, there), name=f"rank-{rank.index}", daemon=False)
    process.start()
    there.close()
    return _Running(process, here, struck=[f for f in rank.faults if f.rank == rank.index and f.how != "raise"])


def _rank_main(rank: Rank, work: bytes, results: Connection) -> None:
    """The whole life of a rank's process, in a process group of its own so that what it leaves behind is found."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with rank.stack_file().open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        try:
            if rank.backend is not None:
                store = dist.FileStore(str(rank.folder / "store"), rank.world_size)
                dist.init_process_group(
                    rank.backend, store=store, rank=rank.index, world_size=rank.world_size, timeout=rank.timeout
                )
            fn, args = pickle.loads(work)
            outcome = pickle.dumps(("result", fn(rank, *args)))
        except PlannedFailure:
            outcome = pickle.dumps(("result", Struck("raise")))
        except BaseException:  # noqa: BLE001 - whatever it was, the test shows it
            outcome = pickle.dumps(("error", traceback.format_exc()))
        results.send_bytes(outcome)
        faulthandler.unregister(signal.SIGUSR1)
    if dist.is_initialized():
        dist.destroy_process_group()


def _collect(running: list[_Running], deadline: float) -> bool:
    """Take the outcomes as they come; after the first failure the others get GRACE_S. True when the time was over."""
    waiting = list(running)
    while waiting and time.monotonic() < deadline:
        for ready in wait([r.results for r in waiting], timeout=max(0.0, deadline - time.monotonic())):
            rank = next(r for r in waiting if r.results is ready)
            try:
                rank.outcome = pickle.loads(rank.results.recv_bytes())
            except EOFError:
                rank.outcome = None
            waiting.remove(rank)
            if (rank.outcome is None and not rank.struck) or (rank.outcome is not None and rank.outcome[0] == "error"):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if all(any(f.how == "stop" for f in r.struck) for r in waiting):
            break
    return any(not r.struck for r in waiting)


def _ask_for_stacks(running: list[_Running], ranks: list[Rank]) -> None:
    late = [(run, rank.stack_file()) for run, rank in zip(running, ranks, strict=True) if run.process.is_alive()]
    late = [(run, file) for run, file in late if file.exists()]
    for run, _ in late:
        os.kill(run.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(file.stat().st_size == 0 for _, file in late):
        time.sleep(0.01)


def _end(rank: _Running) -> bool:
    """End a rank's process and all it started; True when something outlived the rank."""
    if rank.outcome is None:
        rank.process.kill()
    rank.process.join(ENDED_S)
    stuck = rank.process.is_alive()
    if stuck:
        rank.process.kill()
        rank.process.join()
    leaked = stuck or _group_alive(rank.process.pid)
    if leaked and not stuck:
        os.killpg(rank.process.pid, signal.SIGKILL)
    rank.results.close()
    return leaked and not (rank.struck and rank.outcome is None)


def _group_alive(pid: int) -> bool:
    """Whether a process of the rank's group still lives after a moment to end by itself."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.01)
    return True


def _results(running: list[_Running], ranks: list[Rank], leaked: list[int]) -> list[Any]:
    problems: list[str] = []
    results: list[Any] = []
    for i, (run, rank) in enumerate(zip(running, ranks, strict=True)):
        if run.outcome is not None and run.outcome[0] == "result":
            results.append(run.outcome[1])
        elif run.outcome is not None:
            problems.append(f"rank {i} raised:\n{run.outcome[1]}")
        elif run.struck:
            results.append(Struck(run.struck[0].how))
        else:
            stack = rank.stack_file().read_text() if rank.stack_file().exists() else ""
            where = f"was still at\n{stack}" if stack else f"ended with code {run.process.exitcode} and no result"
            problems.append(f"rank {i} {where}")
    problems += [f"rank {i} left a process behind, or did not end after its result" for i in leaked]
    if problems:
        raise RanksFailed("\n\n".join(problems))
    return results
