"""Links as text, the shaper's bucket, and the refusals: nothing here creates a namespace."""

from __future__ import annotations

import pickle

import pytest

from echelon.core.errors import UserError
from echelon.launch import netns_shape
from echelon.launch.link import Host, Link, LinkCounters, ShapedNetwork, check_link, parse_link
from echelon.launch.netns_shape import shaper_lines


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("100mbit", Link(1e8)),
        ("1gbit", Link(1e9)),
        ("10mbit,20ms", Link(1e7, 0.02)),
        (" 2.5 Gbit , 1 ms ", Link(2.5e9, 1e-3)),
    ],
)
def test_links_are_read(text: str, link: Link) -> None:
    assert parse_link(text) == link


@pytest.mark.parametrize(
    "text", ["", "fast", "100", "100mb", "100mbit,", "100mbit,20", "100mbit 20ms", "-1mbit", "0mbit"]
)
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_link(text)
    assert repr(text) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_bucket_is_a_constant_time_of_the_link() -> None:
    assert parse_link("1gbit").burst_bytes >= 256 * 1024
    for rate in ("100mbit", "1gbit", "10gbit"):
        link = parse_link(rate)
        assert link.burst_bytes * 8 / link.rate_bits_per_s == pytest.approx(2.1e-3, rel=1e-3)
    assert parse_link("1mbit").burst_bytes == 2 * 1514


def test_the_delay_is_added_where_packets_leave_the_host_alone() -> None:
    link = parse_link("10mbit,20ms")
    inside = shaper_lines("eth0", link, with_delay=True)
    assert [word in inside[0] for word in ("root", "netem", "20000us")] == [True] * 3
    assert [word in inside[1] for word in ("parent 1:1", "tbf", "rate 10000000bit")] == [True] * 3
    assert len(shaper_lines("host0", link, with_delay=False)) == 1


def test_without_root_the_refusal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UserError, match="--link needs root"):
        ShapedNetwork(2, parse_link("100mbit"))


def test_without_iproute2_the_refusal_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(UserError, match="'tc': install the package iproute2"):
        check_link(parse_link("100mbit"))


@pytest.mark.parametrize(
    ("text", "failing", "words"),
    [
        ("10mbit,20ms", "netem", "cannot shape with netem .*leave the delay out"),
        ("10mbit", "tbf", "cannot shape with tbf .*leave --link out"),
        ("10mbit", "true", "the right to create network namespaces .*kind is unknown"),
    ],
)
def test_what_the_kernel_lacks_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, text: str, failing: str, words: str
) -> None:
    def lacking(command: list[str]) -> str | None:
        return "Specified qdisc kind is unknown." if failing in command else None

    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(netns_shape, "_try_in_new_namespace", lacking)
    with pytest.raises(UserError, match=words) as refusal:
        check_link(parse_link(text))
    assert "\n" not in str(refusal.value)


def test_a_kernel_without_netem_takes_links_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(netns_shape, "_try_in_new_namespace", lambda command: "unknown" if "netem" in command else None)
    check_link(parse_link("10mbit"))


def test_impossible_shapes_are_refused() -> None:
    link = parse_link("100mbit")
    with pytest.raises(UserError, match="1 to 250 workers, not 251"):
        ShapedNetwork(251, link)
    with pytest.raises(ValueError, match="do not divide into 2 groups"):
        ShapedNetwork(3, link, groups=2, inner=link)
    with pytest.raises(ValueError, match="inner links"):
        ShapedNetwork(4, link, groups=2)


def test_counters_are_compared_without_headers() -> None:
    counted = LinkCounters(10_660, 132, 10, 2, 0) - LinkCounters(0, 66, 0, 1, 0)
    assert (counted.sent_payload_bytes, counted.received_payload_bytes) == (10_000, 0)


def test_a_host_can_be_handed_to_a_worker() -> None:
    host = Host("/proc/1/fd/5", "/proc/1/fd/4", "10.64.0.1", "10.130.7.1", ("eth0",), ("host0",))
    assert pickle.loads(pickle.dumps(host)) == host
    assert host.command_prefix[:3] == ["nsenter", "--net=/proc/1/fd/5", "--"]
    assert "GLOO_SOCKET_IFNAME=eth0" in host.command_prefix
    assert {"NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1"} <= set(host.command_prefix)  # nothing goes beside the link
