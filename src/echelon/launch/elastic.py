"""Run a plan's workers under torch.distributed.elastic: rendezvous, monitoring, restarts."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.elastic.rendezvous.api import RendezvousError

from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.launch.death import die_with_parent, is_stopped
from echelon.launch.link import Host, LinkCounters, ShapedNetwork, enter, parse_link
from echelon.launch.plan import ROUND_VARIABLE, LaunchPlan
from echelon.launch.rendezvous import interface_of, own_address, rendezvous

MONITOR_INTERVAL_S = 0.1


@dataclass(frozen=True)
class Death:
    """A worker that ended when it should not have: its rank, machine, process and exit code (negative: signal).

    Without an exit code it lives, but its process is stopped (SIGSTOP, a debugger) while the others wait for it.
    """

    rank: int
    host: str
    pid: int
    exit_code: int | None

    def __str__(self) -> str:
        who = f"rank {self.rank} (pid {self.pid} on {self.host})"
        if self.exit_code is None:
            return f"{who} does not answer: its process is stopped (SIGSTOP)"
        how = f"exit code {self.exit_code}" if self.exit_code >= 0 else signal.Signals(-self.exit_code).name
        return f"{who} died: {how}"


@dataclass(frozen=True)
class Watch:
    """What the one who starts workers wants to know: each death with the restarts left, and the links' counters."""

    on_death: Callable[[Death, int], None]
    on_counters: Callable[[list[LinkCounters]], None]


class WorkersFailed(Exception):
    """The workers died more often than restarts were allowed."""


class Refused(Exception):
    """A worker refused the user's input: it has said why in the run's record."""


class Interrupted(Exception):
    """The run was asked to stop by a signal; the workers have ended."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@dataclass
class _Place:
    """Where workers stand: on hosts with shaped links, or all behind one interface ("": any); their round's name."""

    hosts: list[Host]
    interface: str
    round: str = ""


