"""The job of a run on Ray: `python -m echelon.launch.ray_job RUN FOLDER`, which Ray starts on a machine of the cluster.

It holds a placement group, and on each machine of it an actor that runs the node command. When a machine or a node
command dies, the others are ended and all start again from the newest checkpoint, as soon as Ray gives as many
machines; of a range, as many as there are. Machines that come while fewer than the most take part are taken in after a
checkpoint. SIGTERM, which Ray sends at a stop, is passed on: every node then saves a checkpoint and ends.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from echelon.config import load_run_config
from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.launch.places import PlaceChoice
from echelon.launch.places.base import STOP_S
from echelon.launch.places.cluster import NodeRank, PlaceFiles, Submission
from echelon.launch.places.ray import RANK_VARIABLE, RayCluster
from echelon.launch.process import die_with_parent

_CONFIG_FILE = "config.yaml"
_LOOK_S = 0.5
_GIVEN_S = 10.0  # until Ray gives machines that are free; else fewer are asked for, where fewer do
_COUNTED_AGAIN_S = 60.0  # while the least are waited for
_NEWCOMERS_S = 5.0  # between looks for machines that have come
_LAST_WORDS_S = 15.0  # for nodes that lost another one: they have nothing to save
_FINAL = {0, 1, USER_ERROR_EXIT_CODE}
_NOTED_NOTHING, _LOST = -1, -2  # how a start ended of which no machine noted that; a machine was lost in it
_MOST_IN_VAIN = 10


class NodeActor:
    """The node command on one of Ray's machines; it ends with the actor."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0

    def node(self) -> str:
        """Return Ray's id of this machine."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def run(self, submission: Submission, node_rank: NodeRank) -> int:
        """Run the node command to its end; returns its exit code."""
        environment = {**os.environ, RANK_VARIABLE: node_rank.to_json()}
        with (submission.run / "logs" / f"node{node_rank.number}.out").open("ab") as output:
            self._process = subprocess.Popen(
                submission.command, cwd=submission.folder, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        if self._asked:
            self._process.send_signal(self._asked)
        return self._process.wait()

    def signal(self, signum: int) -> None:
        """Send a signal to the node command, as soon as it runs."""
        self._asked = signum
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signum)


class _Stop:
    """Whether the job was asked to end."""

    def __init__(self) -> None:
        self.signum = 0
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum


class _Nodes:
    """A start of the run: its machines, and the node commands on them."""

    def __init__(self, cluster: RayCluster, count: int) -> None:
        self._group = placement_group([cluster.bundle] * count, strategy="STRICT_SPREAD")
        self._cluster, self.count = cluster, count
        self._actors: list[Any] = []
        self._ends: list[Any] = []

    def has_machines(self) -> bool:
        """Whether Ray has given all of them; waits for a moment."""
        return bool(self._group.wait(_LOOK_S))

    def start(self, submission: Submission, start: str) -> None:
        """Start the node commands.

        Raises:
            RayActorError: a machine is gone again.
        """
        actor = ray.remote(NodeActor)
        for number in range(self.count):
            at = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            options = actor.options(
                num_cpus=self._cluster.cores, num_gpus=self._cluster.gpus, max_concurrency=2, scheduling_strategy=at
            )
            self._actors.append(options.remote())
        names = ray.get([actor.node.remote() for actor in self._actors])
        address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == names[0])
        for number, (actor, name) in enumerate(zip(self._actors, names, strict=True)):
            node_rank = NodeRank(number, f"node {name[:8]}", address, start, self.count)
            self._ends.append(actor.run.remote(submission, node_rank))

    def wait(self) -> list[int | None] | None:
        """Return the exit codes of the nodes that have ended, None for one that is lost; None as long as all run on.

        Nodes that end together are given a moment: one that lost another must not be taken for the first to go.
        """
        ended, running = ray.wait(self._ends, num_returns=len(self._ends), timeout=_LOOK_S)
        return None if len(running) == len(self._ends) else [_exit_code(end) for end in ended]

    def signal(self, signum: int) -> None:
        """Send a signal to all node commands that still run; nobody waits for it to arrive."""
        for actor in self._actors:
            actor.signal.remote(signum)

    def end(self, within_s: float) -> None:
        """Wait so long for the node commands to end."""
        ray.wait(self._ends, num_returns=len(self._ends), timeout=within_s)

    def close(self) -> None:
        """Kill what still runs, and give the machines back."""
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)


def _exit_code(end: Any) -> int | None:
    try:
        code: int = ray.get(end)
    except RayActorError:
        return None
    return code


class StartsInVain:
    """Counts starts in a row in which no node command began, as where it cannot be imported on its machine."""

    def __init__(self, files: PlaceFiles) -> None:
        """Begin with what earlier jobs of the run have noted."""
        self._files, self._count = files, 0
        self._begun = self._noted()

    def _noted(self) -> int:
        return self._files.starts.stat().st_size if self._files.starts.exists() else 0

    def add(self, code: int) -> str:
        """Count a start that ended so; returns why no other one follows, or nothing."""
        before, self._begun = self._begun, self._noted()
        self._count = self._count + 1 if code == _NOTED_NOTHING and self._begun == before else 0
        if self._count < _MOST_IN_VAIN:
            return ""
        return f"{_MOST_IN_VAIN} starts in a row ended before the run began: logs/node0.out in its folder says why"


def main(run: Path, folder: Path) -> int:
    """Run the node commands until the run is over; returns the exit code that a command by hand would have."""
    cluster = PlaceChoice(load_run_config(run / _CONFIG_FILE).launch.on).cluster()
    if not isinstance(cluster, RayCluster):
        raise UserError(f"{run} is no run of --on ray(...)")
    ray.init(logging_level="warning", log_to_driver=False)
    stop, submission = _Stop(), Submission(run, folder)  # Ray has its own handler until then
    job, files, start = ray.get_runtime_context().get_job_id(), PlaceFiles(run), 0
    vain = StartsInVain(files)
    while not stop.signum:
        files.exit.unlink(missing_ok=True)
        newcomers = _Newcomers(cluster)
        nodes = _gathered(cluster, stop)
        if nodes is None:
            break
        with closing(nodes):
            code = _run_once(nodes, submission, f"{job}-{start}", stop, newcomers)
        if code in _FINAL:
            return code
        if reason := vain.add(code):
            files.end(USER_ERROR_EXIT_CODE, reason)
            return USER_ERROR_EXIT_CODE
        start += 1
    return 128 + stop.signum


def _fitting(cluster: RayCluster) -> frozenset[str]:
    """Return Ray's ids of the machines that are large enough to take part, whoever uses them now."""
    wanted = cluster.bundle.items()
    alive = [node for node in ray.nodes() if node["Alive"]]
    fits = [node for node in alive if all(node["Resources"].get(name, 0.0) >= amount for name, amount in wanted)]
    return frozenset(node["NodeID"] for node in fits)


