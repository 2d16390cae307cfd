"""This machine in a run: what it runs, the links it runs on, and the other machines that it meets."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.config import RunConfig
from echelon.config.schema import traits_of
from echelon.coordinator.addresses import (
    ADDRESS_FILE,
    ROLES_FOLDER,
    SchedulerLine,
    note_address,
    prepare_roles,
    role_address,
)
from echelon.core.address import Address
from echelon.core.errors import UserError
from echelon.core.files import scratch_folder
from echelon.core.link import Link
from echelon.core.own import HUGGING_FACE
from echelon.core.patience import Patience
from echelon.core.units import many
from echelon.launch.link import Host, ShapedNetwork
from echelon.launch.places.base import Job
from echelon.launch.plan import LaunchPlan
from echelon.launch.rounds import RoundSettings
from echelon.ps.worker_rank import worker_name
from echelon.records.file import Recorder, newest
from echelon.records.kinds import LinkTraffic, Start
from echelon.run.job import ServerPart, ranks_job, server_job
from echelon.sync.ps import server_settings
from echelon.trainer.folder import SECRET_FOLDER

if TYPE_CHECKING:
    from echelon.launch.machines import FirstMachine, FirstMachineWatch, OtherMachine
    from echelon.launch.meeting import Admission, Arrival
    from echelon.launch.voters import VoterMachine
    from echelon.trainer.resolved import ResolvedRun

_FOR_EACH_MACHINE = {"cache_limit", "decode", "device", "eval_batch_size", "follow_links", "loaders", "root"}
_MAY_BE_PATHS = {"features", "measures", "sample_weights", "source", "tokeniser", "weights"}
_PATH = "a file or folder"  # which may lie elsewhere on each machine


@dataclass(frozen=True)
class Machine:
    """What this machine runs.

    Attributes:
        rounds: of ranks that restart together.
        scheduler: who is told of deaths and of a stop, where there is one.
        server_machine: its number among machines with servers.
        first: of a machine with servers that is not the first one: whether that is there.
        epoch: counted from 0, in which this launch begins (`ServerPart`).
    """

    job: Job
    rounds: FirstMachine | OtherMachine | VoterMachine | None = None
    scheduler: SchedulerLine | None = None
    server_machine: int = 0
    first: FirstMachineWatch | None = None
    epoch: int = 0

    @property
    def number(self) -> int:
        """The number of this machine, from 0."""
        return self.server_machine if self.rounds is None else self.rounds.number

    @property
    def leads(self) -> bool:
        """Whether this machine records how the run ended: the first one, unless another one leads."""
        return self.server_machine == 0 if self.rounds is None else self.rounds.leads


def this_machine(run: ResolvedRun, plan: LaunchPlan, path: Path, record: Recorder) -> AbstractContextManager[Machine]:
    """Prepare what this machine runs, for as long as the block takes.

    Raises:
        UserError: the machines do not meet, or the links cannot be shaped.
    """
    if not run.sync.uses_servers:
        if plan.nodes.most > 1:
            return _ranks_among_machines(run, plan, path)
        return _ranks_on_links(run, plan, plan.link, record) if plan.link else ranks_here(plan)
    return _with_servers(run, plan, path, record)


@contextmanager
def ranks_here(plan: LaunchPlan, hosts: Sequence[Host] = ()) -> Iterator[Machine]:
    """Let the ranks of this machine meet in files that this user alone can read, wherever in the network they live."""
    from echelon.launch.machines import FirstMachine

    terms = RoundSettings(max_restarts=plan.max_restarts)
    with scratch_folder() as stores:  # on this machine's disk: locks of files work there
        first = FirstMachine(arrival_of(plan, {}), terms, lambda name: f"file:{stores}/{name}", stores)
        yield Machine(ranks_job(plan, hosts), first)
        first.close()


@contextmanager
def _ranks_on_links(run: ResolvedRun, plan: LaunchPlan, link: Link, record: Recorder) -> Iterator[Machine]:
    with ShapedNetwork(plan.workers, link) as network:
        try:
            with ranks_here(plan, network.hosts) as machine:
                yield machine
        finally:
            record.write(LinkTraffic(run.described.launch.link, [network.counters(i) for i in range(plan.workers)]))


@contextmanager
def _ranks_among_machines(run: ResolvedRun, plan: LaunchPlan, path: Path) -> Iterator[Machine]:
    """Meet the other machines at the rendezvous, and agree with them on every start of the ranks."""
    among = _among_machines if len(plan.voters) == 1 else _among_voters
    with scratch_folder() as scratch, among(run, plan, path, scratch) as machine:
        yield machine


@contextmanager
def _among_voters(run: ResolvedRun, plan: LaunchPlan, path: Path, scratch: Path) -> Iterator[Machine]:
    """Meet the other machines, of which several may lead."""
    from echelon.launch.addresses import own_address, own_number
    from echelon.launch.meeting import SecretSource, interface_of
    from echelon.launch.voters import VoterMachine, VoterSetup
    from echelon.messages.identity import PUBLIC_SECRET, write_secret

    _rendezvous(plan)
    voters, folder = plan.voters, path / SECRET_FOLDER
    number = own_number(voters, plan.nodes.most)
    own = own_address(voters[number or 0])
    arrival = arrival_of(plan, common_settings(run.described), own)
    folder.mkdir(mode=0o700, exist_ok=True)
    if plan.trusted_network:
        write_secret(folder, PUBLIC_SECRET)
    secret = SecretSource(folder, plan.trusted_network)
    setup, patience = VoterSetup(voters, number, path, folder), Patience(path, run.io_patience_s)
    machine = VoterMachine(setup, secret, arrival, _round_settings(run, plan), scratch, patience)
    if number == 0:
        _say_first(plan, own, folder)
    with _left_at_end(machine):
        yield Machine(ranks_job(plan, interface=interface_of(own)), machine)


@contextmanager
def _left_at_end(machine: FirstMachine | OtherMachine | VoterMachine) -> Iterator[None]:
    """Leave the run at the end of the block, and tell the other machines why where it fails."""
    reason = ""
    try:
        yield
    except BaseException as error:
        reason = str(error) or type(error).__name__
        raise
    finally:
        machine.close(reason)


def _round_settings(run: ResolvedRun, plan: LaunchPlan) -> RoundSettings:
    """Return what a run asks of its machines."""
    return RoundSettings(
        plan.nodes.least, plan.nodes.most, plan.max_restarts, run.timeout_s, run.machine_patience_s, plan.elastic,
        plan.rescues,
    )  # fmt: skip


@contextmanager
def _among_machines(run: ResolvedRun, plan: LaunchPlan, path: Path, scratch: Path) -> Iterator[Machine]:
    from echelon.launch.machines import FirstMachine, OtherMachine, StateReport
    from echelon.launch.meeting import Meeting, SecretSource, interface_of
    from echelon.messages.identity import PUBLIC_SECRET, make_secret, write_secret
    from echelon.messages.key_values import KeyValueTables

    rendezvous = _rendezvous(plan)
    own, folder = _own_address(run, plan), path / SECRET_FOLDER
    arrival = arrival_of(plan, common_settings(run.described), own)
    terms = _round_settings(run, plan)
    job = ranks_job(plan, interface=interface_of(own))
    machine: FirstMachine | OtherMachine
    meeting: AbstractContextManager[object] = nullcontext()
    folder.mkdir(mode=0o700, exist_ok=True)
    if plan.trusted_network:
        write_secret(folder, PUBLIC_SECRET)
    if _is_first(plan, rendezvous, own):
        tables = KeyValueTables()

        def open_table(name: str) -> str:
            """Begin the table of a round, at the rendezvous."""
            tables.open(name)
            return f"meeting:{rendezvous}"

        machine = FirstMachine(arrival, terms, open_table, scratch)
        secret = PUBLIC_SECRET if plan.trusted_network else make_secret(folder)
        meeting = Meeting(rendezvous, secret, StateReport, machine.answer, tables)
        _say_first(plan, own, folder)
    else:
        secret_source = SecretSource(folder, plan.trusted_network)
        machine = OtherMachine(rendezvous, secret_source, arrival, terms, scratch)
    with meeting, _left_at_end(machine):
        yield Machine(job, machine)


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
        first = _watch_first(run, plan, path, part) if part.scheduler else None
        try:
            yield Machine(server_job(plan, part), None, scheduler, part.machine, first, part.epoch)
        finally:
            if first is not None:
                first.close()
            scheduler.close()


def _watch_first(run: ResolvedRun, plan: LaunchPlan, path: Path, part: ServerPart) -> FirstMachineWatch:
    """Begin to ask the first machine whether it is there; roles wait for its scheduler for `--timeout`."""
    from echelon.launch.machines import FirstMachineContact, FirstMachineWatch
    from echelon.launch.meeting import SecretSource

    rendezvous = _rendezvous(plan)
    secret = SecretSource(path / ROLES_FOLDER, plan.trusted_network)
    arrival = arrival_of(plan, common_settings(run.described), _own_address(run, plan))
    lost_s, patience_s = run.timeout_s / 2, run.machine_patience_s
    first = FirstMachineContact(rendezvous, secret, arrival, part.scheduler)
    return FirstMachineWatch(first, say, lost_s, patience_s)


@contextmanager
def _servers(run: ResolvedRun, plan: LaunchPlan, path: Path) -> Iterator[ServerPart]:
    epoch = _note_epoch(run, prepare_roles(path), begun_in(run, path))
    settings, layout = server_settings(run.sync), run.layout_for(plan.workers * plan.nodes.most)
    numbers = tuple(range(settings.servers))
    yield ServerPart(layout.model_size, layout.dp, numbers, numbers if settings.replicas else (), epoch=epoch)


def begun_in(run: ResolvedRun, path: Path) -> int:
    """Return the epoch, counted from 0, in which a launch of roles begins; 0 where that changes nothing."""
    if not run.tuning.changes_later:
        return 0
    from echelon.trainer.retuning import begun_epoch

    return begun_epoch(path)


def _note_epoch(run: ResolvedRun, roles: Path, epoch: int) -> int:
    """Tell a launch's roles in which epoch it begins, where that changes what is trained."""
    if run.tuning.changes_later:
        from echelon.trainer.retuning import keep_epoch

        keep_epoch(roles, epoch)
    return epoch


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
            addresses = {name: hosts[name].address for name in servers}
            if not role_address(path / ROLES_FOLDER, "scheduler").startswith("ipc:"):  # too long a path
                addresses["scheduler"] = network.host_address
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
    from echelon.launch.meeting import Admission, Arrival, Meeting, Register, Shape
    from echelon.messages.identity import read_secret, write_secret

    rendezvous = _rendezvous(plan)
    own, settings = _own_address(run, plan), server_settings(run.sync)
    layout = run.layout_for(plan.workers * plan.nodes.most)
    shape = Shape(plan.nodes.least, plan.nodes.most, settings.servers, settings.replicas)
    arrival = arrival_of(plan, common_settings(run.described), own)

    def part(admission: Admission) -> ServerPart:
        """Return the part of the machine with this number."""
        machine = admission.machine
        servers, standbys = tuple(shape.servers_of(machine)), tuple(shape.standbys_of(machine))
        names = ["scheduler", *(f"server{i}" for i in servers), *(f"standby{i}" for i in standbys)]
        addresses = dict.fromkeys(names, own)
        return ServerPart(
            layout.model_size, layout.dp, servers, standbys, machine, admission.first_worker, addresses,
            scheduler=admission.scheduler, epoch=admission.epoch,
        )  # fmt: skip

    brought = _brought_secret(plan, path)
    if _is_first(plan, rendezvous, own):
        if plan.after >= 0 and not plan.trusted_network:
            brought = read_secret(path / ROLES_FOLDER)  # the others know it
        roles = prepare_roles(path, plan.trusted_network)
        if brought is not None:
            write_secret(roles, brought)
        epoch = _note_epoch(run, roles, begun_in(run, path))
        answer = partial(Register(shape, arrival, epoch).answer, roles / ADDRESS_FILE)
        meeting = Meeting(rendezvous, read_secret(roles), Arrival, answer)
        if plan.after < 0:
            _say_first(plan, own, roles)
        with meeting:
            yield part(Admission(epoch=epoch))
        return
    yield part(_admission(run, plan, path, replace(arrival, since=plan.after + 1)))


