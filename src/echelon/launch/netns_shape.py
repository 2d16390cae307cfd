"""Whether this machine can shape a link, and the `tc` lines that do."""

from __future__ import annotations

import os
import shutil
import subprocess

from echelon.core.errors import UserError
from echelon.core.link import Link
from echelon.launch.netns import COMMAND_TIMEOUT_S

QUEUE_BYTES = 16 << 20


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


def shaper_lines(interface: str, link: Link, *, with_delay: bool, change: bool = False) -> list[str]:
    """Write the `tc` lines that shape what leaves an interface; `change`: of one that is shaped already."""
    verb = "change" if change else "add"
    limit_bytes = QUEUE_BYTES + link.burst_bytes
    bucket = f"tbf rate {link.rate_bits_per_s:.0f}bit burst {link.burst_bytes}b limit {limit_bytes}b"
    if not (with_delay and link.delay_s):
        return [f"qdisc {verb} dev {interface} root handle 1: {bucket}"]
    limit_packets = limit_bytes // 1000 + round(2 * link.rate_bits_per_s / 8 * link.delay_s / 1000)
    delay = f"netem delay {link.delay_s * 1e6:.0f}us limit {limit_packets}"
    return [
        f"qdisc {verb} dev {interface} root handle 1: {delay}",
        f"qdisc {verb} dev {interface} parent 1:1 handle 2: {bucket}",
    ]
