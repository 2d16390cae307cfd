"""Joins namespaces by bridges and shaped links, and this machine to their control network."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.errors import UserError
from echelon.core.link import Link
from echelon.launch.netns import CONTROL_INTERFACE, Host, run_in
from echelon.launch.netns_shape import shaper_lines

CLAIM_ATTEMPTS = 100


@dataclass(frozen=True)
class Topology:
    """What is to be built: `count` hosts in `groups`; `inner` links are there exactly when there are several groups."""

    count: int
    link: Link
    groups: int
    inner: Link | None

    @property
    def per_group(self) -> int:
        """Hosts in each group."""
        return self.count // self.groups

    @property
    def links(self) -> tuple[Link, ...]:
        """Each host's data links, the one that carries its address first."""
        return (self.link,) if self.inner is None else (self.inner, self.link)


@dataclass(frozen=True)
class ControlNetwork:
    """This machine's end of the control network: the interface's name and the first three numbers of addresses."""

    interface: str
    prefix: str

    @property
    def host_address(self) -> str:
        """This machine's address."""
        return f"{self.prefix}.254"


def build_switch(switch: str, topology: Topology) -> None:
    """Create the bridges in the switch's namespace."""
    lines = []
    for bridge in ("control", "core", *(f"group{g}" for g in range(topology.groups) if topology.groups > 1)):
        lines += [
            f"link add name {bridge} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            f"link set {bridge} addrgenmode none",
            f"link set {bridge} up",
        ]
    run_in(switch, ["ip", "-batch", "-"], "\n".join(lines))


def claim_control_network(switch: str) -> ControlNetwork:
    """Join this machine to the control bridge by a veth, on a /24 that it does not route yet.

    The interface is named after the network, and the kernel refuses a name that exists: two networks that start at the
    same moment cannot claim the same addresses.

    Raises:
        UserError: all of the drawn networks are taken.
    """
    here = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"
    draw = random.Random(f"{os.getpid()}-{os.urandom(8).hex()}")
    for _ in range(CLAIM_ATTEMPTS):
        high, low = draw.randrange(128, 256), draw.randrange(256)
        network = ControlNetwork(f"ech-{high}-{low}", f"10.{high}.{low}")
        if _is_routed(here, f"{network.prefix}.0/24") or not _create_uplink(here, network.interface, switch):
            continue
        lines = [
            f"link set {network.interface} addrgenmode none",
            f"address add {network.host_address}/24 dev {network.interface}",
            f"link set {network.interface} up",
        ]
        run_in(here, ["ip", "-batch", "-"], "\n".join(lines))
        run_in(switch, ["ip", "-batch", "-"], "link set uplink master control\nlink set uplink up\n")
        return network
    raise UserError(
        f"--link: this machine already routes {CLAIM_ATTEMPTS} networks drawn from 10.128.0.0/9; none is free"
    )


def _create_uplink(here: str, interface: str, switch: str) -> bool:
    """Create the pair of interfaces between this machine and the switch; False where the name is taken."""
    pair = ["ip", "link", "add", "name", interface, "type", "veth", "peer", "name", "uplink", "netns", switch]
    try:
        run_in(here, pair)
    except RuntimeError as error:
        if "File exists" in str(error):
            return False
        raise
    return True


def _is_routed(namespace: str, network: str) -> bool:
    """Whether a route of this machine, other than the default, leads into a network or covers it."""
    routes = [run_in(namespace, ["ip", "-4", "route", "show", which, network]) for which in ("root", "match")]
    return any(line and not line.startswith("default") for line in "\n".join(routes).splitlines())


