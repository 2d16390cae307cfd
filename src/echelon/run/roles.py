"""A run with a parameter server: where its processes, machines, links, the scheduler and the record meet."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from echelon.config import RunConfig
from echelon.config.validate import check_world, parse_rendezvous
from echelon.coordinator.addresses import ADDRESS_FILE, ROLES_FOLDER, SchedulerLine, note_address, prepare_roles
from echelon.core.errors import UserError
from echelon.core.units import parse_seconds
from echelon.launch.link import Host, ShapedNetwork, parse_link
from echelon.launch.places.base import Group, Job, Process, Restart, Started
from echelon.launch.places.local import Local
from echelon.launch.plan import LaunchPlan
from echelon.launch.supervisor import Death, Refused, RunFailed, Watch, supervise
from echelon.ps.worker_rank import WorkerRank, worker_name
from echelon.records.events import MachineLeft, Refusal, WorkerDied
from echelon.records.file import Recorder
from echelon.records.kinds import End, LinkTraffic, ProcessStarted
from echelon.reporting.report import write_report
from echelon.sync.ps import ServerSettings
from echelon.trainer.folder import last_message
from echelon.trainer.server_checks import server_settings

_ENTRIES = {
    "scheduler": "echelon.run.served:run_scheduler",
    "server": "echelon.run.served:run_server",
    "standby": "echelon.run.served:run_server",
    "worker": "echelon.trainer.leased:run_leased",
}


@dataclass(frozen=True)
class Site:
    """This machine in a run: its number, its part of the processes, the addresses and namespaces they live at.

    `addresses`: by role's name, where it listens; absent: for this machine only.
    """

    machine: int = 0
    first_worker: int = 0
    servers: tuple[int, ...] = ()
    standbys: tuple[int, ...] = ()
    addresses: dict[str, str] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)


@dataclass(frozen=True)
class Teams:
    """Workers of the parameter server: `size` processes each, and how many there are on all machines."""

    size: int
    workers: int


def run_leased_roles(config: RunConfig, plan: LaunchPlan, path: Path, record: Recorder) -> str:
    """Start this machine's part of a parameter server's scheduler, servers and workers; each is restarted alone.

    Returns:
        `completed`, `stopped` or `failed`.

    Raises:
        UserError: a role refused its input, or the machines do not meet.
    """
    settings = server_settings(config)
    layout = check_world(config, plan.workers * plan.nodes.most)
    teams = Teams(layout.model_size, layout.dp)
    if plan.nodes.most > 1:
        around = _among_machines(config, plan, path, settings)
    elif plan.link:
        around = _on_links(plan, path, settings, record, teams)
    else:
        around = _alone(path, settings)
    with around as site:
        return _run(plan, path, record, site, teams)


@contextmanager
def _alone(path: Path, settings: ServerSettings) -> Iterator[Site]:
    prepare_roles(path)
    numbers = tuple(range(settings.servers))
    yield Site(servers=numbers, standbys=numbers if settings.replicas else ())


@contextmanager
def _on_links(plan: LaunchPlan, path: Path, settings: ServerSettings, record: Recorder, teams: Teams) -> Iterator[Site]:
    """Give each worker, server and standby a network namespace; the scheduler stays outside, on the control links."""
    with _alone(path, settings) as whole:
        workers = [worker_name(i) for i in range(teams.workers)]
        servers = [*(f"server{i}" for i in whole.servers), *(f"standby{i}" for i in whole.standbys)]
        names = [*workers, *servers]
        with ShapedNetwork(len(names), parse_link(plan.link)) as network:
            hosts = dict(zip(names, network.hosts, strict=True))
            addresses = {name: hosts[name].address for name in servers} | {"scheduler": network.host_address}
            try:
                yield Site(servers=whole.servers, standbys=whole.standbys, addresses=addresses, hosts=hosts)
            finally:
                counted = {name: network.counters(i) for i, name in enumerate(names)}
                record.write(LinkTraffic(plan.link, [counted[n] for n in workers], {n: counted[n] for n in servers}))


@contextmanager
def _among_machines(config: RunConfig, plan: LaunchPlan, path: Path, settings: ServerSettings) -> Iterator[Site]:
    """Meet the other machines at the rendezvous: the first one has the scheduler, servers are spread over all."""
    from echelon.launch.meeting import Arrival, Place, Shape, join_meeting
    from echelon.launch.rendezvous import is_own, own_address

    own = own_address(plan.rendezvous)
    shape = Shape(plan.nodes.least, plan.nodes.most, settings.servers, settings.replicas)
    arrival = Arrival(f"{socket.gethostname()} ({own})", plan.workers, common_settings(config))

    def site(place: Place) -> Site:
        servers, standbys = tuple(shape.servers_of(place.machine)), tuple(shape.standbys_of(place.machine))
        names = ["scheduler", *(f"server{i}" for i in servers), *(f"standby{i}" for i in standbys)]
        return Site(place.machine, place.first_worker, servers, standbys, dict.fromkeys(names, own))

    if is_own(parse_rendezvous(plan.rendezvous)[0], own):
        with _meeting(plan, path, shape, arrival):
            yield site(Place())
        return
    deadline_s = parse_seconds(config.launch.timeout)
    place = join_meeting(plan.rendezvous, path / ROLES_FOLDER, arrival, deadline_s, _say)
    note_address(path / ROLES_FOLDER, place.scheduler)
    yield site(place)


@contextmanager
def _meeting(plan: LaunchPlan, path: Path, shape: Any, first: Any) -> Iterator[None]:
    import zmq

    from echelon.launch.meeting import Meeting, Register
    from echelon.messages.identity import SECRET_FILE, SECRET_VARIABLE, read_secret

    roles = prepare_roles(path)
    port = parse_rendezvous(plan.rendezvous)[1]
    try:
        meeting = Meeting(f"tcp://*:{port}", read_secret(roles), Register(shape, first), roles / ADDRESS_FILE)
    except zmq.ZMQError as error:
        raise UserError(
            f"--rendezvous {plan.rendezvous}: {error.strerror}; choose another port, the same on all machines"
        ) from None
    _say(
        f"this is the first machine of {plan.nodes.most}; the others need the run's secret: a common disk, "
        f"a copy of {roles / SECRET_FILE} at the same place, or {SECRET_VARIABLE} set to the same on all machines"
    )
    with meeting:
        yield


def common_settings(config: RunConfig) -> dict[str, str]:
    """Return the settings that must be the same on all machines, by their flags."""
    named = {"--batch-size": config.data.batch_size, "--model": config.model.name, "--nodes": config.launch.nodes}
    for part in (config.strategy, config.optimizer, config.training):
        named |= {"--" + f.name.replace("_", "-"): getattr(part, f.name) for f in fields(part) if f.name != "device"}
    return {name: str(value) for name, value in named.items()}


def _say(words: str) -> None:
    print(f"echelon: {words}", file=sys.stderr, flush=True)


def _run(plan: LaunchPlan, path: Path, record: Recorder, site: Site, teams: Teams) -> str:
    line = SchedulerLine(path / ROLES_FOLDER)

    def on_death(death: Death, goes_on: bool) -> None:
        alone = "it alone is started again" if not death.others else "its worker's processes are started again"
        then = alone if goes_on else "no restarts are left"
        message = f"{death}; {then}"
        record.write(WorkerDied(message, role=death.name, host=death.host, pid=death.pid, exit_code=death.exit_code))
        line.died(death.name, "died", death.pid)
        for name, pid in death.others:
            line.died(name, f"ended with {death.name}", pid)

    def on_start(started: Started) -> None:
        record.write(ProcessStarted(started.name, started.pid))

    watch = Watch(on_death, line.stop, on_start)
    plan.log_dir.mkdir(parents=True, exist_ok=True)
    try:
        stopped = supervise(_job(plan, path, site, teams), Local(), watch)
        return "stopped" if stopped and line.status() != "completed" else line.status()
    except Refused:
        reason = last_message(path, Refusal)
        _end(path, record, site, "refused", reason)
        raise UserError(reason) from None
    except RunFailed as failure:
        _end(path, record, site, "failed", str(failure) or last_message(path, WorkerDied))
        return "failed"
    finally:
        line.close()


def _end(path: Path, record: Recorder, site: Site, status: str, reason: str) -> None:
    """Record how the run ended; where another machine fails, the run goes on without it."""
    if site.machine == 0:
        record.write(End(status, reason))
        write_report(path)
    else:
        record.write(MachineLeft(f"machine {site.machine} left the run: {reason}", site.machine))


def _job(plan: LaunchPlan, path: Path, site: Site, teams: Teams) -> Job:
    """Return this machine's processes. Where the scheduler is elsewhere, the workers' end is the run's."""
    environment = {"OMP_NUM_THREADS": str(plan.threads), "LOCAL_WORLD_SIZE": str(plan.workers)}
    first = site.machine == 0

    def process(name: str, args: tuple[Any, ...], leads: bool) -> Process:
        log = "" if name == "scheduler" else str(plan.log_dir / f"{name}.out")
        return Process(
            name, _ENTRIES[name.partition(".")[0].rstrip("0123456789")], (str(path), *args), environment,
            site.hosts.get(name), log, leads, stops_on_signal=False,
        )  # fmt: skip

    alone = [process("scheduler", (site.addresses.get("scheduler", ""),), True)] if first else []
    for kind, numbers in (("server", site.servers), ("standby", site.standbys)):
        names = [(f"{kind}{i}", i) for i in numbers]
        alone += [process(name, (name, i, site.addresses.get(name, "")), False) for name, i in names]
    workers: dict[int, list[Process]] = {}
    for local in range(plan.workers):
        number, rank = divmod(site.first_worker + local, teams.size)
        seat = WorkerRank(number, local, site.machine, rank, teams.size, teams.workers)
        workers.setdefault(number, []).append(process(seat.name, (seat, *plan.args[1:]), not first))
    if teams.size == 1:
        return Job((Group((*alone, *(p for [p] in workers.values())), Restart.ALONE),), plan.max_restarts)
    near = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # a split worker's ranks are on one machine
    split = [tuple(replace(p, environment=environment | near) for p in ranks) for ranks in workers.values()]
    return Job((Group(tuple(alone), Restart.ALONE), *map(Group, split)), plan.max_restarts)
