"""Machines that meet on loopback: orders come over an encrypted socket, and only to who has the run's secret."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.core.address import Address
from echelon.core.errors import UserError
from echelon.launch.culprit import Living, Observed
from echelon.launch.machines import FirstMachine, OtherMachine, StateReport
from echelon.launch.meeting import Arrival, AskLater, Meeting, SecretSource, join_meeting, why_silent
from echelon.launch.rounds import Continue, Finished, Go, Left, Order, Over, Ready, RoundSettings, Running
from echelon.messages.identity import PUBLIC_SECRET, make_secret, read_secret, write_secret
from echelon.observe.notes import Note
from echelon.observe.stacks import Stack, StackFrame

TERMS = RoundSettings(2, 2, 1, arrival_s=30.0, return_s=5.0)
ARRIVAL = Arrival("first", 1, {"--lr": "0.1"})
DEADLINE_S = 20.0


@pytest.fixture
def rendezvous() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return Address("127.0.0.1", free.getsockname()[1])


@pytest.fixture
def first(tmp_path: Path, rendezvous: Address) -> Iterator[FirstMachine]:
    machine = FirstMachine(ARRIVAL, TERMS, lambda name: f"meeting:{rendezvous}", tmp_path)
    with Meeting(rendezvous, make_secret(tmp_path), StateReport, machine.answer):
        yield machine
        machine.close("the test ends")


def _wait(order: Callable[[], Order], kind: type[Order]) -> Order:
    ends = time.monotonic() + DEADLINE_S
    while not isinstance(answer := order(), kind):
        assert time.monotonic() < ends, answer
        time.sleep(0.01)
    return answer


def test_machines_meet_run_a_round_and_end_together(tmp_path: Path, rendezvous: Address, first: FirstMachine) -> None:
    other = OtherMachine(rendezvous, SecretSource(tmp_path), replace(ARRIVAL, machine="other"), TERMS, tmp_path)
    assert isinstance(first.order(Ready()), Continue)
    theirs = _wait(lambda: other.order(Ready()), Go)
    ours = _wait(lambda: first.order(Ready()), Go)
    assert isinstance(ours, Go) and isinstance(theirs, Go)
    assert theirs.round.environment == ours.round.environment
    assert (ours.round.first_rank, theirs.round.first_rank) == (0, 1)
    assert isinstance(first.order(Running(1)), Continue) and isinstance(other.order(Running(1)), Continue)
    first.saved(2)
    ends = time.monotonic() + DEADLINE_S
    while not (told := other.checkpoints_told()):
        assert time.monotonic() < ends
        time.sleep(0.01)
    assert told == 2 and other.checkpoints_told() == 0, "so that restarts come back there, too"
    assert isinstance(first.order(Finished(1, stopped=True)), Continue)
    assert _wait(lambda: other.order(Finished(1, stopped=True)), Over) == Over("stopped")
    assert first.order(Finished(1, stopped=True)) == Over("stopped")
    other.close()


def test_a_machine_that_is_asked_to_stop_before_it_begins_stops_the_run(
    tmp_path: Path, rendezvous: Address, first: FirstMachine
) -> None:
    other = OtherMachine(rendezvous, SecretSource(tmp_path), replace(ARRIVAL, machine="other"), TERMS, tmp_path)
    _wait(lambda: other.order(Ready()), Go)
    other.order(Left(stops=True))
    other.close()
    assert _wait(lambda: first.order(Ready()), Over) == Over("stopped")


def test_another_setting_is_refused_and_another_secret_is_not_answered(
    tmp_path: Path, rendezvous: Address, first: FirstMachine
) -> None:
    other = OtherMachine(rendezvous, SecretSource(tmp_path), Arrival("other", 1, {"--lr": "0.2"}), TERMS, tmp_path)
    with pytest.raises(UserError, match=r"--lr 0.2, the first machine with 0.1"):
        _wait(lambda: other.order(Ready()), Go)
    other.close()
    (tmp_path / "foreign").mkdir()
    assert make_secret(tmp_path / "foreign") != read_secret(tmp_path)
    foreign = OtherMachine(
        rendezvous, SecretSource(tmp_path / "foreign"), replace(ARRIVAL, machine="foreign"), TERMS, tmp_path
    )
    ends = time.monotonic() + DEADLINE_S
    while not isinstance(order := foreign.order(Ready()), Continue) or "secret" not in order.reason:
        assert time.monotonic() < ends
    foreign.close()
    assert isinstance(first.order(Ready()), Continue)


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken, pytest.raises(UserError, match="taken by another program"):
        Meeting(
            Address("127.0.0.1", taken.getsockname()[1]), make_secret(tmp_path), Arrival, lambda arrival: AskLater()
        )


def _silent(line: socket.socket) -> None:
    line.recv(1)


def _http(line: socket.socket) -> None:
    line.recv(1)
    line.sendall(b"HTTP/1.0 400 Bad Request\r\nConnection: close\r\n\r\n<html>no</html>")


def _ssh(line: socket.socket) -> None:
    line.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
    line.recv(1)


def _tls(line: socket.socket) -> None:
    with ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).wrap_socket(line, server_side=True) as secured:
        secured.sendall(secured.recv(1))


@contextmanager
def _service(talk: Callable[[socket.socket], None]) -> Iterator[Address]:
    """A service of others on loopback: `talk` has each connection, in a thread of its own."""

    def serve(line: socket.socket) -> None:
        with line, suppress(OSError):
            line.settimeout(DEADLINE_S)
            talk(line)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield Address("127.0.0.1", listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(DEADLINE_S)


@pytest.mark.parametrize("talk", [_silent, *(pytest.param(t, marks=pytest.mark.long) for t in (_http, _ssh, _tls))])
def test_a_service_of_others_at_the_rendezvous_is_told_in_time(
    tmp_path: Path, talk: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # of no concern to a meeting
    with _service(talk) as rendezvous:
        other = OtherMachine(rendezvous, SecretSource(tmp_path, True), ARRIVAL, replace(TERMS, arrival_s=2.0), tmp_path)
        began_s = time.monotonic()
        with pytest.raises(UserError, match=r"another service, no run: .* \(waited 2"):
            _wait(lambda: other.order(Ready()), Go)
        assert (
            time.monotonic() - began_s < 20
        )  # a busy machine wakes late; a message that waits for the service never ends
        other.close()
        assert "another service" in why_silent(rendezvous, SecretSource(tmp_path))


def test_where_nothing_listens_that_is_told(tmp_path: Path, rendezvous: Address) -> None:
    said: list[str] = []
    with pytest.raises(
        UserError, match=r"--rendezvous .*: nothing answers there \(Connection refused\).*--timeout says how long"
    ):
        join_meeting(rendezvous, SecretSource(tmp_path, True), ARRIVAL, 5.0, said.append)
    assert len(said) == 1 and "waiting for the first machine" in said[0]


def test_what_very_many_processes_are_at_fits_a_report(
    tmp_path: Path, rendezvous: Address, first: FirstMachine
) -> None:
    """A report that is too long is dropped, and its machine would count as silent."""
    other = OtherMachine(rendezvous, SecretSource(tmp_path), replace(ARRIVAL, machine="other"), TERMS, tmp_path)
    stack = Stack(tuple(StackFrame(f"/v/site-packages/{'model/' * 12}{i}.py", i, "forward") for i in range(100)))
    note = Note("forward", 1, 0.0, 7, 100, 1, True, False)
    other.share([Observed(Living(f"rank{i}", "h", i, i), note, 60.0, stack, is_stopped=i == 999) for i in range(1000)])
    assert isinstance(first.order(Ready()), Continue)
    _wait(lambda: other.order(Ready()), Go)
    told = first.elsewhere().observed
    assert len(told) > 50 and any(o.is_stopped for o in told)
    other.close()


def test_on_a_trusted_network_machines_meet_without_a_secret(tmp_path: Path, rendezvous: Address) -> None:
    machine = FirstMachine(ARRIVAL, TERMS, lambda name: f"meeting:{rendezvous}", tmp_path)
    with Meeting(rendezvous, PUBLIC_SECRET, StateReport, machine.answer):
        other = OtherMachine(
            rendezvous, SecretSource(tmp_path, True), replace(ARRIVAL, machine="other"), TERMS, tmp_path
        )
        machine.order(Ready())
        assert isinstance(_wait(lambda: other.order(Ready()), Go), Go)
        other.close()  # before the first one, which waits until the others know
        machine.close("the test ends")


def test_a_secret_that_anybody_knows_is_not_used_again(tmp_path: Path) -> None:
    write_secret(tmp_path, PUBLIC_SECRET)
    secret = make_secret(tmp_path)
    assert secret != PUBLIC_SECRET and read_secret(tmp_path) == secret == make_secret(tmp_path)
    assert [file.stat().st_mode & 0o777 for file in tmp_path.iterdir()] == [0o600]
