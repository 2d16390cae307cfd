"""Slow links on one machine: hosts are network namespaces, joined by bridges and shaped by the kernel. Needs root.

    with ShapedNetwork(2, parse_link("100mbit")) as network:
        ...  # start worker i with network.hosts[i]; it calls enter(host) before it opens a socket

Every host has a shaped data link and, apart from it, an unshaped control link to the machine itself (`host_address`,
for a rendezvous store), so that the counters of the data link hold the training's traffic and nothing else.
"""

from __future__ import annotations

from types import TracebackType

from echelon.core.errors import UserError
from echelon.core.link import Link, parse_link
from echelon.launch.netns import (
    COMMAND_TIMEOUT_S,
    Host,
    LinkCounters,
    Namespaces,
    enter,
    read_counters,
    wait_until_gone,
)
from echelon.launch.netns_shape import check_link
from echelon.launch.netns_topology import Topology, build_switch, claim_control_network, connect_host, shape_host

__all__ = ["Host", "Link", "LinkCounters", "ShapedNetwork", "check_link", "enter", "parse_link", "read_counters"]

MAX_HOSTS = 250


class ShapedNetwork:
    """A context manager: hosts joined by shaped links, gone when it closes or when its process ends, however it does.

    With one group, every host's link leads to one switch. With several, hosts of one group share a switch behind
    `inner` links, and each host has a second link, `link`, to the switch between groups (as machines with one network
    card for each processor have); traffic takes the second one exactly when it leaves the group. Both directions are
    shaped at both ends. The delay is added once on each way, where a packet leaves its host.

    Networks do not see each other: data addresses exist only inside, the control network is a /24 of 10.128.0.0/9 that
    no other route of the machine covers, claimed through the name of the interface `ech-A-B`, which is unique.

    Attributes:
        hosts: one for each worker, in order; `addresses` are theirs.
        host_address: this machine's address on the control network, reachable from every host.

    Example:
        >>> with ShapedNetwork(2, parse_link("100mbit")) as network:        # doctest: +SKIP
        ...     subprocess.run([*network.command_prefix(0), "ping", "-c1", network.addresses[1]])
    """

    def __init__(self, count: int, link: Link, groups: int = 1, inner: Link | None = None) -> None:
        """Check what can be checked; nothing is created before the `with`.

        Raises:
            UserError: this machine cannot shape such links (see `check_link`), or too many hosts.
            ValueError: groups that do not divide the hosts, or groups without `inner` links.
        """
        if not 1 <= count <= MAX_HOSTS:
            raise UserError(f"--link: a shaped network has 1 to {MAX_HOSTS} workers, not {count}")
        if groups < 1 or count % groups:
            raise ValueError(f"{count} hosts do not divide into {groups} groups")
        if (groups > 1) != (inner is not None):
            raise ValueError("inner links are given exactly when there are several groups")
        for each in (link, inner):
            if each is not None:
                check_link(each)
        self._topology = Topology(count, link, groups, inner)
        self._namespaces: Namespaces | None = None
        self._interface = ""
        self.hosts: list[Host] = []
        self.host_address = ""

    @property
    def addresses(self) -> list[str]:
        """Addresses on the shaped data links, by host."""
        return [host.address for host in self.hosts]

    def command_prefix(self, i: int) -> list[str]:
        """What to put before a command so that it runs on host `i`."""
        return self.hosts[i].command_prefix

    def enter(self, i: int) -> None:
        """Move the calling thread onto host `i` (see the function `enter`, which needs only the host)."""
        enter(self.hosts[i])

    def counters(self, i: int, interface: str | None = None) -> LinkCounters:
        """Read what the kernel counted on the data links of host `i`, or on one of them (`hosts[i].interfaces`)."""
        return read_counters(self.hosts[i], interface)

    def reshape(self, link: Link) -> None:
        """Give all data links another rate, while they are in use; there is one group, and delays stay none.

        Raises:
            ValueError: there are several groups, or delays.
        """
        if self._topology.inner is not None or self._topology.link.delay_s or link.delay_s:
            raise ValueError("links of several groups, or with delays, keep what they were built with")
        for host in self.hosts:
            shape_host(host, (link,), change=True)

    def __enter__(self) -> ShapedNetwork:
        self._namespaces = Namespaces(1 + self._topology.count)
        paths = self._namespaces.paths
        try:
            build_switch(paths[0], self._topology)
            control = claim_control_network(paths[0])
            self._interface, self.host_address = control.interface, control.host_address
            self.hosts = [connect_host(i, paths, control, self._topology) for i in range(self._topology.count)]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the network away; processes that still live on a host are asked to end, then killed."""
        if self._namespaces is not None:
            self._namespaces.close()
            self._namespaces = None
        if self._interface:
            wait_until_gone(self._interface, COMMAND_TIMEOUT_S)
            self._interface = ""
