"""A real Ray on this machine: a head without cores and two nodes with one core each; nodes are lost and added."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ranks.runs import MARK, marked_processes

DEADLINE_S = 240.0  # for a busy machine: an idle one needs a tenth
ADDRESS = "127.0.0.1"
MEMORY = ("--object-store-memory", "80000000", "--disable-usage-stats", "--node-ip-address", ADDRESS, "--block")


def missing() -> str:
    """Return why no Ray can be had here; empty: it can."""
    found = importlib.util.find_spec("ray") is not None and importlib.util.find_spec("aiohttp_cors") is not None
    return "" if found else "no Ray here: pip install 'ray[default]'"


@dataclass
class Ray:
    """A cluster that runs; its processes are ended by `ray_cluster`."""

    folder: Path
    ports: list[int] = field(default_factory=list)
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def dashboard(self) -> str:
        """The address for jobs."""
        return f"http://{ADDRESS}:{self.ports[1]}"

    def start(self) -> None:
        """Start the head and two nodes, and wait until they are known to it."""
        self.ports = _free_ports(2)
        self._start("head", "--head", "--port", str(self.ports[0]), "--dashboard-port", str(self.ports[1]),
                    "--num-cpus", "0", "--temp-dir", str(self.folder))  # fmt: skip
        self._wait(lambda: _answers(f"{self.dashboard}/api/version"), "the head")
        for count, name in enumerate(("n1", "n2"), 1):
            self.add_node(name)
            self.wait_for_cores(count)

    def add_node(self, name: str) -> None:
        """Start a node of one core."""
        self._start(name, "--address", f"{ADDRESS}:{self.ports[0]}", "--num-cpus", "1")

    def wait_for_cores(self, count: int) -> None:
        """Wait until the cluster has so many cores."""
        url = f"{self.dashboard}/api/cluster_status"
        wanted = f'"CPU": [{{used}}, {count}.0]'
        self._wait(lambda: any(wanted.format(used=u) in _answers(url) for u in ("0.0", "1.0", "2.0")), f"{count} cores")

    def _start(self, name: str, *options: str) -> None:
        environment = {
            **os.environ,
            MARK: self._mark(name),
            "RAY_raylet_start_wait_time_s": f"{DEADLINE_S:.0f}",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # these tests may run below `uv run`
            "RAY_AUTH_MODE": "disabled",  # else a token that some Ray has left in the home is asked for
        }
        agent = ["--dashboard-agent-listen-port", str(_free_ports(1)[0])]  # the same one by default
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *agent, *MEMORY]
        with (self.folder / f"{name}.out").open("ab") as output:
            self.nodes[name] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def _mark(self, name: str) -> str:
        return f"{os.getpid()}-{id(self)}-ray-{name}"

    def fail_node(self, name: str) -> None:
        """Let a node vanish as a machine does that loses its power: all that runs below it."""
        node = self.nodes.pop(name)
        node.kill()
        while pids := marked_processes(self._mark(name)):
            for pid in pids:
                _kill(pid)
        node.wait()

    def _wait(self, ready: Callable[[], Any], what: str) -> None:
        ends = time.monotonic() + DEADLINE_S
        while not ready():
            if time.monotonic() > ends or any(node.poll() is not None for node in self.nodes.values()):
                logs = "\n".join(f"{f.name}: {f.read_text()[-1500:]}" for f in self.folder.glob("*.out"))
                raise AssertionError(f"{what} did not start:\n{logs}")
            time.sleep(0.2)

    def close(self) -> None:
        """End all nodes, the head last."""
        for name in reversed(list(self.nodes)):
            self.fail_node(name)


def _answers(url: str) -> str:
    """Return what an address answers; empty: nothing yet."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text: str = answer.read().decode()
    except OSError:
        return ""
    return text


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _free_ports(count: int) -> list[int]:
    taken = [socket.create_server((ADDRESS, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return ports


@contextmanager
def ray_cluster(folder: Path) -> Iterator[Ray]:
    """Give a cluster of a head and two nodes, for as long as the block takes."""
    cluster = Ray(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
