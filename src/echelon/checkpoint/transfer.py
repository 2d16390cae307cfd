"""Parts of checkpoints on their way from the disks of other machines to rank 0's, beside training.

Rank 0 asks, and so decides what travels and how fast; each rank on another machine answers with blocks of its part.
The sockets are those of the run's other messages: encrypted with its keys, and nothing is unpickled.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import zmq

from echelon.checkpoint.blocks import BLOCK_BYTES, BlockList, blocks_of, coded, decoded, digest_of
from echelon.checkpoint.hashed_file import yield_to_training
from echelon.checkpoint.incomplete import HomeParts, PartNote
from echelon.messages.endpoint import Channel, Listener, Sender
from echelon.messages.framing import Content, Message, content, vocabulary
from echelon.messages.identity import RunKeys
from echelon.messages.plain import Malformed
from echelon.messages.sockets import Context, Limits, new_context

SHARE = 0.1
"""Of a link's time: what parts may take of it while there is training."""

_LIMITS = Limits(64 << 20, queued=1000)
_POLL_MS = 200
_ANSWER_S = 20.0  # a question or its answer was lost with a connection
_SURE_BLOCKS = 64  # of an answer, whatever the link
_MOST_BLOCKS = 1024  # 16 MB: what a link of 10 Gbit/s carries in `_SHORT_S`
_SHORT_S, _LONG_S = 0.01, 0.04  # for which the blocks of one answer are to hold a link
_JOIN_S = 10.0  # for a thread that is to end


@content(80)
class PartQuestion(Content):
    """How is the part of `token` cut? Parts of other tokens than `wanted` are needed no more."""

    number: int
    token: int
    wanted: list[int]


@content(81, frames=(1, 1))
class PartAnswer(Content):
    """The part is on the disk; its digests follow."""

    number: int
    host: str
    n_bytes: int
    start_bytes: int
    sha256: str


@content(82)
class PartIsComing(Content):
    """The part is not on the disk yet."""

    number: int


@content(83)
class BlocksQuestion(Content):
    """What are these blocks of the part of `token`, coded where that makes them smaller, or as they are?"""

    number: int
    token: int
    blocks: list[int]
    codes: bool


@content(84, frames=(0, _MOST_BLOCKS))
class BlocksAnswer(Content):
    """The blocks follow, some of them coded, which took some seconds."""

    number: int
    coded: list[bool]
    coding_s: float


