"""Real object stores on the loopback: SeaweedFS, which honours conditions, and rclone, which ignores them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KEY, SECRET = "loopback", "not-a-secret"
_UP_S = 60.0


def binary(name: str) -> str | None:
    """Return the path of a program of the group `clusters`, beside this interpreter or on the path; None: absent."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def free_port() -> int:
    """Return a port that is free, and so is the one 10000 above it, which SeaweedFS takes too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1]) - 10000
            if port < 1024:
                continue
            try:
                other.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@dataclass
class ObjectStore:
    """A store's process, and how it is reached; it keeps its data when it is killed and started again."""

    command: list[str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs in its environment."""
        endpoint = f"http://127.0.0.1:{self.port}"
        region = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": endpoint, **region}

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + _UP_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.command[0]} does not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        """End it at once, as a machine's death does."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def seaweedfs(folder: Path) -> Iterator[ObjectStore]:
    """Run a SeaweedFS with one bucket, `runs`."""
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    identity = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    command = [
        str(binary("weed")), "server", f"-dir={folder}", "-ip=127.0.0.1", "-s3", "-s3.port.iceberg=0",
        "-s3.port.lance=0", f"-s3.config={folder}/s3.json",
        "-volume.max=0", "-master.volumeSizeLimitMB=64", *(f"-{name}.port={port}" for name, port in ports.items()),
    ]  # fmt: skip
    yield from _running(ObjectStore(command, ports["s3"], folder / "log"))


@contextmanager
def rclone(folder: Path) -> Iterator[ObjectStore]:
    """Run `rclone serve s3` over a folder, with one bucket, `runs`."""
    port = free_port()
    (folder / "served" / "runs").mkdir(parents=True, exist_ok=True)
    command = [
        str(binary("rclone")), "serve", "s3", f"--addr=127.0.0.1:{port}", f"--auth-key={KEY},{SECRET}",
        f"--config={folder}/rclone.conf", str(folder / "served"),
    ]  # fmt: skip
    yield from _running(ObjectStore(command, port, folder / "log"))


def _running(store: ObjectStore) -> Iterator[ObjectStore]:
    store.start()
    before = dict(os.environ)
    os.environ.update(store.environment)
    try:
        _make_bucket()
        yield store
    finally:
        os.environ.clear()
        os.environ.update(before)
        store.kill()


def _make_bucket() -> None:
    """Make the bucket, once the store takes requests."""
    import s3fs

    deadline = time.monotonic() + _UP_S
    while True:
        files = s3fs.S3FileSystem(skip_instance_cache=True)
        try:
            files.makedirs("runs", exist_ok=True)
            files.pipe_file("runs/up", b"1")
            return
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)
