"""Who can reach a run, and what comes of trying."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from echelon.core.errors import UserError
from echelon.launch.link import ShapedNetwork, check_link, parse_link
from tests.attack.intruder import Code, fill
from tests.attack.scenario import CannotRunHere, Scenario
from tests.ranks.ports import HAS_SS, Port, open_ports, ports_during
from tests.ranks.runs import SMALL, Run, Runs, losses_of, marked_processes

LINK = "1gbit"
STEPS = 1500
SILENT = 2500
FILES = 1024
LIMITED = ("sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh")
RUN = ("train", "digits", *SMALL, "--model", "mlp", "--epochs", "100000", "--eval-every", "0")
SYNCS = {"allreduce": ("allreduce", 2), "servers": ("ps(mode=async)", 1)}  # and workers: whose order is always the same
MACHINES = {
    "allreduce": ("--sync", "allreduce"),
    "trusted": ("--sync", "allreduce", "--trusted-network"),
    "servers": ("--sync", "ps(mode=async)"),
    "servers-sync": ("--sync", "ps(mode=sync)"),
}
DEADLINE_S = 60.0


def _open_ports(sync: str, folder: Path) -> str:
    _needs_ss()
    with Runs(folder) as runs:
        run = runs.start("train", "digits", *SMALL, "--workers", "2", "--max-steps", "10", "--sync", sync, folder="run")
        ports = ports_during(run)
        assert run.end() == 0, run.text()
    others = sorted(f"{port.address}:{port.number}" for port in ports if not port.is_private)
    assert not others, f"{sync} listens on {', '.join(others)}"
    return f"{len(ports)} ports, all on loopback"


def _needs_ss() -> None:
    if not HAS_SS:
        raise CannotRunHere("this machine has no `ss`")


def _ports_of(runs: Sequence[Run]) -> set[Port]:
    return {port for run in runs for port in open_ports(marked_processes(run.mark))}


class _Intruder:
    """An intruder that is ready before the run is: `with _Intruder(...) as intruder: ...; intruder.begin(ports)`."""

    def __init__(self, folder: Path, prefix: Sequence[str] = (), silent: int = 0) -> None:
        command = [sys.executable, "-m", "tests.attack.intruder", "--canary", folder / "canary", "--silent"]
        self._process = subprocess.Popen(
            [*prefix, *command, str(silent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=Path(__file__).parents[3],
        )  # fmt: skip

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> _Intruder:
        assert self._line() == "ready", self._process.communicate()[1][-500:]
        return self

    def begin(self, ports: set[Port]) -> None:
        """Attack these ports from now on."""
        where = [f"{'127.0.0.1' if port.address == '*' else port.address}:{port.number}" for port in ports]
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(where) + "\n")
        self._process.stdin.flush()

    def connections(self) -> int:
        """Return how many silent connections it made, once it has."""
        return int(json.loads(self._line())["connections"])

    def end(self) -> dict[str, int]:
        """Let it end; returns what it tried how often."""
        out, errors = self._process.communicate("end", timeout=DEADLINE_S)
        assert self._process.returncode == 0, errors[-500:]
        tried: dict[str, int] = json.loads(out.splitlines()[-1])
        return tried

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def _fill_file_stores(folder: Path) -> int:
    """Put a pickle into every key of the stores that the ranks of one machine meet in, as their own user could."""
    keys = 0
    for file in (folder / "tmp").glob("echelon-*/[!.]*"):
        keys += fill(dist.FileStore(str(file), -1), pickle.dumps(Code(folder / "canary")))
    return keys


def _in_words(folder: Path, tried: dict[str, int], keys: int, losses: str) -> str:
    assert not (folder / "canary").exists(), "code was run"
    set_there = {name: count for name, count in tried.items() if name.startswith("keys set") and count}
    assert not set_there, f"{set_there}"
    count = sum(tried.values()) - tried.get("not reached", 0)
    assert count, "no port was reached"
    pickles = f", a pickle in {keys} keys of its file stores" if keys else ""
    return f"{count} connections with garbage{pickles}: no code ran, {losses}"


def _attacked(name: str, folder: Path) -> str:
    """Attack a run on one machine while it trains; its losses are those of a run that nobody attacks."""
    _needs_ss()
    sync, workers = SYNCS[name]
    (folder / "tmp").mkdir()
    command = (*RUN, "--sync", sync, "--workers", str(workers), "--max-steps", str(STEPS))
    with Runs(folder) as runs, _Intruder(folder) as intruder:
        quiet = runs.start(*command, folder="quiet")
        assert quiet.end() == 0, quiet.text()
        run = runs.start(*command, "--serve", folder="run", environment={"TMPDIR": str(folder / "tmp")})
        run.wait_for(lambda: run.records("steps"), "a step")
        intruder.begin(_ports_of([run]))
        keys = _fill_file_stores(folder)
        assert run.end() == 0, run.text()[-800:]
        tried = intruder.end()
        assert run.losses() == quiet.losses(), "the losses are others"
    return _in_words(folder, tried, keys, f"{len(run.losses())} losses are those of a run that was left alone")


def _attacked_machines(name: str, folder: Path) -> str:
    """Attack a run on two machines from both of them; its losses are those of one left alone.

    Those of two asynchronous workers are not, as they never come in the same order twice: there all steps are counted.
    """
    _needs_ss()
    _needs_links()
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(folder) as runs:

        def start(where: str) -> list[Run]:
            """Start the run on both machines."""
            return _on_machines(runs, network, where, (*MACHINES[name], "--max-steps", str(STEPS)))

        with _Intruder(folder, network.command_prefix(0)) as one, _Intruder(folder, network.command_prefix(1)) as other:
            quiet = start("quiet")
            assert [run.end() for run in quiet] == [0, 0], quiet[0].text()[-800:]
            both = start("run")
            both[0].wait_for(lambda: both[0].records("steps"), "a step")
            ports = _ports_of(both)
            one.begin(ports)
            other.begin(ports)
            assert [run.end() for run in both] == [0, 0], both[0].text()[-800:]
            tried = [one.end(), other.end()]
        losses, alone = losses_of(folder / "run"), losses_of(folder / "quiet")
        assert losses == alone or name == "servers", "the losses are others"
        assert sorted(losses) == list(range(1, STEPS + 1)), "steps are missing"
    total = {kind: sum(each.get(kind, 0) for each in tried) for kind in tried[0] | tried[1]}
    same = "all there (asynchronous ones never repeat)" if name == "servers" else "those of a run that was left alone"
    return f"{len(ports)} ports; {_in_words(folder, total, 0, f'{len(losses)} losses are {same}')}"


def _needs_links() -> None:
    try:
        check_link(parse_link(LINK))
    except UserError as refusal:
        raise CannotRunHere(str(refusal)) from None


def _on_machines(
    runs: Runs, network: ShapedNetwork, where: str, settings: Sequence[str], limited: Sequence[str] = ()
) -> list[Run]:
    """Start a run on the machines of a network."""
    machines = ("--workers", "1", "--nodes", "2", "--rendezvous", f"{network.addresses[0]}:29400")
    prefixes = [(*network.command_prefix(i), *limited) for i in range(2)]
    return [runs.start(*RUN, *settings, *machines, folder=where, prefix=prefix) for prefix in prefixes]


def _flooded_machines(name: str, folder: Path) -> str:
    """Hold 2,500 silent connections to each port of a run on two machines, whose ports are at their addresses there."""
    _needs_ss()
    _needs_links()
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(folder) as runs:
        settings = (*MACHINES[name], "--checkpoint-every", "50")
        with _Intruder(folder, network.command_prefix(1), silent=SILENT) as intruder:
            both = _on_machines(runs, network, "run", settings, LIMITED)
            both[0].wait_for(lambda: both[0].records("steps"), "a step")
            ports = _ports_of(both)
            elsewhere = sorted(port.address for port in ports if port.address not in network.addresses)
            assert not elsewhere, f"it listens at {', '.join(elsewhere)}"
            intruder.begin(ports)
            count, reached = intruder.connections(), max(both[0].losses())
            both[0].wait_for_step(reached + 300)
            both[0].process.terminate()
            assert [run.end() for run in both] == [143, 143], both[0].text()[-800:]
            deaths = [death["message"] for death in both[0].events("worker_died")]
            assert not deaths, deaths[0]
    return (
        f"{count} silent connections to {len(ports)} ports at the machines' addresses, {FILES} files: it trained on "
        f"from step {reached}"
    )


def _flooded(name: str, folder: Path) -> str:
    """Hold 2,500 silent connections to each port of a run that may open 1,024 files, and look at it train on."""
    _needs_ss()
    sync, workers = SYNCS[name]
    with Runs(folder) as runs, _Intruder(folder, silent=SILENT) as intruder:
        run = runs.start(*RUN, "--sync", sync, "--workers", str(workers), "--serve", "--checkpoint-every", "50",
                         folder="run", prefix=LIMITED)  # fmt: skip
        run.wait_for(lambda: run.records("steps"), "a step")
        ports = _ports_of([run])
        intruder.begin(ports)
        count, reached = intruder.connections(), max(run.losses())
        run.wait_for_step(reached + 300)
        run.process.terminate()
        assert run.end() == 143, run.text()[-800:]
        deaths = [death["message"] for death in run.events("worker_died")]
        assert not deaths, deaths[0]
    return f"{count} silent connections to {len(ports)} ports, {FILES} files: it trained on from step {reached}"


def _each_sync(prefix: str, promise: str, attack: Callable[[str, Path], str]) -> list[Scenario]:
    return [
        Scenario(f"{prefix}-{name}", promise.format(sync), partial(attack, name), short=False)
        for name, (sync, _) in SYNCS.items()
    ]


SCENARIOS = [
    *(
        Scenario(
            f"{name}-on-one-machine",
            f"A run on one machine ({sync}) opens no port that another machine reaches.",
            partial(_open_ports, sync),
            short=False,  # `tests/ranks/test_ports.py` looks at these too
        )
        for name, sync in (("allreduce", "allreduce"), ("servers", "ps(mode=async, servers=2)"))
    ),
    *_each_sync(
        "attacked",
        "Garbage at each port of a run on one machine ({}) and a pickle in every key change no loss and run no code.",
        _attacked,
    ),
    *(
        Scenario(
            f"machines-{name}",
            f"Garbage and pickles at each port of a run on two machines ({' '.join(how[1:])}) run no code"
            + (", and change no loss" if name != "servers" else ", and lose no step")
            + ".",
            partial(_attacked_machines, name),
            short=False,
        )
        for name, how in MACHINES.items()
    ),
    *_each_sync(
        "flood",
        "2,500 silent connections to each port of a run ({}) that may open 1,024 files do not end it.",
        _flooded,
    ),
    *(
        Scenario(
            f"flood-machines-{name}",
            f"2,500 silent connections to each port of a run on two machines ({MACHINES[name][1]}) do not end it.",
            partial(_flooded_machines, name),
            short=False,
        )
        for name in ("allreduce", "servers")
    ),
]
