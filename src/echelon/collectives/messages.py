"""Messages of codecs between ranks: all to all, of known or unknown length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.schedule import Ring
from echelon.collectives.transfer import PeerLostError
from echelon.collectives.wire import framing_bytes

_LENGTH_TAG, _BODY_TAG = 1_000_000, 1_000_001
HEADER_BYTES = 8


@dataclass(frozen=True)
class Mailbox:
    """Sends messages between some ranks of a group."""

    group: dist.ProcessGroup
    ring: Ring

    @property
    def size(self) -> int:
        """Ranks that take part."""
        return len(self.ring.members)

    def others(self) -> list[int]:
        """Places among the members of all but this rank, the next one first, so that no rank is everyone's first."""
        return [(self.ring.index + i) % self.size for i in range(1, self.size)]

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> tuple[dict[int, Tensor], int]:
        """Send uint8 1-D messages; return those received, both by place among the members, and the bytes sent.

        Args:
            outgoing: a message for each place that gets one.
            incoming: the bytes of each sender's message, as both know or as `announce` returned.

        Raises:
            PeerLostError: a rank did not answer before the group's timeout.
        """
        device = next((m.device for m in outgoing.values()), torch.device("cpu"))
        received = {p: torch.empty(n, dtype=torch.uint8, device=device) for p, n in incoming.items()}
        return received, self._transfer(outgoing, received, _BODY_TAG)

    def announce(self, outgoing: Mapping[int, Tensor], senders: Iterable[int]) -> tuple[dict[int, int], int]:
        """Tell the length of each outgoing message, 1-D; return the length of each sender's, and the bytes sent."""
        device = next((m.device for m in outgoing.values()), torch.device("cpu"))
        said = {p: torch.tensor([m.numel()], dtype=torch.int64, device=device) for p, m in outgoing.items()}
        heard = {p: torch.empty(1, dtype=torch.int64, device=device) for p in senders}
        sent = self._transfer(said, heard, _LENGTH_TAG)
        return {p: int(n) for p, n in heard.items()}, sent

    def _transfer(self, outgoing: Mapping[int, Tensor], into: Mapping[int, Tensor], tag: int) -> int:
        operations = [
            dist.P2POp(dist.irecv, t, group=self.group, group_peer=self.ring.members[p], tag=tag)
            for p, t in into.items()
            if t.numel()
        ] + [
            dist.P2POp(dist.isend, t, group=self.group, group_peer=self.ring.members[p], tag=tag)
            for p, t in outgoing.items()
            if t.numel()
        ]
        try:
            for work in dist.batch_isend_irecv(operations) if operations else []:
                work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"rank {self.group.rank()} of the group lost one it exchanges with: {error}") from error
        return sum(t.nbytes + framing_bytes(1, t.is_cuda) for t in outgoing.values() if t.numel())


def seal(body: Tensor, usable: bool) -> Tensor:
    """Put the word before a message, uint8 1-D, that says whether it can be used; an unusable one keeps its length."""
    message = torch.empty(HEADER_BYTES + body.numel(), dtype=torch.uint8, device=body.device)
    message[:HEADER_BYTES] = int(usable)
    message[HEADER_BYTES:] = body
    return message


def unsealed(messages: Mapping[int, Tensor]) -> dict[int, tuple[Tensor, bool]]:
    """Return each message's body, uint8 1-D, and whether it can be used; a GPU is waited for once."""
    words = torch.stack([message[0] for message in messages.values()]).tolist() if messages else []
    return {j: (message[HEADER_BYTES:], bool(w)) for (j, message), w in zip(messages.items(), words, strict=True)}