def _admission(run: ResolvedRun, plan: LaunchPlan, path: Path, arrival: Arrival) -> Admission:
    """Wait for the first machine, and note for this one's roles what it says.

    Raises:
        UserError: it does not answer in time, or refuses this machine.
    """
    from echelon.launch.meeting import SecretSource, join_meeting
    from echelon.messages.identity import PUBLIC_SECRET, write_secret

    rendezvous, roles, brought = _rendezvous(plan), path / ROLES_FOLDER, _brought_secret(plan, path)
    secret = SecretSource(roles if brought is None else path / SECRET_FOLDER, plan.trusted_network)
    deadline_s, tell, flag = run.timeout_s, say, "--timeout"
    if plan.meets_again:
        deadline_s, tell, flag = run.machine_patience_s, _say_nothing, "--machine-patience"
    admission = join_meeting(rendezvous, secret, arrival, deadline_s, tell, flag)
    if plan.meets_again:
        say(f"the first machine at {rendezvous} is back: this one begins again with it")
    note_address(roles, admission.scheduler)
    _note_epoch(run, roles, admission.epoch)
    if plan.trusted_network:
        write_secret(roles, PUBLIC_SECRET)
    elif brought is not None:
        write_secret(roles, brought)
    return admission


def _brought_secret(plan: LaunchPlan, path: Path) -> bytes | None:
    """Return the run's secret where its place has brought it to each machine, in a file; None: it has not."""
    from echelon.messages.identity import SECRET_FILE, read_secret

    folder = path / SECRET_FOLDER
    if plan.node_rank is None or plan.trusted_network or not (folder / SECRET_FILE).exists():
        return None
    return read_secret(folder)