class PartServer:
    """Answers for the parts of a rank on another machine than rank 0's, in a thread of its own.

    Attributes:
        address: where it is asked.
        failure: what ended the thread.
    """

    def __init__(self, keys: RunKeys, host: str, home: HomeParts) -> None:
        """Listen at an address of this machine. Raises zmq.ZMQError."""
        self._home = home
        self._context = new_context()
        self._sender = Sender(keys, "parts")
        known = vocabulary(PartQuestion, BlocksQuestion)
        self._listener = Listener(self._context, self._sender, f"tcp://{host}:0", _LIMITS, known)
        self.address = self._listener.address
        self._recent: list[int] = []  # tokens of which rank 0 has not asked yet
        self._lists: dict[int, BlockList] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="echelon-part-server", daemon=True)
        self._thread.start()

    @property
    def sent_bytes(self) -> int:
        """Bytes that were sent so far."""
        return self._sender.traffic.sent_bytes

    def expect(self, token: int) -> None:
        """Take note that the part of a token is about to be written."""
        with self._lock:
            self._recent.append(token)

    def check(self) -> None:
        """Raise what the thread ended with, if it did."""
        if self.failure is not None:
            raise self.failure

    def end(self) -> None:
        """Let the thread end, without waiting for it."""
        self._over.set()

    def close(self) -> None:
        """Answer no more."""
        self.end()
        self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        yield_to_training()
        poller = zmq.Poller()
        self._listener.register(poller)
        try:
            while not self._over.is_set():
                poller.poll(_POLL_MS)
                self._listener.pump(self._take)
        except Exception as error:  # noqa: BLE001 - kept for `check`, which raises it where it can be handled
            self.failure = error
        finally:
            self._listener.close()
            self._context.destroy()

    def _take(self, peer: bytes, message: Message) -> None:
        question, frames = message.content, list[bytes]()
        answer: Content
        with suppress(OSError):  # it is asked again: the disk may work then, and a part that is gone is not needed
            if isinstance(question, PartQuestion):
                answer, frames = self._describe(question)
            else:
                assert isinstance(question, BlocksQuestion)
                answer, frames = self._read(question)
            self._sender.reply(self._listener.socket, peer, answer, frames)

    def _describe(self, question: PartQuestion) -> tuple[Content, list[bytes]]:
        self._forget(set(question.wanted))
        path = self._home.path(question.token)
        if not path.exists():
            return PartIsComing(question.number), []
        if question.token not in self._lists:
            self._lists[question.token] = blocks_of(path)
        listed = self._lists[question.token]
        sha256 = path.with_suffix(".sha256").read_text()
        answer = PartAnswer(question.number, socket.gethostname(), listed.n_bytes, listed.start_bytes, sha256)
        return answer, [listed.digests]

    def _forget(self, wanted: set[int]) -> None:
        with self._lock:
            asked = [i for i, token in enumerate(self._recent) if token in wanted]
            self._recent = self._recent[asked[-1] + 1 :] if asked else self._recent
            wanted |= set(self._recent)
        self._lists = {token: listed for token, listed in self._lists.items() if token in wanted}
        self._home.keep_only(wanted)

    def _read(self, question: BlocksQuestion) -> tuple[Content, list[bytes]]:
        listed = self._lists.get(question.token)
        if listed is None or len(question.blocks) > _MOST_BLOCKS or max(question.blocks, default=0) >= len(listed):
            raise Malformed("range")
        pieces, coding_s = list[tuple[bytes, bool]](), 0.0
        with self._home.path(question.token).open("rb") as file:
            for number in question.blocks:
                begin, end = listed.span(number)
                file.seek(begin)
                block, begun_s = file.read(end - begin), time.monotonic()
                pieces.append(coded(block) if question.codes else (block, False))
                coding_s += time.monotonic() - begun_s
        answer = BlocksAnswer(question.number, [is_coded for _, is_coded in pieces], coding_s)
        return answer, [data for data, _ in pieces]


