"""Shaped networks as the kernel makes them: rates, counters, several at once, and nothing left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from echelon.core.errors import UserError
from echelon.launch.link import Host, ShapedNetwork, check_link, enter, parse_link, read_counters
from echelon.launch.netns import wait_until_gone
from tests.ranks.links import NEEDS_LINKS
from tests.ranks.spawn import Rank, run_ranks

DEADLINE_S = 20.0


pytestmark = NEEDS_LINKS


def _transfer(rank: Rank, hosts: list[Host], to: int, n_bytes: int) -> float:
    """Rank 0 sends to rank `to` and waits for its word; returns the seconds it took (others: 0)."""
    enter(hosts[rank.index])
    ready = rank.folder / "ready"
    if rank.index == to:
        with socket.create_server((hosts[to].address, 5000)) as server:
            ready.touch()
            server.settimeout(DEADLINE_S)
            connection, _ = server.accept()
            with connection:
                left = n_bytes
                while left:
                    left -= len(connection.recv(1 << 20))
                connection.sendall(b"k")
    if rank.index == 0:
        deadline = time.monotonic() + DEADLINE_S
        while not ready.exists():
            assert time.monotonic() < deadline
        with socket.create_connection((hosts[to].address, 5000), timeout=DEADLINE_S) as connection:
            start = time.perf_counter()
            connection.sendall(bytes(n_bytes))
            assert connection.recv(1) == b"k"
            return time.perf_counter() - start
    return 0.0


@pytest.mark.parametrize(("rate", "n_bytes"), [("10mbit", 200_000), ("100mbit", 3_000_000), ("1gbit", 30_000_000)])
def test_a_link_carries_its_rate_and_drops_nothing(rate: str, n_bytes: int) -> None:
    link = parse_link(rate)
    with ShapedNetwork(2, link) as network:
        seconds = run_ranks(_transfer, 2, network.hosts, 1, n_bytes, backend=None)[0]
        sent, received = network.counters(0), network.counters(1)
    # Two shapers in a row: two buckets may pass for nothing, and no more.
    assert seconds >= (n_bytes - 2 * link.burst_bytes) * 8 / link.rate_bits_per_s
    assert seconds < 8 * n_bytes * 8 / link.rate_bits_per_s  # near 1.06 times on an idle machine
    assert sent.sent_payload_bytes == pytest.approx(n_bytes, rel=0.01)
    assert received.received_payload_bytes == pytest.approx(n_bytes, rel=0.01)
    assert sent.dropped == received.dropped == 0


def test_a_link_takes_another_rate_while_it_is_there() -> None:
    slow, n_bytes = parse_link("10mbit"), 200_000
    with ShapedNetwork(2, parse_link("1gbit")) as network:
        network.reshape(slow)
        seconds = run_ranks(_transfer, 2, network.hosts, 1, n_bytes, backend=None)[0]
        with pytest.raises(ValueError, match="delays"):
            network.reshape(parse_link("10mbit,20ms"))
    assert (
        (n_bytes - 2 * slow.burst_bytes) * 8 / slow.rate_bits_per_s <= seconds < 8 * n_bytes * 8 / slow.rate_bits_per_s
    )


def _sum_over_gloo(rank: Rank, hosts: list[Host], store_address: str, port: int) -> tuple[float, int]:
    enter(hosts[rank.index])
    with socket.create_server(("127.0.0.1", 0)) as own:  # loopback is up inside
        socket.create_connection(own.getsockname(), timeout=DEADLINE_S).close()
    store = dist.TCPStore(store_address, port, rank.world_size, is_master=False, timeout=rank.timeout)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.world_size, timeout=rank.timeout)
    x = torch.full((100_000,), 1.0 + rank.index)
    dist.all_reduce(x)
    return float(x.mean()), read_counters(hosts[rank.index]).sent_payload_bytes


def test_gloo_meets_at_a_store_outside_and_its_bytes_are_counted_apart_from_the_stores() -> None:
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    with ShapedNetwork(3, parse_link("100mbit")) as network:
        results = run_ranks(_sum_over_gloo, 3, network.hosts, network.host_address, store.port, backend=None)
    assert [value for value, _ in results] == [6.0, 6.0, 6.0]
    for _, sent_bytes in results:
        assert sent_bytes == pytest.approx(2 * 2 / 3 * 400_000, rel=0.05)


@pytest.mark.parametrize(("to", "interface", "rate"), [(1, "eth0", "100mbit"), (2, "eth1", "10mbit")])
def test_between_groups_the_slow_link_is_taken_and_inside_the_fast_one(to: int, interface: str, rate: str) -> None:
    n_bytes = 200_000
    with ShapedNetwork(4, parse_link("10mbit"), groups=2, inner=parse_link("100mbit")) as network:
        seconds = run_ranks(_transfer, 4, network.hosts, to, n_bytes, backend=None)[0]
        assert network.counters(0, interface).sent_payload_bytes == pytest.approx(n_bytes, rel=0.01)
        assert network.counters(0).sent_payload_bytes == pytest.approx(n_bytes, rel=0.01)
    link = parse_link(rate)
    assert (n_bytes - 2 * link.burst_bytes) * 8 / link.rate_bits_per_s <= seconds
    assert seconds < 8 * n_bytes * 8 / link.rate_bits_per_s


OWNER = """
import json, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
from echelon.launch.link import ShapedNetwork, parse_link
with ShapedNetwork(2, parse_link("100mbit")) as network:
    command = [*network.command_prefix(0), sys.executable, "-c", IGNORE + "print('up'); time.sleep(600)"]
    inside = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    inside.stdout.readline()
    holder = int(network.hosts[0].namespace.split("/")[2])
    report = {"host_address": network.host_address, "interface": network._interface, "processes": [holder, inside.pid]}
    print(json.dumps(report), flush=True)
    if sys.stdin.readline().startswith("raise"):
        raise RuntimeError("planned")