def machine_words(machine: Machine, plan: LaunchPlan, path: Path) -> str:
    """Return what ran on this machine, and where the run's record is; empty for the first machine, which has it."""
    if machine.leads:
        return ""
    named = [process.name for group in machine.job.groups for process in group.processes]
    of_kind = {kind: sum(name.startswith(kind) for name in named) for kind in ("server", "standby")}
    of_kind = {"worker": plan.workers, **of_kind}
    ran = " and ".join(many(n, kind) for kind, n in of_kind.items() if n)
    first = f"the first machine, at {plan.rendezvous}"
    shares_disk = next(newest(path, Start), None) is not None
    if len(plan.voters) > 1:
        return f"Here ran {ran}; the run's record and report are on the machine that leads."
    where = f"in {path}: {first}, writes them" if shares_disk else f"on {first}"
    return f"Here ran {ran}; the run's record and report are {where}."


def _rendezvous(plan: LaunchPlan) -> Address:
    """Return where the machines meet.

    Raises:
        UserError: a secret is given, and one is not to be used.
    """
    from echelon.messages.identity import SECRET_VARIABLE

    assert plan.rendezvous is not None
    if plan.trusted_network and SECRET_VARIABLE in os.environ:
        raise UserError(f"--trusted-network goes without a secret: unset {SECRET_VARIABLE}, or leave it out")
    return plan.rendezvous


