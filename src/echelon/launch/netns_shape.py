"""A link's rate and delay, whether this machine can shape it, and the `tc` lines that do."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from echelon.core.errors import UserError
from echelon.core.units import parse_bits_per_s, parse_seconds
from echelon.launch.netns import COMMAND_TIMEOUT_S

BURST_S = 2.1e-3
MIN_BURST_BYTES = 2 * 1514
QUEUE_BYTES = 16 << 20


@dataclass(frozen=True)
class Link:
    """A link's rate in each direction, and how long each packet is under way in one direction."""

    rate_bits_per_s: float
    delay_s: float = 0.0

    @property
    def burst_bytes(self) -> int:
        """Size of the shaper's token bucket: 2.1 ms of the link, and at least two full Ethernet frames.

        After a pause a bucketful passes at memory speed. A bucket of constant *time* makes that free ride worth 2.1 ms
        on any link; a constant size would carry whole compressed gradients for nothing at 10 Mbit/s, or, if chosen for
        that rate, drop packets at 1 Gbit/s, where this rule gives 256 KiB.
        """
        return max(round(self.rate_bits_per_s / 8 * BURST_S), MIN_BURST_BYTES)


def parse_link(text: str) -> Link:
    """Read a link such as `100mbit`, `1gbit` or `10mbit,20ms`.

    >>> parse_link("10mbit,20ms")
    Link(rate_bits_per_s=10000000.0, delay_s=0.02)

    Raises:
        UserError: the text is not a link.
    """
    rate, comma, delay = text.partition(",")
    try:
        link = Link(parse_bits_per_s(rate), parse_seconds(delay) if comma else 0.0)
    except UserError as error:
        raise UserError(f"link {text!r}: {error} (a link is RATE or RATE,DELAY: 100mbit or 10mbit,20ms)") from error
    if link.rate_bits_per_s < 1e4:
        raise UserError(f"link {text!r}: the rate must be at least 10kbit")
    return link


def check_link(link: Link) -> None:
    """Refuse a link that this machine cannot shape, before anything starts.

    Raises:
        UserError: not root, no iproute2 or nsenter, no namespaces allowed, no `tbf`, or a delay without `netem`.
    """
    if os.geteuid() != 0:
        raise UserError("--link needs root, to create network namespaces: run as root (or with sudo), or leave it out")
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            raise UserError(f"--link needs the command {tool!r}: install the package {package}, or leave --link out")
    words = _try_in_new_namespace(["true"])
    if words is not None:
        raise UserError(f"--link needs the right to create network namespaces (CAP_SYS_ADMIN); here: {words}")
    shapers = ["tbf rate 1mbit burst 10kb limit 1mb", *(["netem delay 1ms"] if link.delay_s > 0 else [])]
    for shaper in shapers:
        words = _try_in_new_namespace(["tc", "qdisc", "add", "dev", "lo", "root", *shaper.split()])
        if words is not None:
            name = shaper.split()[0]
            fix = "leave the delay out of --link" if name == "netem" else "leave --link out"
            raise UserError(f"this kernel cannot shape with {name} ({words}): load the module sch_{name}, or {fix}")


def _try_in_new_namespace(command: list[str]) -> str | None:
    """Run a command in a namespace that ends with it; return None, or why it failed in one line."""
    done = subprocess.run(
        ["unshare", "--net", "--", *command], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode == 0:
        return None
    words = (done.stderr or done.stdout).strip().splitlines()
    return words[0] if words else f"exit code {done.returncode}"


def shaper_lines(interface: str, link: Link, *, with_delay: bool) -> list[str]:
    """Write the `tc` lines that shape what leaves an interface."""
    limit_bytes = QUEUE_BYTES + link.burst_bytes
    bucket = f"tbf rate {link.rate_bits_per_s:.0f}bit burst {link.burst_bytes}b limit {limit_bytes}b"
    if not (with_delay and link.delay_s):
        return [f"qdisc add dev {interface} root handle 1: {bucket}"]
    limit_packets = limit_bytes // 1000 + round(2 * link.rate_bits_per_s / 8 * link.delay_s / 1000)
    delay = f"netem delay {link.delay_s * 1e6:.0f}us limit {limit_packets}"
    return [
        f"qdisc add dev {interface} root handle 1: {delay}",
        f"qdisc add dev {interface} parent 1:1 handle 2: {bucket}",
    ]