"""


def _start_owner(ignore: str = "") -> tuple[subprocess.Popen[str], dict]:
    prelude = f"IGNORE = {'import signal, time, sys; sys.stdout.reconfigure(line_buffering=True); ' + ignore!r}\n"
    owner = subprocess.Popen(
        [sys.executable, "-c", prelude + textwrap.dedent(OWNER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    return owner, json.loads(owner.stdout.readline())


def _wait_for_end(pids: list[int], timeout_s: float) -> list[int]:
    """Wait until processes have ended; returns those that have not."""
    alive = []
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended, and is reaped
            continue
        ended, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        os.close(fd)
        if not ended:
            alive.append(pid)
    return alive


def _assert_nothing_left(report: dict, named_before: str, timeout_s: float = DEADLINE_S) -> None:
    assert _wait_for_end(report["processes"], timeout_s) == []
    wait_until_gone(report["interface"], timeout_s)
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    assert report["interface"] not in routes
    assert _named_namespaces() == named_before


def _named_namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("end", ["leave", "raise", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_however_the_owner_ends(end: str) -> None:
    named = _named_namespaces()
    owner, report = _start_owner()
    with owner:
        assert owner.stdin is not None
        assert report["interface"] in [name for _, name in socket.if_nameindex()]
        assert _wait_for_end(report["processes"], 0) == report["processes"]
        if end.startswith("SIG"):
            owner.send_signal(signal.Signals[end])
        else:
            owner.stdin.write(end + "\n")
            owner.stdin.flush()
        owner.wait(DEADLINE_S)
        _assert_nothing_left(report, named)


@pytest.mark.slow
def test_a_process_inside_that_ignores_sigterm_is_killed() -> None:
    named = _named_namespaces()
    owner, report = _start_owner(ignore="signal.signal(signal.SIGTERM, signal.SIG_IGN); ")
    with owner:
        owner.kill()
        _assert_nothing_left(report, named)


def test_several_networks_stand_side_by_side() -> None:
    named = _named_namespaces()
    owners = [_start_owner() for _ in range(3)]
    reports = [report for _, report in owners]
    assert len({report["host_address"] for report in reports}) == 3
    owners[0][0].kill()
    owners[0][0].communicate()
    _assert_nothing_left(reports[0], named)
    with ShapedNetwork(2, parse_link("1gbit")) as network:  # the others still stand, and are not in the way
        assert run_ranks(_transfer, 2, network.hosts, 1, 100_000, backend=None)[0] > 0
        assert all(_wait_for_end(report["processes"], 0) for report in reports[1:])
    for owner, report in owners[1:]:
        owner.communicate("leave\n", timeout=DEADLINE_S)
        assert owner.returncode == 0
        _assert_nothing_left(report, named)


def test_a_closed_network_cannot_be_entered() -> None:
    with ShapedNetwork(1, parse_link("1gbit")) as network:
        host = network.hosts[0]
    assert not Path(host.namespace).exists()
    with pytest.raises(RuntimeError, match="is closed"):
        enter(host)


def test_a_delay_needs_netem() -> None:
    link = parse_link("10mbit,20ms")
    try:
        check_link(link)
    except UserError as refusal:
        assert "netem" in str(refusal)
        return
    with ShapedNetwork(2, link) as network:
        assert run_ranks(_transfer, 2, network.hosts, 1, 1_000, backend=None)[0] >= 0.04
