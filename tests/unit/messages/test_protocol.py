"""Messages: what does not fit is refused, whatever it is; repeated ones are known."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest
import zmq

from echelon.core.errors import UserError
from echelon.messages.framing import VERSION, Message, ReplayGuard, decode, encode_header
from echelon.messages.identity import SECRET_VARIABLE, derive_keys, make_secret, read_secret
from echelon.messages.plain import Malformed
from echelon.ps.blob import pack_state, unpack_state
from echelon.ps.messages import TO_PS_SERVER, Pull

RUN = b"12345678"
PULL: dict[str, Any] = {"key": 1, "version": 2, "exact": False, "full": False, "tag": 0}


def raw(*values: Any) -> list[zmq.Frame]:
    return [zmq.Frame(msgpack.packb(list(values)))]


def test_round_trip() -> None:
    message = Message(Pull(**PULL), "worker0", 5, 6)
    read = decode(RUN, [zmq.Frame(encode_header(RUN, message))], TO_PS_SERVER)
    assert (read.content, read.sender, read.session, read.sequence) == (Pull(**PULL), "worker0", 5, 6)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "frames"),
        ([zmq.Frame(b"\xc1")], "header"),
        ([zmq.Frame(b"x" * (1 << 20))], "oversized"),
        (raw(1, 2), "header"),
        (raw(VERSION + 1, RUN, 6, "w", 1, 1, PULL), "version"),
        (raw(VERSION, b"other run", 6, "w", 1, 1, PULL), "run"),
        (raw(VERSION, RUN, 999, "w", 1, 1, PULL), "kind"),
        (raw(VERSION, RUN, 6, "w" * 100, 1, 1, PULL), "sender"),
        (raw(VERSION, RUN, 6, "w", -1, 1, PULL), "range"),
        (raw(VERSION, RUN, 6, "w", 1, 1, {}), "fields"),
        (raw(VERSION, RUN, 6, "w", 1, 1, {**PULL, "key": True}), "type"),
        (raw(VERSION, RUN, 6, "w", 1, 1, {**PULL, "key": "1"}), "type"),
        (raw(VERSION, RUN, 6, "w", 1, 1, {**PULL, "more": 1}), "fields"),
        ([*raw(VERSION, RUN, 6, "w", 1, 1, PULL), zmq.Frame(b"extra")], "frames"),
    ],
)
def test_malformed(frames: list[zmq.Frame], reason: str) -> None:
    with pytest.raises(Malformed) as caught:
        decode(RUN, frames, TO_PS_SERVER)
    assert caught.value.reason == reason


def test_mutated_headers_never_raise_anything_else() -> None:
    draw = random.Random(0)
    sound = encode_header(RUN, Message(Pull(**PULL), "worker0", 5, 6))
    for _ in range(3000):
        mutated = bytearray(sound)
        for _ in range(draw.randrange(1, 6)):
            mutated[draw.randrange(len(mutated))] = draw.randrange(256)
        try:
            decode(RUN, [zmq.Frame(bytes(mutated[: draw.randrange(1, len(mutated) + 1)]))], TO_PS_SERVER)
        except Malformed:
            continue


def test_repeated_messages_are_known() -> None:
    guard = ReplayGuard()
    guard.admit(Message(Pull(**PULL), "a", 1, 5))
    guard.admit(Message(Pull(**PULL), "b", 1, 5))
    with pytest.raises(Malformed, match="replayed"):
        guard.admit(Message(Pull(**PULL), "a", 1, 5))


def test_states_are_checked() -> None:
    import torch

    state = {"value": torch.arange(3.0), "optimizer": {0: {"step": torch.tensor(2.0), "m": torch.ones(3)}}, "n": 1}
    meta, frames = pack_state(state)
    read = unpack_state(meta, frames)
    assert torch.equal(read["optimizer"][0]["m"], torch.ones(3)) and read["n"] == 1
    for bad in (b"", b"[1", b"{}", meta[:-1], b'{"dict": [["value", {"tensor": "v", "dtype": "x", "shape": [1]}]]}'):
        with pytest.raises(ValueError, match="state"):
            unpack_state(bad, frames)
    with pytest.raises(ValueError, match="state"):
        unpack_state(meta, frames[:1])


def test_secrets(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(UserError, match="secret"):
        read_secret(tmp_path)
    secret = make_secret(tmp_path)
    assert make_secret(tmp_path) == read_secret(tmp_path) == secret
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert secret.hex() not in repr(derive_keys(secret))
    monkeypatch.setenv(SECRET_VARIABLE, "beef")
    with pytest.raises(UserError, match=SECRET_VARIABLE):
        read_secret(tmp_path)
