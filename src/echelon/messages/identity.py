"""Who may take part in a run: one secret per run, from which both ends derive their CURVE keys.

A peer without the secret knows neither the key that servers prove nor the one that they accept, so it cannot complete
the handshake: it can neither read nor write.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import zmq
from zmq.utils import z85

from echelon.core.errors import UserError

SECRET_FILE = "secret"
SECRET_VARIABLE = "ECHELON_RUN_SECRET"
_BYTES = 32
PUBLIC_SECRET = blake2b(b"machines on a network that is trusted", digest_size=_BYTES).digest()
"""What machines share that meet without a secret: anybody knows it, and what is read is checked as ever."""
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


@dataclass(frozen=True)
class RunKeys:
    """The CURVE keys of a run and its public name; secrets stay out of what is printed."""

    run_id: bytes
    server_public: bytes
    server_secret: bytes = field(repr=False)
    peer_public: bytes
    peer_secret: bytes = field(repr=False)


def derive_keys(secret: bytes) -> RunKeys:
    """Derive a run's keys from its secret of 32 bytes."""

    def part(name: bytes) -> bytes:
        """Return the 32 bytes that belong to a name."""
        return blake2b(secret, digest_size=_BYTES, person=name).digest()

    server, peer = z85.encode(part(b"server")), z85.encode(part(b"peer"))
    return RunKeys(part(b"run")[:8], zmq.curve_public(server), server, zmq.curve_public(peer), peer)


def make_secret(folder: Path) -> bytes:
    """Return the secret of the run in `folder`, from the environment or its file; make one where there is none.

    One that anybody knows, from a start that went without, is replaced.
    """
    if SECRET_VARIABLE in os.environ or (folder / SECRET_FILE).exists():
        secret = read_secret(folder)
        if secret != PUBLIC_SECRET:
            return secret
    return write_secret(folder, secrets.token_bytes(_BYTES))


def write_secret(folder: Path, secret: bytes) -> bytes:
    """Write a run's secret, for this user alone, over one that is there; returns it."""
    temporary = folder / f".{SECRET_FILE}.{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret.hex())
        file.flush()
        os.fsync(descriptor)
    temporary.replace(folder / SECRET_FILE)
    return secret


def read_secret(folder: Path) -> bytes:
    """Return the run's secret, from the environment variable or from the run's folder.

    Raises:
        UserError: there is none, or it is not one.
    """
    text = os.environ.get(SECRET_VARIABLE)
    origin = SECRET_VARIABLE if text is not None else str(folder / SECRET_FILE)
    if text is None:
        try:
            text = (folder / SECRET_FILE).read_text()
        except OSError as error:
            raise UserError(
                f"cannot read the run's secret {origin}: {error.strerror}; "
                f"copy it from the machine that started the run, or set {SECRET_VARIABLE}"
            ) from None
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) != _BYTES:
        raise UserError(f"{origin} is not a run's secret: {2 * _BYTES} hexadecimal digits are expected")
    return secret


class PeerCheck:
    """Answers ZeroMQ's authentication requests (ZAP, RFC 27): only the run's own peer key is let in.

    Its socket must be polled together with the server's, by the same thread.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: RunKeys) -> None:
        self._allowed = z85.decode(keys.peer_public)
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ZAP_ENDPOINT)

    def answer(self) -> None:
        """Answer the requests that have come."""
        while int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            frames = self.socket.recv_multipart()
            version, request = [*frames, b"", b""][:2]
            allowed = len(frames) == 7 and frames[5] == b"CURVE" and frames[6] == self._allowed
            self.refused += not allowed
            status = [b"200", b"OK", b"peer"] if allowed else [b"400", b"not of this run", b""]
            self.socket.send_multipart([version, request, *status, b""])
