"""Network namespaces: making them, running commands in them, moving into one, reading their counters. Needs root."""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from echelon.launch import netns_holder
from echelon.records.kinds import LinkCounters

COMMAND_TIMEOUT_S = 30.0
CONTROL_INTERFACE = "ctl0"


@dataclass(frozen=True)
class Host:
    """One namespace that stands for a machine; small and picklable, so that a worker can be handed it.

    Attributes:
        namespace: path that `setns` and `nsenter` take; valid while the network is open.
        switch: the same for the namespace of the bridges.
        address: address on the shaped data links; gloo, NCCL and servers bind to it.
        control_address: address on the unshaped control link to the machine's own namespace.
        interfaces: data interfaces, the first one carries `address`.
        ports: the switch's ends of `interfaces`, in the same order.
    """

    namespace: str
    switch: str
    address: str
    control_address: str
    interfaces: tuple[str, ...]
    ports: tuple[str, ...]

    @property
    def command_prefix(self) -> list[str]:
        """What to put before a command so that it runs on this host."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return ["nsenter", f"--net={self.namespace}", "--", "env", *settings]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make gloo and NCCL use the data link: the machine's host name means nothing inside.

        NCCL would pass what it sends within a machine by its GPUs or shared memory, which no link shapes.
        """
        names = {"GLOO_SOCKET_IFNAME": self.interfaces[0], "NCCL_SOCKET_IFNAME": self.interfaces[0]}
        return names | {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def enter(host: Host) -> None:
    """Move the calling thread, and what it starts from now on, onto a host; sets `host.environment` for the process.

    Call it first in a worker, from the main thread, before any socket is opened: open sockets stay where they are.

    Raises:
        RuntimeError: the network has been closed.
        OSError: the process may not change its namespace.
    """
    try:
        fd = os.open(host.namespace, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise RuntimeError(f"the shaped network of {host.address} is closed") from error
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, netns_holder.CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter the namespace of {host.address}: {os.strerror(code)}")
    finally:
        os.close(fd)
    os.environ.update(host.environment)


def read_counters(host: Host, interface: str | None = None) -> LinkCounters:
    """Read the kernel's counters of a host's data interfaces (or one of them), from anywhere on the machine.

    Two to four short commands (about 20 ms): for the start and the end of a run, not for every step.
    """
    links = _statistics(host.namespace, ["ip", "-s", "-j", "link", "show"], "ifname")
    dropped_here = _statistics(host.namespace, ["tc", "-s", "-j", "qdisc", "show"], "dev")
    dropped_there = _statistics(host.switch, ["tc", "-s", "-j", "qdisc", "show"], "dev")
    sent_bytes = received_bytes = sent_packets = received_packets = dropped = 0
    for name, port in zip(host.interfaces, host.ports, strict=True):
        if interface not in (None, name):
            continue
        sent, received = links[name][0]["stats64"]["tx"], links[name][0]["stats64"]["rx"]
        sent_bytes, received_bytes = sent_bytes + sent["bytes"], received_bytes + received["bytes"]
        sent_packets, received_packets = sent_packets + sent["packets"], received_packets + received["packets"]
        shapers = [*dropped_here.get(name, []), *dropped_there.get(port, [])]
        dropped += sent["dropped"] + received["dropped"] + sum(shaper.get("drops", 0) for shaper in shapers)
    return LinkCounters(sent_bytes, received_bytes, sent_packets, received_packets, dropped)


def _statistics(namespace: str, command: list[str], key: str) -> dict[str, list[dict]]:
    """Run a command that prints a JSON list and return its entries by device."""
    by_device: dict[str, list[dict]] = {}
    for entry in json.loads(run_in(namespace, command) or "[]"):
        by_device.setdefault(entry.get(key, ""), []).append(entry)
    return by_device


def run_in(namespace: str, command: list[str], script: str | None = None) -> str:
    """Run a command in a namespace (a path) with `script` as its input, and return what it prints.

    Raises:
        RuntimeError: the command failed; with its words.
        subprocess.TimeoutExpired: it took longer than `COMMAND_TIMEOUT_S`.
    """
    done = subprocess.run(
        ["nsenter", f"--net={namespace}", "--", *command],
        input=script,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` in {namespace} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Namespaces:
    """Unnamed namespaces that end with this process, however it ends (see `netns_holder`).

    Attributes:
        paths: one path for each namespace; the first one is given up first when the end comes.
    """

    def __init__(self, count: int) -> None:
        """Create them.

        Raises:
            RuntimeError: the kernel refuses; with its words.
        """
        command = [sys.executable, "-I", "-S", str(Path(netns_holder.__file__)), str(count), str(os.getpid())]
        self._holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for the owner: the network outlives it
        )
        try:
            self.paths: list[str] = self._read_paths()
        except BaseException:
            self.close()
            raise

    def _read_paths(self) -> list[str]:
        assert self._holder.stdout is not None
        ready, _, _ = select.select([self._holder.stdout], [], [], COMMAND_TIMEOUT_S)
        if not ready:
            raise RuntimeError(f"the process that holds network namespaces did not answer in {COMMAND_TIMEOUT_S:g} s")
        line = self._holder.stdout.readline()
        if not line.startswith("["):
            words = (line + self._holder.stdout.read()).strip().splitlines()
            raise RuntimeError(f"cannot create network namespaces: {words[-1] if words else 'no reason given'}")
        return list(json.loads(line))

    def close(self) -> None:
        """Give the namespaces up; processes that still live inside are asked to end, then killed."""
        grace_s = netns_holder.TERMINATE_GRACE_S + netns_holder.KILL_GRACE_S + COMMAND_TIMEOUT_S
        assert self._holder.stdin is not None and self._holder.stdout is not None
        try:
            # Not by closing it alone: a forked child of ours may hold the other copy of this pipe.
            self._holder.stdin.write("close\n")
            self._holder.stdin.close()
        except BrokenPipeError:
            pass  # it has already ended
        try:
            self._holder.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait(grace_s)
        finally:
            self._holder.stdout.close()


def wait_until_gone(interface: str, timeout_s: float) -> None:
    """Wait for the kernel, which takes a namespace apart in the background, to remove an interface of this machine.

    Raises:
        TimeoutError: it is still there.
    """
    deadline = time.monotonic() + timeout_s
    while interface in {name for _, name in socket.if_nameindex()}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"interface {interface} is still there after {timeout_s:g} s")
        time.sleep(0.005)
