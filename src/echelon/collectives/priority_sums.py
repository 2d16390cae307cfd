"""A thread that sums gradients piece by piece, what the next forward pass needs first (see `piece_order`).

The order must be the same in all ranks, whose gradients become ready at different moments. The first rank chooses, and
a number of 8 bytes that travels beside each piece says which one comes after the pieces that are under way. No sum
depends on the order, so that a run gives the same bits in whichever order its pieces travelled.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.piece_order import PieceOrder, cut_gradients
from echelon.collectives.route import Route
from echelon.collectives.times import ReduceTimes
from echelon.collectives.wire import WireCount, framing_bytes

UNDER_WAY = 2
"""Pieces that travel at a time: while the last message of one is on its way, the link carries the next."""
AHEAD = 1
"""Pieces that are chosen before it is their turn: what becomes ready after that waits for them."""


@dataclass(frozen=True)
class _Choice:
    """A piece's number, on its way from the first rank."""

    number: Tensor
    arrival: dist.Work | None = None

    def hear(self, route: Route) -> int:
        """Wait for it and return it."""
        if self.arrival is not None:
            with route.losing():
                self.arrival.wait()
        return int(self.number)


@dataclass(frozen=True)
class _UnderWay:
    """A piece whose sum has begun.

    Attributes:
        views: of its gradients, in place.
        message: what is summed: its only view, or a copy of several.
        wait: waits for the sum.
    """

    piece: int
    views: Sequence[Tensor]
    message: Tensor
    wait: Callable[[], None]
    began_s: float


class PrioritySums:
    """Sums the gradients of parameters over the ranks of a route, in place.

    In each step `begin`, `submit` for every parameter, then `wait` for each before its gradient is read. The rank's
    bytes are counted when its gradients are submitted.
    """

    def __init__(self, parameters: Sequence[Tensor], route: Route, wire: WireCount, times: ReduceTimes) -> None:
        """Take parameters in the order of the model; every rank of the route's group has the same."""
        self.parameters = list(parameters)
        self._route, self._wire, self._times = route, wire, times
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._pieces = cut_gradients(self.parameters)
        self._pieces_of: list[list[int]] = [[] for _ in self.parameters]
        for number, piece in enumerate(self._pieces):
            for gradient in piece.slices:
                self._pieces_of[gradient.parameter].append(number)
        self._sends = [self._bytes_of(number) for number in range(len(self._pieces))]
        self._needed = list(range(len(self._pieces)))
        self._step = -1
        self._flat: list[Tensor | None] = [None] * len(self.parameters)
        self._missing = [0] * len(self._pieces)  # gradients that are not ready, by piece
        self._ready: set[int] = set()
        self._left = [0] * len(self.parameters)  # pieces that are not summed, by parameter
        self._order = PieceOrder(len(self._pieces))
        # The first choices are made before anything is ready, alike in all ranks: nobody has to tell of them.
        self._choices = deque(_Choice(torch.tensor(self._order.choose(self._needed))) for _ in range(AHEAD))
        self._changed = threading.Condition()
        self._closed = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def need(self, parameters: Sequence[Tensor]) -> None:
        """Hear in which order a forward pass has read parameters (any shape); all others come first."""
        places = {self._numbers[id(parameter)]: place for place, parameter in enumerate(parameters)}
        with self._changed:
            self._needed = [
                min(places.get(gradient.parameter, -1) for gradient in piece.slices) for piece in self._pieces
            ]

    def begin(self) -> None:
        """Begin a step, once the sums of the last one have all arrived."""
        for parameter in self.parameters:
            self.wait(parameter)
        with self._changed:
            self._step += 1
            self._missing = [len(piece.slices) for piece in self._pieces]
            self._left = [len(pieces) for pieces in self._pieces_of]
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="echelon-priority", daemon=True)
            self._thread.start()

    def submit(self, parameter: Tensor, flat: Tensor) -> None:
        """Hand over a gradient as 1-D memory, in which it is summed; returns at once."""
        number = self._numbers[id(parameter)]
        with self._changed:
            self._flat[number] = flat
            for piece in self._pieces_of[number]:
                self._missing[piece] -= 1
                if not self._missing[piece]:
                    self._ready.add(piece)
                    self._order.came(piece, self._step)
                    self._wire.add(self._pieces[piece].group, self._sends[piece])
            self._changed.notify_all()

    def is_summed(self, parameter: Tensor) -> bool:
        """Whether the sum of a parameter's gradient has arrived; any shape."""
        return not self._left[self._numbers[id(parameter)]]

    def wait(self, parameter: Tensor) -> None:
        """Wait until the sum of a parameter's gradient has arrived; any shape.

        Raises:
            PeerLostError: a rank did not answer before the group's timeout.
        """
        number = self._numbers[id(parameter)]
        if not self._left[number]:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._left[number])
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """End the thread; what is under way is summed first."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _bytes_of(self, piece: int) -> int:
        """Return what this rank sends of a piece, and, where it is the first, of the number beside it."""
        numel, first = self._pieces[piece].numel, self._pieces[piece].slices[0].parameter
        chosen = (8 + framing_bytes(1, on_gpu=False)) * (self._route.rank == 0)
        return self._route.sends(numel, self.parameters[first].element_size()) + chosen

    def _serve(self) -> None:
        try:
            with torch.no_grad():
                self._sum_pieces()
        except Exception as error:  # noqa: BLE001 - raised where the sum is waited for
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _sum_pieces(self) -> None:
        choices = self._choices
        under_way: deque[_UnderWay] = deque()
        while True:
            piece = choices.popleft().hear(self._route)
            while under_way and not self._is_ready(piece):
                self._finish(under_way.popleft())
            if not self._await(piece):
                break
            choices.append(self._choose())
            under_way.append(self._launch(piece))
            if len(under_way) == UNDER_WAY:
                self._finish(under_way.popleft())
        for choice in choices:
            choice.hear(self._route)

    def _is_ready(self, piece: int) -> bool:
        with self._changed:
            return piece in self._ready

    def _await(self, piece: int) -> bool:
        """Wait until a piece is ready in this rank; returns False where no more will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or piece in self._ready)
            if piece not in self._ready:
                return False
            self._ready.remove(piece)
            return True

    def _choose(self) -> _Choice:
        """Begin to tell all ranks which piece travels after those that are known."""
        with self._changed:
            number = torch.tensor(self._order.choose(self._needed) if self._route.rank == 0 else 0)
        with self._route.losing():
            arrival = dist.broadcast(number, group=self._route.group, group_src=0, async_op=True)
        return _Choice(number, arrival)

    def _launch(self, piece: int) -> _UnderWay:
        views = []
        for gradient in self._pieces[piece].slices:
            flat = self._flat[gradient.parameter]
            assert flat is not None, "a piece is ready when its gradients are"
            views.append(flat[slice(*gradient.span)])
        message = views[0] if len(views) == 1 else torch.cat(views)
        return _UnderWay(piece, views, message, self._route.begin_sum_(message), time.perf_counter())

    def _finish(self, launched: _UnderWay) -> None:
        launched.wait()
        if len(launched.views) > 1:
            sums = launched.message.split([view.numel() for view in launched.views])
            for view, summed in zip(launched.views, sums, strict=True):
                view.copy_(summed)
        self._times.done(launched.began_s)
        with self._changed:
            for gradient in self._pieces[launched.piece].slices:
                self._left[gradient.parameter] -= 1
                if not self._left[gradient.parameter]:
                    self._flat[gradient.parameter] = None
            self._changed.notify_all()