def _own_address(run: ResolvedRun, plan: LaunchPlan) -> str:
    """Return this machine's address on the way to the first one.

    Raises:
        UserError: no way leads there.
    """
    from echelon.launch.addresses import own_address

    if plan.node_rank is None:  # its user named the host
        return own_address(_rendezvous(plan))
    return own_address(_rendezvous(plan), say, run.machine_patience_s if plan.meets_again else run.timeout_s)


def _is_first(plan: LaunchPlan, rendezvous: Address, own_address: str) -> bool:
    """Whether this is the first machine: as its place says, else by its address."""
    from echelon.launch.addresses import is_own

    return is_own(rendezvous.host, own_address) if plan.node_rank is None else plan.node_rank.number == 0


def arrival_of(plan: LaunchPlan, settings: dict[str, str], address: str = "") -> Arrival:
    """Return what this machine says of itself, with an address that others reach it by.

    Where a place gave it a rank, the name of that stays, wherever the place starts it again: at another address, maybe.
    """
    from echelon.launch.meeting import Arrival
    from echelon.run.versions import versions

    host = f"{socket.gethostname()} ({address})" if address else ""
    name = host if plan.node_rank is None else plan.node_rank.name
    return Arrival(name, plan.workers, versions() | settings)  # another version may have other settings: it comes first


def common_settings(config: RunConfig) -> dict[str, str]:
    """Return the settings that must be the same on all machines, by their flags; of paths only that they are some."""
    named = {"--nodes": config.launch.nodes, "--elastic": config.launch.elastic, "--task": config.task}
    named["--checkpoint-every"] = config.checkpoint.every
    for part in (config.data, config.model, config.optimizer, config.training, config.strategy):
        for field in fields(part):
            flag, value = traits_of(field).flag or "--" + field.name.replace("_", "-"), str(getattr(part, field.name))
            if field.name not in _FOR_EACH_MACHINE:
                named[flag] = _PATH if field.name in _MAY_BE_PATHS and _is_path(value) else value
    return named


def _is_path(name: str) -> bool:
    """Whether a name can only be that of a file or folder, by its text alone: it may be gone where a run goes on."""
    where = name.removeprefix(HUGGING_FACE)
    if where.startswith(("/", ".", "~", "file:")):
        return True
    return ":" not in name and ("/" in name or "." in name)


def _say_first(plan: LaunchPlan, address: str, folder: Path) -> None:
    from echelon.messages.identity import SECRET_FILE, SECRET_VARIABLE

    assert plan.rendezvous is not None
    first = f"this is the first machine of {plan.nodes.most}, at {address}:{plan.rendezvous.port}"
    if plan.node_rank is not None:  # its place brought the secret
        return
    if plan.trusted_network:
        say(f"{first}; whoever reaches it can take part (--trusted-network)")
        return
    if os.environ.get(SECRET_VARIABLE):
        say(f"{first}; the others need the same {SECRET_VARIABLE}")
        return
    say(
        f"{first}; the others need the run's secret: a common disk, "
        f"a copy of {folder / SECRET_FILE} at the same place, or {SECRET_VARIABLE} set to the same on all machines"
    )


def _say_nothing(line: str) -> None:
    """Leave a line out: its reader knows."""


def say(line: str) -> None:
    """Print a line for the user, beside the progress."""
    print(f"echelon: {line}", file=sys.stderr, flush=True)