def _gathered(cluster: RayCluster, stop: _Stop) -> _Nodes | None:
    """Wait for as many machines as there are, between the least and the most; None: the job was asked to end."""
    least, most = cluster.least_machines, cluster.machines
    count = min(most, max(least, len(_fitting(cluster))))
    while not stop.signum:
        nodes = _Nodes(cluster, count)
        patience_s = math.inf if least == most else _COUNTED_AGAIN_S if count == least else _GIVEN_S
        ends_s = time.monotonic() + patience_s
        while not stop.signum and time.monotonic() < ends_s:
            if nodes.has_machines():
                return nodes
        nodes.close()
        count = count - 1 if count > least else min(most, max(least, len(_fitting(cluster))))
    return None


class _Newcomers:
    """Machines that have come since a start began."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster, self._known = cluster, _fitting(cluster)
        self._seen: frozenset[str] = frozenset()
        self._looked_s = time.monotonic()

    def are_wanted(self, count: int) -> bool:
        """Whether some are there that a start of so many machines has room for; asked again and again.

        They have been seen twice: several that come together are taken in together.
        """
        if count >= self._cluster.machines or time.monotonic() - self._looked_s < _NEWCOMERS_S:
            return False
        self._looked_s, before = time.monotonic(), self._seen
        self._seen = _fitting(self._cluster) - self._known
        return bool(self._seen) and self._seen == before


def _run_once(nodes: _Nodes, submission: Submission, start: str, stop: _Stop, newcomers: _Newcomers) -> int:
    """Run the node commands once; returns how the run ended by what its machines noted, or that they did not."""
    files = PlaceFiles(submission.run)
    try:
        nodes.start(submission, start)
        codes = _until_one_ends(nodes, stop, newcomers)
    except RayActorError as lost:
        print(f"a machine is lost: {lost}", flush=True)
        return _LOST
    except RayTaskError as error:  # there is no such command on a node
        files.end(USER_ERROR_EXIT_CODE, str(error.cause))
        return USER_ERROR_EXIT_CODE
    if any(code != 0 for code in codes):
        nodes.signal(signal.SIGTERM)
    nodes.end(STOP_S if all(code == 0 for code in codes) else _LAST_WORDS_S)
    ended = files.ended()
    print(f"start {start} on {nodes.count}: exit codes {codes}, noted: {ended}", flush=True)
    if ended is not None:
        return ended[0]
    return _LOST if None in codes else _NOTED_NOTHING


def _until_one_ends(nodes: _Nodes, stop: _Stop, newcomers: _Newcomers) -> Sequence[int | None]:
    """Wait for the first node command that ends; returns the exit codes of those that have ended.

    A stop is passed on; machines that have come are taken in by one, too, which saves a checkpoint.
    """
    told = False
    while (codes := nodes.wait()) is None:
        if not told and (stop.signum or newcomers.are_wanted(nodes.count)):
            nodes.signal(signal.SIGTERM)
            told = True
    return codes


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
