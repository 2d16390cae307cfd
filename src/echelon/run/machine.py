"""This machine in a run: what it runs, the links it runs on, and the other machines that it meets."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.config import RunConfig
from echelon.coordinator.addresses import ADDRESS_FILE, ROLES_FOLDER, SchedulerLine, note_address, prepare_roles
from echelon.core.link import Link
from echelon.launch.link import ShapedNetwork
from echelon.launch.places.base import Job
from echelon.launch.plan import LaunchPlan
from echelon.launch.rounds import RoundSettings
from echelon.ps.worker_rank import worker_name
from echelon.records.file import Recorder
from echelon.records.kinds import LinkTraffic
from echelon.run.job import ServerPart, ranks_job, server_job
from echelon.sync.ps import server_settings

if TYPE_CHECKING:
    from echelon.launch.machines import FirstMachine, OtherMachine
    from echelon.launch.meeting import Arrival
    from echelon.trainer.resolved import ResolvedRun

SECRET_FOLDER = "machines"
ARRIVAL_S = 600.0


@dataclass(frozen=True)
class Machine:
    """What this machine runs.

    Attributes:
        rounds: of ranks that restart together.
        scheduler: who is told of deaths and of a stop, where there is one.
        server_machine: its number among machines with servers.
    """

    job: Job
    rounds: FirstMachine | OtherMachine | None = None
    scheduler: SchedulerLine | None = None
    server_machine: int = 0

    @property
    def number(self) -> int:
        """The number of this machine; the first one, 0, records how the run ended."""
        return self.server_machine if self.rounds is None else self.rounds.number


def this_machine(run: ResolvedRun, plan: LaunchPlan, path: Path, record: Recorder) -> AbstractContextManager[Machine]:
    """Prepare what this machine runs, for as long as the block takes.

    Raises:
        UserError: the machines do not meet, or the links cannot be shaped.
    """
    if not run.sync.uses_servers:
        if plan.nodes.most > 1:
            return _ranks_among_machines(run, plan, path)
        return _ranks_on_links(run, plan, plan.link, record) if plan.link else _ranks(plan)
    return _with_servers(run, plan, path, record)


@contextmanager
def _ranks(plan: LaunchPlan) -> Iterator[Machine]:
    from echelon.launch.machines import FirstMachine

    first = FirstMachine(_arrival(plan, {}), RoundSettings(max_restarts=plan.max_restarts), "127.0.0.1")
    try:
        yield Machine(ranks_job(plan), first)
    finally:
        first.close()


@contextmanager
def _ranks_on_links(run: ResolvedRun, plan: LaunchPlan, link: Link, record: Recorder) -> Iterator[Machine]:
    from echelon.launch.machines import FirstMachine

    with ShapedNetwork(plan.workers, link) as network:
        first = FirstMachine(_arrival(plan, {}), RoundSettings(max_restarts=plan.max_restarts), network.host_address)
        try:
            yield Machine(ranks_job(plan, network.hosts), first)
        finally:
            first.close()
            record.write(LinkTraffic(run.described.launch.link, [network.counters(i) for i in range(plan.workers)]))


@contextmanager
def _ranks_among_machines(run: ResolvedRun, plan: LaunchPlan, path: Path) -> Iterator[Machine]:
    """Meet the other machines at the rendezvous, and agree with them on every start of the ranks."""
    from echelon.launch.machines import FirstMachine, OtherMachine, StateReport
    from echelon.launch.meeting import Meeting, interface_of, is_own, own_address
    from echelon.messages.identity import make_secret

    assert plan.rendezvous is not None
    own, folder = own_address(plan.rendezvous), path / SECRET_FOLDER
    arrival = _arrival(plan, common_settings(run.described), own)
    terms = RoundSettings(plan.nodes.least, plan.nodes.most, plan.max_restarts, ARRIVAL_S, run.timeout_s)
    job = ranks_job(plan, interface=interface_of(own))
    machine: FirstMachine | OtherMachine
    meeting: AbstractContextManager[object] = nullcontext()
    if is_own(plan.rendezvous.host, own):
        folder.mkdir(mode=0o700, exist_ok=True)
        machine = FirstMachine(arrival, terms, own)
        meeting = Meeting(plan.rendezvous, make_secret(folder), StateReport, machine.answer)
        _say_first(plan, folder)
    else:
        machine = OtherMachine(plan.rendezvous, folder, arrival, terms)
    with meeting:
        reason = ""
        try:
            yield Machine(job, machine)
        except BaseException as error:
            reason = str(error) or type(error).__name__
            raise
        finally:
            machine.close(reason)


@contextmanager
def _with_servers(run: ResolvedRun, plan: LaunchPlan, path: Path, record: Recorder) -> Iterator[Machine]:
    if plan.nodes.most > 1:
        around = _servers_among_machines(run, plan, path)
    elif plan.link:
        around = _servers_on_links(run, plan, path, record)
    else:
        around = _servers(run, plan, path)
    with around as part:
        scheduler = SchedulerLine(path / ROLES_FOLDER)
        try:
            yield Machine(server_job(plan, part), None, scheduler, part.machine)
        finally:
            scheduler.close()


@contextmanager
def _servers(run: ResolvedRun, plan: LaunchPlan, path: Path) -> Iterator[ServerPart]:
    prepare_roles(path)
    settings, layout = server_settings(run.sync), run.layout_for(plan.workers * plan.nodes.most)
    numbers = tuple(range(settings.servers))
    yield ServerPart(layout.model_size, layout.dp, numbers, numbers if settings.replicas else ())


@contextmanager
def _servers_on_links(run: ResolvedRun, plan: LaunchPlan, path: Path, record: Recorder) -> Iterator[ServerPart]:
    """Give each worker, server and standby a network namespace; the scheduler stays outside, on the control links."""
    assert plan.link is not None
    with _servers(run, plan, path) as part:
        workers = [worker_name(i) for i in range(part.workers)]
        servers = [*(f"server{i}" for i in part.servers), *(f"standby{i}" for i in part.standbys)]
        names = [*workers, *servers]
        with ShapedNetwork(len(names), plan.link) as network:
            hosts = dict(zip(names, network.hosts, strict=True))
            addresses = {name: hosts[name].address for name in servers} | {"scheduler": network.host_address}
            try:
                yield ServerPart(
                    part.ranks, part.workers, part.servers, part.standbys, addresses=addresses, hosts=hosts
                )
            finally:
                counted = {name: network.counters(i) for i, name in enumerate(names)}
                traffic = [counted[n] for n in workers], {n: counted[n] for n in servers}
                record.write(LinkTraffic(run.described.launch.link, *traffic))


@contextmanager
def _servers_among_machines(run: ResolvedRun, plan: LaunchPlan, path: Path) -> Iterator[ServerPart]:
    """Meet the other machines at the rendezvous: the first one has the scheduler, servers are spread over all."""
    from echelon.launch.meeting import Admission, Arrival, Meeting, Register, Shape, is_own, join_meeting, own_address
    from echelon.messages.identity import read_secret

    assert plan.rendezvous is not None
    own, settings = own_address(plan.rendezvous), server_settings(run.sync)
    layout = run.layout_for(plan.workers * plan.nodes.most)
    shape = Shape(plan.nodes.least, plan.nodes.most, settings.servers, settings.replicas)
    arrival = _arrival(plan, common_settings(run.described), own)

    def part(admission: Admission) -> ServerPart:
        """Return the part of the machine with this number."""
        machine = admission.machine
        servers, standbys = tuple(shape.servers_of(machine)), tuple(shape.standbys_of(machine))
        names = ["scheduler", *(f"server{i}" for i in servers), *(f"standby{i}" for i in standbys)]
        addresses = dict.fromkeys(names, own)
        return ServerPart(
            layout.model_size, layout.dp, servers, standbys, machine, admission.first_worker, addresses
        )  # fmt: skip

    if is_own(plan.rendezvous.host, own):
        roles = prepare_roles(path)
        answer = partial(Register(shape, arrival).answer, roles / ADDRESS_FILE)
        meeting = Meeting(plan.rendezvous, read_secret(roles), Arrival, answer)
        _say_first(plan, roles)
        with meeting:
            yield part(Admission())
        return
    admission = join_meeting(
        plan.rendezvous, path / ROLES_FOLDER, arrival, run.timeout_s, say
    )  # fmt: skip
    note_address(path / ROLES_FOLDER, admission.scheduler)
    yield part(admission)


def _arrival(plan: LaunchPlan, settings: dict[str, str], address: str = "") -> Arrival:
    from echelon.launch.meeting import Arrival

    return Arrival(f"{socket.gethostname()} ({address})" if address else "", plan.workers, settings)


def common_settings(config: RunConfig) -> dict[str, str]:
    """Return the settings that must be the same on all machines, by their flags."""
    named = {"--batch-size": config.data.batch_size, "--model": config.model.name, "--nodes": config.launch.nodes}
    for part in (config.strategy, config.optimizer, config.training):
        named |= {"--" + f.name.replace("_", "-"): getattr(part, f.name) for f in fields(part) if f.name != "device"}
    return {name: str(value) for name, value in named.items()}


def _say_first(plan: LaunchPlan, folder: Path) -> None:
    from echelon.messages.identity import SECRET_FILE, SECRET_VARIABLE

    say(
        f"this is the first machine of {plan.nodes.most}; the others need the run's secret: a common disk, "
        f"a copy of {folder / SECRET_FILE} at the same place, or {SECRET_VARIABLE} set to the same on all machines"
    )


def say(line: str) -> None:
    """Print a line for the user, beside the progress."""
    print(f"echelon: {line}", file=sys.stderr, flush=True)
