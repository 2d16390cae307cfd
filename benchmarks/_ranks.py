"""Ranks of a benchmark: processes that meet over gloo, measure together, and tell what they saw."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from echelon.launch.link import Host, enter


class MeetingPlan(Protocol):
    """What any rank is started with.

    Attributes:
        host: where the rank lives; None: this machine, over loopback.
        store: address and port of the rendezvous store.
        timeout_s: of each wait for others.
    """

    rank: int
    world: int
    host: Host | None
    store: tuple[str, int]
    timeout_s: float


P = TypeVar("P", bound=MeetingPlan)
R = TypeVar("R")


def of_ranks(measure: Callable[[P], R], plans: Sequence[P], limit_s: float) -> list[R]:
    """Let each rank measure as planned, in a process of one thread; returns what each found, by rank.

    Raises:
        TimeoutError: one did not end in time.
        RuntimeError: one failed; its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in plans]
    processes = [
        context.Process(target=_be_rank, args=(measure, plan, there), daemon=True)
        for plan, (_, there) in zip(plans, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        return _results([here for here, _ in pipes], limit_s)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def _results(pipes: Sequence[Any], limit_s: float) -> list[Any]:
    results = []
    deadline = time.monotonic() + limit_s
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"rank {rank} did not end within {limit_s:.0f} s")
        results.append(pipe.recv())
        if isinstance(results[-1], str):
            raise RuntimeError(f"rank {rank} failed:\n{results[-1]}")
    return results


def _be_rank(measure: Callable[[P], R], plan: P, pipe: Connection) -> None:
    """Send what was measured, or the traceback as a text."""
    try:
        if plan.host is not None:
            enter(plan.host)
        torch.set_num_threads(1)
        timeout = timedelta(seconds=plan.timeout_s)
        store = dist.TCPStore(*plan.store, plan.world, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=plan.rank, world_size=plan.world, timeout=timeout)
        pipe.send(measure(plan))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - whatever it was, the other end reports it
        pipe.send(traceback.format_exc())