class TransferPace:
    """How much of a link's time a transfer takes: it rests for a multiple of what each answer took.

    What a link takes for an answer grows with what else it carries, and so does the rest: no rate needs to be known.

    Attributes:
        blocks: how many to ask for at once, of `BLOCK_BYTES`.
        codes: whether they are to be coded.
        busy_s: for how long answers with blocks were waited for so far.
    """

    def __init__(self, hurry: threading.Event) -> None:
        """Take `SHARE` of the link's time; all of it once `hurry` is set."""
        self._hurry, self._share = hurry, SHARE
        self._least_s = float("inf")  # that any answer took: the way there and back
        self.blocks, self._most_blocks = 1, _SURE_BLOCKS
        self.codes = True
        self.busy_s = 0.0

    def asked(self, seconds: float) -> None:
        """Take note of how long an answer without blocks took."""
        self._least_s = min(self._least_s, seconds)

    def rest_s(self, seconds: float) -> float:
        """Return for how long to leave the link alone after an answer with blocks, which took so long."""
        self._least_s = min(self._least_s, seconds)
        self.busy_s += seconds
        held_s = seconds - self._least_s
        if held_s < _SHORT_S:
            self.blocks = min(self._most_blocks, 2 * self.blocks)
        elif held_s > _LONG_S:
            self.blocks = max(1, self.blocks // 2)
        return 0.0 if self._hurry.is_set() else max(held_s, 0.001) * (1 / self._share - 1)

    def carried(self, n_bytes: int, n_sent: int, seconds: float, coding_s: float) -> None:
        """Take note of an answer's size: what next ones may be, and whether they are worth the time of coding.

        Blocks that become small say little of the link: only what has travelled lets answers be larger. Coding ends
        for a part where it saves fewer bytes in a second than the link carries.

        Args:
            n_bytes: of the blocks.
            n_sent: that travelled for them.
            seconds: that the answer took.
            coding_s: that coding took of these.
        """
        self._most_blocks = min(_MOST_BLOCKS, max(_SURE_BLOCKS, 4 * n_sent // BLOCK_BYTES))
        if n_bytes >= _SURE_BLOCKS * BLOCK_BYTES and n_sent > n_bytes // 2:
            link_s = max(seconds - coding_s - self._least_s, 0.0)
            self.codes = self.codes and (n_bytes - n_sent) * link_s > coding_s * n_sent

    def rest(self, seconds: float) -> None:
        """Leave the link alone after an answer that took so long, until there is a hurry."""
        self._hurry.wait(self.rest_s(seconds))


class NoAnswer(Exception):
    """A rank did not answer for a while."""


class PartLink:
    """Rank 0's connection to a rank on another machine; one thread uses it.

    Raises `NoAnswer` where the rank is silent, or its answer makes no sense, or `over` was set: the question may be
    asked again.
    """

    def __init__(
        self, context: Context, sender: Sender, address: str, pace: TransferPace, over: threading.Event
    ) -> None:
        """Connect; nothing is sent yet."""
        known = vocabulary(PartAnswer, PartIsComing, BlocksAnswer)
        self._channel = Channel(context, sender, address, _LIMITS, known)
        self._pace, self._over, self._number = pace, over, 0
        self._answer: Message | None = None

    def describe(self, token: int, wanted: Sequence[int]) -> tuple[PartNote, BlockList] | None:
        """Return what is known of a part, and how it is cut; None: it is not written yet."""
        begun_s = time.monotonic()
        message = self._ask(PartQuestion(self._next(), token, list(wanted)))
        if isinstance(message.content, PartIsComing):
            self._pace.asked(time.monotonic() - begun_s)
            return None
        answer = message.content
        if not isinstance(answer, PartAnswer):
            raise NoAnswer
        listed = BlockList(answer.n_bytes, answer.start_bytes, bytes(message.frames[0]))
        if not listed.is_sound():
            raise NoAnswer
        return PartNote(answer.host, answer.n_bytes, answer.sha256), listed

    def measure(self, token: int) -> None:
        """Learn how long an answer without blocks takes; whether coding is worth its time is seen anew."""
        self._pace.codes = True
        begun_s = time.monotonic()
        self._ask(BlocksQuestion(self._next(), token, [], False))
        self._pace.asked(time.monotonic() - begun_s)

    def blocks(self, token: int, numbers: Sequence[int], listed: BlockList) -> list[bytes]:
        """Return blocks of a part, each compared with its digest, and leave the link alone for a while after."""
        begun_s = time.monotonic()
        message = self._ask(BlocksQuestion(self._next(), token, list(numbers), self._pace.codes))
        took_s = time.monotonic() - begun_s
        answer = message.content
        if not isinstance(answer, BlocksAnswer) or not len(answer.coded) == len(message.frames) == len(numbers):
            raise NoAnswer
        found = []
        for number, frame, is_coded in zip(numbers, message.frames, answer.coded, strict=True):
            begin, end = listed.span(number)
            try:
                block = decoded(bytes(frame), is_coded, end - begin)
            except ValueError as error:
                raise NoAnswer from error
            if digest_of(block) != listed.digest(number):
                raise NoAnswer
            found.append(block)
        self._pace.carried(sum(map(len, found)), sum(map(len, message.frames)), took_s, answer.coding_s)
        self._pace.rest(took_s)
        return found

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _ask(self, question: PartQuestion | BlocksQuestion) -> Message:
        self._answer = None
        self._channel.send(question)
        ends = time.monotonic() + _ANSWER_S
        while self._answer is None:
            if time.monotonic() > ends or self._over.is_set():
                self._pace.blocks = 1
                raise NoAnswer
            self._channel.socket.poll(_POLL_MS)
            self._channel.pump(self._take)
        return self._answer

    def _take(self, message: Message) -> None:
        if getattr(message.content, "number", 0) == self._number:  # else of a question that was given up
            self._answer = message

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