def connect_host(index: int, paths: list[str], control: ControlNetwork, topology: Topology) -> Host:
    """Give host `index` its interfaces, addresses, routes and shapers; `paths` are the switch's and the hosts'."""
    group, place = divmod(index, topology.per_group)
    grouped = topology.inner is not None
    host = Host(
        namespace=paths[1 + index],
        switch=paths[0],
        address=f"10.64.{group}.{place + 1}",
        control_address=f"{control.prefix}.{index + 1}",
        interfaces=("eth0", "eth1") if grouped else ("eth0",),
        ports=(f"host{index}", f"core{index}") if grouped else (f"host{index}",),
    )
    bridges = (f"group{group}", "core") if grouped else ("core",)
    cables = [
        (CONTROL_INTERFACE, f"control{index}", "control"),
        *zip(host.interfaces, host.ports, bridges, strict=True),
    ]
    others = [g for g in range(topology.groups) if g != group]
    run_in(host.switch, ["ip", "-batch", "-"], "\n".join(_plug_lines(host, cables)))
    run_in(host.namespace, ["ip", "-batch", "-"], "\n".join(_address_lines(host, cables, others)))
    shape_host(host, topology.links)
    _keep_packets_in_order(host.namespace, host.interfaces)
    _keep_packets_in_order(host.switch, host.ports)
    return host


def shape_host(host: Host, links: Sequence[Link], *, change: bool = False) -> None:
    """Shape both ends of a host's data links; `change`: they are shaped already, by other rates."""
    ends = (host.namespace, host.interfaces, True), (host.switch, host.ports, False)
    for namespace, names, with_delay in ends:
        lines = [
            line
            for name, link in zip(names, links, strict=True)
            for line in shaper_lines(name, link, with_delay=with_delay, change=change)
        ]
        run_in(namespace, ["tc", "-batch", "-"], "\n".join(lines))


def _keep_packets_in_order(namespace: str, interfaces: Sequence[str]) -> None:
    """Let one processor receive all packets of a connection (RPS), as a network card does.

    A veth hands a packet to the processor whose timer the shaper was woken by. With several of them packets overtake
    each other, which TCP takes for losses: it sends some again and slows down, which no real link of that rate does.
    A kernel without RPS has no such file; there is nothing else to set on it.
    """
    script = "mount -t sysfs sys /sys && for i; do f=/sys/class/net/$i/queues/rx-0/rps_cpus; "
    script += f"[ ! -e $f ] || echo {_cpu_mask(os.cpu_count() or 1)} > $f; done"
    run_in(namespace, ["unshare", "--mount", "sh", "-ec", script, "sh", *interfaces])


def _cpu_mask(count: int) -> str:
    """Write a mask of the first processors as the kernel reads it: groups of eight hexadecimal digits.

    >>> _cpu_mask(2), _cpu_mask(36)
    ('3', '0000000f,ffffffff')
    """
    digits = f"{(1 << count) - 1:x}"
    if len(digits) <= 8:
        return digits
    padded = digits.zfill(-(-len(digits) // 8) * 8)
    return ",".join(padded[i : i + 8] for i in range(0, len(padded), 8))


def _plug_lines(host: Host, cables: list[tuple[str, str, str]]) -> list[str]:
    """Write the `ip` lines that create each cable (interface inside, port at the switch, bridge)."""
    lines = []
    for inside, port, bridge in cables:
        lines += [
            f"link add name {port} type veth peer name {inside} netns {host.namespace}",
            f"link set {port} addrgenmode none",
            f"link set {port} master {bridge}",
            f"link set {port} up",
        ]
    return lines


def _address_lines(host: Host, cables: list[tuple[str, str, str]], other_groups: list[int]) -> list[str]:
    """Write the `ip` lines inside a host; no IPv6 on its links: neighbour discovery would be counted as traffic."""
    lines = ["link set lo up"]
    for inside, _, _ in cables:
        lines += [f"link set {inside} addrgenmode none", f"link set {inside} up"]
    lines += [
        f"address add {host.control_address}/24 dev {CONTROL_INTERFACE}",
        f"address add {host.address}/24 dev {host.interfaces[0]}",
    ]
    return lines + [f"route add 10.64.{g}.0/24 dev {host.interfaces[1]} src {host.address}" for g in other_groups]
