"""The ranks of one candidate on one link, driven from outside: run steps, evaluate, tell how it failed."""

from __future__ import annotations

import multiprocessing as mp
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from benchmarks import _slow_link_worker
from benchmarks._slow_link_worker import RankPlan
from echelon.launch.link import ShapedNetwork

WORLD = 2
START_DEADLINE_S = 300.0  # also of an evaluation, on a machine that does other things
STEP_DEADLINE_S = 15.0
COLLECTIVE_TIMEOUT_S = 600.0


class CandidateFailed(Exception):
    """A rank raised, died or did not answer in time; the text is its traceback or what is known."""


@dataclass(frozen=True)
class Terms:
    """What is the same for every candidate: global batch, optimizer, seed, and the learning rate's horizon in steps."""

    batch: int
    lr: float
    momentum: float
    seed: int = 0
    horizon: int = 0


@dataclass(frozen=True)
class Window:
    """What a run of steps cost: the slowest rank's seconds, all ranks' CPU seconds, rank 0's bytes.

    `wire_bytes` is the kernel's count without headers, `counted_bytes` the candidate's own; None where there is none.
    """

    steps: int
    seconds: float
    cpu_s: float
    wire_bytes: int | None
    counted_bytes: int | None


class Pair:
    """A context manager: the ranks of one candidate, on a shaped network or (None) over loopback."""

    def __init__(self, candidate: str, terms: Terms, network: ShapedNetwork | None) -> None:
        """Start the ranks; they are ready when `run` first returns."""
        from torch.distributed import TCPStore

        self.candidate, self.parameters = candidate, 0
        self._network = network
        self._store = TCPStore("0.0.0.0", 0, WORLD, is_master=True, wait_for_workers=False)
        store = ("127.0.0.1" if network is None else network.host_address, self._store.port)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        context = mp.get_context("forkserver")
        for rank in range(WORLD):
            host = None if network is None else network.hosts[rank]
            plan = RankPlan(
                candidate, rank, WORLD, host, store, terms.seed, terms.batch, terms.lr, terms.momentum, terms.horizon,
                COLLECTIVE_TIMEOUT_S,
            )  # fmt: skip
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            self._processes.append(context.Process(target=_slow_link_worker.main, args=(plan, theirs), daemon=True))
            self._processes[-1].start()
            theirs.close()
        self._ready = False

    def run(self, steps: int) -> Window:
        """Run steps on all ranks.

        Raises:
            CandidateFailed: it aborted, raised or hung.
        """
        self.wait_until_ready()
        before = self._wire_bytes()
        answers = self._ask(("run", steps), START_DEADLINE_S + steps * STEP_DEADLINE_S)
        after = self._wire_bytes()
        return Window(
            steps=steps,
            seconds=max(answer["seconds"] for answer in answers),
            cpu_s=sum(answer["cpu_s"] for answer in answers),
            wire_bytes=None if before is None or after is None else after - before,
            counted_bytes=answers[0]["counted_bytes"],
        )

    def evaluate(self) -> tuple[float, float]:
        """Return the share of test images that are classified correctly, and the seconds until replicas agreed.

        Raises:
            CandidateFailed: as `run`.
        """
        self.wait_until_ready()
        answers = self._ask(("evaluate",), START_DEADLINE_S)
        share = sum(answer["correct"] for answer in answers) / sum(answer["of"] for answer in answers)
        return share, max(answer.get("agreeing_s", 0.0) for answer in answers)

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            process.kill()
            process.join(5)

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        """Wait until the ranks are joined and hold the same parameters, which travel over the link too.

        Raises:
            CandidateFailed: as `run`.
        """
        if not self._ready:
            self.parameters = self._collect(START_DEADLINE_S)[0]["parameters"]
            self._ready = True

    def _wire_bytes(self) -> int | None:
        return None if self._network is None else self._network.counters(0).sent_payload_bytes

    def _ask(self, command: tuple[Any, ...], deadline_s: float) -> list[dict[str, Any]]:
        for pipe in self._pipes:
            try:
                pipe.send(command)
            except BrokenPipeError:
                raise CandidateFailed("a rank has ended") from None
        return self._collect(deadline_s)

    def _collect(self, deadline_s: float) -> list[dict[str, Any]]:
        """Wait for every rank's answer, or the first failure."""
        deadline = time.monotonic() + deadline_s
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < WORLD:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise CandidateFailed(f"no answer from rank {sorted(waiting.values())} in {deadline_s:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    raise CandidateFailed(f"rank {rank} died (exit code {self._processes[rank].exitcode})") from None
                if "failed" in answers[rank]:
                    raise CandidateFailed(answers[rank]["failed"])
        return [answers[rank] for rank in range(WORLD)]
