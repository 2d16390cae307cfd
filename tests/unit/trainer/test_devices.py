"""What only a GPU does otherwise, as far as a CPU can show it: which device is whose, steps timed by events."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from echelon.collectives.compressed_all_reduce import DeviceTimes
from echelon.compression.registry import build
from echelon.compression.transforms.huffman import Huffman
from echelon.observe import phases
from echelon.observe.garbage import GarbageClock
from echelon.observe.phases import PHASES, DeviceClock, Phase
from echelon.trainer import world
from echelon.trainer.step_watch import StepWatch


@dataclass
class Stream:
    """A stream whose time is set by hand; events happen when it has got there."""

    now_ms: float = 0.0
    done_ms: float = 1e9

    def event(self) -> StreamEvent:
        return StreamEvent(self)


@dataclass
class StreamEvent:
    stream: Stream
    at_ms: float = field(default=0.0)

    def record(self) -> None:
        self.at_ms = self.stream.now_ms

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return self.at_ms <= self.stream.done_ms

    def elapsed_time(self, later: StreamEvent) -> float:
        return later.at_ms - self.at_ms


def test_steps_of_a_gpu_are_told_apart_once_its_clock_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()

    def mark() -> StreamEvent:
        event = stream.event()
        event.record()
        return event

    monkeypatch.setattr(phases, "device_mark", mark)
    clock = DeviceClock()
    watch = StepWatch(clock, GarbageClock())
    for forward_ms, wait_ms in ((10, 1), (40, 5), (10, 2)):
        for phase, took_ms in ((Phase.FORWARD, forward_ms), (Phase.COMMUNICATE, wait_ms), (None, 100)):
            clock.enter(phase)
            stream.now_ms += took_ms
        clock.enter(Phase.UPDATE)
        watch.end_step()
    assert watch.waits == []
    stream.now_ms += 7  # after the last step, before the window is closed
    drained = clock.drain()
    watch.settle()
    assert watch.waits == pytest.approx([0.001, 0.005, 0.002])
    facts = watch.close(drained, None)
    assert sum(drained) == pytest.approx(0.075), "pauses count for no phase"
    assert facts.slowest is not None and facts.slowest.place == 1
    assert facts.slowest.phases[PHASES.index(Phase.FORWARD)] == pytest.approx(0.04)
    assert watch.median_s == pytest.approx(0.012) and watch.seen == 3
    assert watch.close(clock.drain(), None).slowest is None


def test_entropy_coding_hears_how_long_messages_between_gpus_took() -> None:
    stream, codec = Stream(done_ms=0.0), build("qsgd+huffman")
    assert isinstance(codec, Huffman) and codec.asks_for_times and not build("qsgd").asks_for_times
    times = DeviceTimes(stream.event)  # type: ignore[arg-type]
    began = times.mark()
    stream.now_ms += 20
    times.exchanged(codec, 100_000, began)
    times.settle()
    assert codec.pace.bytes_per_s == 0.0, "the stream is not there yet"
    stream.done_ms = 20
    times.settle()
    assert codec.pace.bytes_per_s == pytest.approx(5e6)


def test_counts_of_symbols_on_a_gpu_are_those_of_the_cpu() -> None:
    plane = torch.tensor([3, 0, 3, 255], dtype=torch.uint8)
    assert torch.bincount(plane, minlength=256).tolist() == [1, 0, 0, 2, *[0] * 251, 1]


@pytest.mark.parametrize(
    ("rows", "device"),
    [
        (["GPU-a", "GPU-b", "GPU-c", "GPU-d"], "cuda:0"),  # a launcher shows each of its tasks one
        (["GPU-a", "GPU-a", "GPU-a", "GPU-a"], "cpu"),  # one for four workers
        (["GPU-a GPU-b GPU-c GPU-d"] * 4, "cuda:2"),
        (["", "", "", ""], "cpu"),
    ],
)
def test_auto_takes_a_gpu_that_no_other_rank_sees(
    rows: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    store = dist.HashStore()
    tables = [world.GpuTable(store, rank, 4, row.split()) for rank, row in enumerate(rows)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(tables[2].seen))
    assert str(world._device_among("auto", 2, tables[2])) == device
