"""Three hosts on this machine: network namespaces on one bridge, each with an sshd and a disk of its own beside /."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HOSTS = ("a", "b", "c")
PROGRAMS = ("sshd", "ssh", "ssh-keygen", "ip", "unshare")
DEADLINE_S = 60.0
_SERVER = """\
ListenAddress {address}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
MaxStartups 100
SetEnv OMP_NUM_THREADS=1 XDG_STATE_HOME={folder}/state-{host} XDG_CACHE_HOME={folder}/cache-{host}
"""
_CLIENT = """\
Host {host}
  HostName {address}
  User root
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
"""


def no_hosts() -> str:
    """Return why no such hosts can be had here; empty: they can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"no sshd here ({', '.join(absent)}): apt-get install openssh-server iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    made = subprocess.run(["unshare", "-nm", "true"], capture_output=True, check=False)
    return "" if made.returncode == 0 else "no network namespaces here"


@dataclass
class SshHosts:
    """Hosts a, b and c; ended by `ssh_hosts`."""

    folder: Path
    servers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def disk(self) -> Path:
        """A folder that is another one on each host."""
        return self.folder / "disk"

    def place(self, *hosts: str, more: str = "") -> str:
        """Return the spec of a place with these hosts."""
        return f'ssh(hosts={"+".join(hosts)}, options="-F {self.folder}/config"{more})'

    def _name(self, host: str) -> str:
        return f"ech{os.getpid()}{host}"

    def _subnet(self) -> str:
        return f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"

    def address(self, host: str) -> str:
        """Return a host's address."""
        return f"{self._subnet()}.{HOSTS.index(host) + 2}"

    def start(self) -> None:
        """Make the network, and start all servers."""
        bridge = self._name("")
        _ip("link", "add", bridge, "type", "bridge")
        _ip("address", "add", f"{self._subnet()}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        Path("/run/sshd").mkdir(exist_ok=True)
        self.disk.mkdir()
        for name in ("key", "host_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        texts = [_CLIENT.format(host=host, address=self.address(host), folder=self.folder) for host in HOSTS]
        (self.folder / "config").write_text("".join(texts))
        for host in HOSTS:
            name = self._name(host)
            (self.folder / f"disk-{host}").mkdir()
            _ip("netns", "add", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", name, "master", bridge, "up")
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "route", "add", "default", "via", f"{self._subnet()}.1")
            server = _SERVER.format(address=self.address(host), folder=self.folder, host=host)
            (self.folder / f"sshd-{host}").write_text(server)
            self.begin(host)

    def begin(self, host: str) -> None:
        """Let a host begin, with no process of before; wait until it answers."""
        sshd, config = shutil.which("sshd"), self.folder / f"sshd-{host}"
        mounted = f"mount --bind {self.folder}/disk-{host} {self.disk} && exec {sshd} -D -e -f {config}"
        command = ["ip", "netns", "exec", self._name(host), "unshare", "-m", "sh", "-c", mounted]
        with (self.folder / f"sshd-{host}.log").open("ab") as log:
            self.servers[host] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        _ip("link", "set", self._name(host), "up")
        ends = time.monotonic() + DEADLINE_S
        while self.ask(host, "true").returncode:
            if time.monotonic() > ends:
                raise AssertionError(f"{host} does not answer: {(self.folder / f'sshd-{host}.log').read_text()}")
            time.sleep(0.1)

    def ask(self, host: str, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a host."""
        ssh = ["ssh", "-F", str(self.folder / "config"), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", host]
        return subprocess.run([*ssh, command], capture_output=True, text=True, timeout=60, check=False)

    def fail(self, host: str) -> None:
        """Let a host vanish as a machine does that loses its power: its link first, then all that runs there."""
        _ip("link", "set", self._name(host), "down")
        ends = time.monotonic() + DEADLINE_S
        while pids := _ip("netns", "pids", self._name(host)).split():
            for pid in pids:
                _kill(int(pid))
            if time.monotonic() > ends:
                raise AssertionError(f"processes of {host} live on: {pids}")
            time.sleep(0.05)
        server = self.servers.pop(host)
        server.wait(DEADLINE_S)

    def close(self) -> None:
        """End all hosts, and the network."""
        for host in list(self.servers):
            self.fail(host)
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", self._name(host)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", self._name("")], capture_output=True, check=False)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it ended meanwhile
        return


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


@contextmanager
def ssh_hosts(folder: Path) -> Iterator[SshHosts]:
    """Give three hosts, for as long as the block takes."""
    hosts = SshHosts(folder)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.close()