class _Agent(LocalElasticAgent):
    """An elastic agent that says who died, and does not restart what refused its input or was asked to stop."""

    on_death: Callable[[Death, int], None]
    place: _Place
    refused = False
    stopped = False

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other machines and agree on a name for this round: torch's store keeps the addresses of former ones.

        Without it a new rank now and then reads where its peer listened before, and is refused.
        """
        super()._rendezvous(worker_group)
        assert self._store is not None
        if worker_group.group_rank == 0:
            self._store.set(ROUND_VARIABLE, uuid.uuid4().hex)
        self.place.round = self._store.get(ROUND_VARIABLE).decode()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._all_left() and not worker_group.spec.rdzv_handler.num_nodes_waiting():
            self.stopped = True
            self._remaining_restarts = 0
            return RunResult(state=WorkerState.FAILED)
        deaths = self._deaths(worker_group)
        if deaths:
            self._kill_survivors()
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            deaths = deaths or self._deaths(worker_group)
            if USER_ERROR_EXIT_CODE in [death.exit_code for death in deaths]:
                self.refused = True
                self._remaining_restarts = 0
            elif deaths:
                self.on_death(deaths[0], self._remaining_restarts)
        return result

    def _processes(self) -> list[BaseProcess]:
        context = getattr(self._pcontext, "_pc", None)
        return context.processes if context is not None else []

    def _all_left(self) -> bool:
        """Whether all workers ended by themselves without a result: the stop was another machine's, or a worker's."""
        processes = self._processes()
        results = getattr(self._pcontext, "_return_values", {})
        return bool(processes) and not results and all(process.exitcode == 0 for process in processes)

    def _deaths(self, worker_group: WorkerGroup) -> list[Death]:
        """Return the workers that failed: a signal killed them, they are stopped, or they failed because of that."""
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        deaths = [
            Death(ranks[i], socket.gethostname(), process.pid or 0, process.exitcode)
            for i, process in enumerate(self._processes())
            if process.exitcode not in (0, None, -signal.SIGTERM) or is_stopped(process.pid)
        ]
        if all(death.exit_code is None for death in deaths):
            return []  # nobody gave up waiting yet: it may go on
        return sorted(deaths, key=lambda death: -0.5 if death.exit_code is None else death.exit_code)

    def _kill_survivors(self) -> None:
        """End what waits for the dead: elastic would ask politely and wait up to 30 s for a rank stuck in a collective.

        Nothing is lost by it: checkpoints are whole or absent.
        """
        for process in self._processes():
            if process.exitcode is None:
                process.kill()


def run_workers(plan: LaunchPlan, watch: Watch) -> dict[int, Any]:
    """Run the workers to their end; returns each local rank's result.

    Args:
        plan: what to start.
        watch: is told of deaths, and of what the kernel counted on shaped links.

    Raises:
        Refused: a worker refused its input.
        WorkersFailed: restarts are used up.
        Interrupted: this process was asked to stop; the workers were given time to write a checkpoint.
        UserError: the rendezvous cannot be reached, or the links cannot be shaped.
    """
    if not plan.link:
        return _run_agent(plan, watch, [], own_address(plan.rendezvous) if plan.nodes.most > 1 else "localhost")
    with ShapedNetwork(plan.workers, parse_link(plan.link)) as network:
        try:
            return _run_agent(plan, watch, network.hosts, network.host_address)
        finally:
            watch.on_counters([network.counters(i) for i in range(plan.workers)])


def _run_agent(plan: LaunchPlan, watch: Watch, hosts: list[Host], address: str) -> dict[int, Any]:
    _silence_elastic()
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    # a store shared over rounds is made known in the first alone: a machine that joins later would wait for it in vain
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1" if plan.nodes.most > 1 else "0"
    handler = rendezvous_registry.get_rendezvous_handler(rendezvous(plan, address))
    place = _Place(hosts, interface_of(address) if plan.nodes.most > 1 else "")
    spec = WorkerSpec(
        role="worker",
        local_world_size=plan.workers,
        entrypoint=_enter,
        args=(plan.entry, plan.threads, plan.args, place),
        rdzv_handler=handler,
        max_restarts=plan.max_restarts,
        monitor_interval=MONITOR_INTERVAL_S,
        local_addr=None if address == "localhost" else address,
    )
    redirects = dict.fromkeys(range(plan.workers), Std.ALL)
    redirects[0] = Std.NONE  # rank 0 shows the progress
    logs = DefaultLogsSpecs(log_dir=str(plan.log_dir), redirects=redirects)
    agent = _Agent(spec, logs, start_method="forkserver", exit_barrier_timeout=60)
    agent.on_death, agent.place = watch.on_death, place
    close = True
    try:
        result = agent.run()
    except SignalException as stopped:
        close = False
        raise Interrupted(int(stopped.sigval)) from None
    except (RendezvousError, DistStoreError) as error:
        raise UserError(f"--rendezvous {plan.rendezvous}: {' '.join(str(error).split())}") from error
    finally:
        if close:
            handler.shutdown()
    if agent.stopped:
        return dict.fromkeys(range(plan.workers), "stopped")
    if not result.is_failed():
        return result.return_values
    if agent.refused:
        raise Refused
    raise WorkersFailed


def _silence_elastic() -> None:
    """Let torch say nothing on the terminal: what counts is said by us.

    Each of its loggers has a level of its own, which that of the package above does not change.
    """
    talkative = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
    for name in [*talkative, *logging.root.manager.loggerDict]:
        if name.startswith(talkative):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _enter(entry: str, threads: int, args: tuple[Any, ...], place: _Place) -> Any:
    """Run in the worker: ends with its parent, takes its place in the network, then calls the entry point."""
    die_with_parent()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ[ROUND_VARIABLE] = place.round
    if place.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", place.interface)
    if place.hosts:
        enter(place.hosts[int(os.environ["LOCAL_RANK"])])
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)(*args)
