"""Points of an elastic run at which a process ends or stops, where it is told to: faults as data.

`ECHELON_TEST_FAULTS` is a list of [member, point, how often it has come there]. `Fault.at` is a point in code of the
tests; `install` lets code of Echelon come to points, too:

    told                  about to tell the others of a new term where it is
    sends, sent           about to give the others what they lack, and has given it
    receives, received    about to take from another what it lacks, and has it
    enter, window         about to connect in a new term, and to meet the others before its first step
    bucket, summed bucket about to hand over a step's second bucket of gradients, and has its sum
    average, averaged     about to sum for an agreement of replicas, and has the mean
    rows, summed rows     about to send the rows of tables, whose number all know, and has all that others sent
    part                  has written its part of a checkpoint, under another name
    manifest, sealed      about to seal a checkpoint, and has sealed it, under another name
    collect, spread, summed
                          in a sum with a codec: before the messages to owners, before those of owners, after both

At `bucket, in it` and `average, in it` the process ends as soon as its part of the sum is under way.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FAULTS = "ECHELON_TEST_FAULTS"
LEFT = "ECHELON_TEST_LEFT"  # where who dies in a coded sum leaves what its codec remembers
TERM_DEADLINE_S = 120.0


class Fault:
    """Ends this process where it is told to: the n-th time that it comes to a point.

    Attributes:
        trains: this process has begun to.
    """

    trains = False

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def is_due(self, point: str) -> bool:
        """Come to a point; returns whether this process is to end there."""
        self._counts[point] = count = self._counts.get(point, 0) + 1
        member = os.environ.get("ECHELON_MEMBER", "")
        return [member, point, count] in json.loads(os.environ.get(FAULTS, "[]"))

    def at(self, point: str, after_s: float | None = None) -> None:
        """Come to a point; `after_s`: the end comes so much later, while the process goes on.

        A fault at `POINT, stopped` stops the process there (SIGSTOP) instead of ending it. At `POINT, waits` it waits
        until one that died is back.
        """
        if self.is_due(f"{point}, stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.is_due(f"{point}, waits"):
            _wait_for_newcomer()
        if not self.is_due(point):
            return
        if after_s is None:
            end()
        threading.Thread(target=_die, args=(after_s,), daemon=True).start()


def end() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def _die(after_s: float) -> None:
    time.sleep(after_s)
    end()


def _wait_for_newcomer() -> None:
    from echelon.core.terms import TERMS_VARIABLE, TermFolder, is_newcomer

    folder, ends = TermFolder(Path(os.environ[TERMS_VARIABLE])), time.monotonic() + TERM_DEADLINE_S
    while (term := folder.newest()) is None or not any(map(is_newcomer, term.members)):
        assert time.monotonic() < ends, "nobody came"
        time.sleep(0.01)


Wrapped = Callable[..., Any]


def _wrap(place: Any, name: str, wrapper: Callable[[Wrapped], Wrapped]) -> None:
    """Replace a function of a module or class by one that calls it."""
    function = getattr(place, name)
    setattr(place, name, wraps(function)(wrapper(function)))


def _around(fault: Fault, before: str = "", after: str = "") -> Callable[[Wrapped], Wrapped]:
    def wrapper(function: Wrapped) -> Wrapped:
        def called(*arguments: Any, **named: Any) -> Any:
            if before:
                fault.at(before)
            result = function(*arguments, **named)
            if after:
                fault.at(after)
            return result

        return called

    return wrapper


@cache
def install(remembered: Callable[[Mapping[str, Any]], Tensor]) -> None:
    """Let this process come to the points, once, before its first step or term.

    Args:
        remembered: returns what is left behind of a codec's state by who dies in a coded sum.
    """
    fault = Fault()
    _install_terms(fault)
    _install_buckets(fault)
    _install_averages(fault)
    _install_checkpoints(fault)
    if LEFT in os.environ:
        CodedPoints(fault, remembered).install()


def _install_terms(fault: Fault) -> None:
    from echelon.trainer import elastic
    from echelon.trainer.window import Window

    def with_points(function: Wrapped) -> Wrapped:
        def broadcast(state: Any, *arguments: Any) -> Any:
            sends = state is not None
            fault.at("sends" if sends else "receives")
            result = function(state, *arguments)
            fault.at("sent" if sends else "received")
            return result

        return broadcast

    _wrap(elastic, "enter_term", _around(fault, "enter"))
    _wrap(elastic, "_exchange", _around(fault, "told"))
    _wrap(elastic, "broadcast_state", with_points)
    _wrap(Window, "__init__", _around(fault, "window"))


def _install_buckets(fault: Fault) -> None:
    from echelon.collectives.hook import GradientHook

    def direct(function: Wrapped) -> Wrapped:
        def handed(hook: Any, bucket: Any) -> Any:
            if bucket.index() != 1:
                return function(hook, bucket)
            fault.at("bucket")
            future = function(hook, bucket)
            fault.at("bucket, in it")

            def arrived(summed: Any) -> Any:
                value = summed.value()
                fault.at("summed bucket")
                return value[0] if isinstance(value, list) else value

            return future.then(arrived)

        return handed

    _wrap(GradientHook, "_direct", direct)


def _install_averages(fault: Fault) -> None:
    import torch.distributed as dist

    from echelon.collectives.route import Route
    from echelon.collectives.row_reducer import RowReducer
    from echelon.sync.averaging.exchange import Exchange

    averaging = threading.local()

    def mean(function: Wrapped) -> Wrapped:
        def averaged(exchange: Exchange, *arguments: Any, **named: Any) -> Any:
            fault.at("average")
            averaging.is_first = True
            result = function(exchange, *arguments, **named)
            averaging.is_first = False
            if fault.is_due("averaged"):
                if LEFT in os.environ:
                    torch.save(exchange.state_dict(), Path(os.environ[LEFT]) / f"{os.environ['ECHELON_MEMBER']}.mean")
                end()
            return result

        return averaged

    def summed(function: Wrapped) -> Wrapped:
        def sum_by_backend(route: Route, flat: Tensor) -> None:
            is_first, averaging.is_first = getattr(averaging, "is_first", False), False
            if is_first and fault.is_due("average, in it"):
                dist.all_reduce(flat, group=route.group, async_op=True)
                end()
            function(route, flat)

        return sum_by_backend

    _wrap(RowReducer, "_exchange", _around(fault, "rows", "summed rows"))
    _wrap(Exchange, "mean", mean)
    _wrap(Route, "_sum_by_backend", summed)


def _install_checkpoints(fault: Fault) -> None:
    from echelon.checkpoint import files, parts

    def whole_file(function: Wrapped) -> Wrapped:
        def written(file: Path, *arguments: Any) -> Any:
            writing.of_part = True
            try:
                return function(file, *arguments)
            finally:
                writing.of_part = False

        return written

    def tensors_of_file(function: Wrapped) -> Wrapped:
        def written(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            if getattr(writing, "of_part", False):
                fault.at("part")
            return result

        return written

    writing = threading.local()
    _wrap(parts, "_write_whole_file", whole_file)
    _wrap(parts, "write_file", tensors_of_file)
    _wrap(files, "seal", _around(fault, "manifest", "sealed"))


class CodedPoints:
    """Points of sums with a codec; who dies there leaves behind what its codec remembers (not in averages)."""

    def __init__(self, fault: Fault, remembered: Callable[[Mapping[str, Any]], Tensor]) -> None:
        self._fault, self._remembered = fault, remembered
        self._work: Any = None

    def install(self) -> None:
        """Let sums come to the points; `Fault` counts each."""
        from echelon.collectives.compressed_all_reduce import CompressedAllReduce
        from echelon.collectives.work import CodecWork

        def reduced(function: Wrapped) -> Wrapped:
            def reduce(work: Any, filling: Any) -> None:
                self._work = work
                function(work, filling)

            return reduce

        def collected(function: Wrapped) -> Wrapped:
            def collect(*arguments: Any) -> Any:
                self._at("collect")
                return function(*arguments)

            return collect

        def spread_out(function: Wrapped) -> Wrapped:
            def spread(*arguments: Any) -> Any:
                self._at("spread")
                sent = function(*arguments)
                self._at("summed")
                return sent

            return spread

        _wrap(CodecWork, "_reduce", reduced)
        _wrap(CompressedAllReduce, "_collect", collected)
        _wrap(CompressedAllReduce, "_spread", spread_out)

    def _at(self, point: str) -> None:
        if self._fault.is_due(point):
            if self._work is not None:
                self._leave_memory()
            end()

    def _leave_memory(self) -> None:
        after = self._memory()
        for filling in self._work._fillings:
            filling.snapshot.restore()
        torch.save([self._memory(), after], Path(os.environ[LEFT]) / f"{os.environ['ECHELON_MEMBER']}.pt")

    def _memory(self) -> Tensor:
        return self._remembered(self._work.state_dict())
