"""What the compressed sum of a model's gradients costs a GPU and its host, for `benchmarks.gpu_all`.

One of N ranks is timed alone: its messages come back to it at once, in place of those of the others. So the figures are
those of encoding and decoding, without a network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks._common import median
from benchmarks._gpu_checks import Row
from echelon.collectives.compressed_all_reduce import CompressedAllReduce
from echelon.collectives.messages import Mailbox
from echelon.collectives.rounds import LinearAllReduce
from echelon.collectives.schedule import Ring
from echelon.compression.registry import build
from echelon.core.shards import FlatTensor

CODECS = ("int8", "qsgd", "sign", "topk(0.01)", "threshold(density=0.01)", "powersgd(rank=2)", "bf16")
_BUCKET = 25 << 18  # elements: 25 MB
_RANKS = 8


@dataclass(frozen=True)
class Echo(Mailbox):
    """Gives a rank's own messages back."""

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> tuple[dict[int, Tensor], int]:
        """Return what was to be sent, for those that messages were to come from."""
        return {place: outgoing[place] for place in incoming}, 0

    def announce(self, outgoing: Mapping[int, Tensor], senders: Iterable[int]) -> tuple[dict[int, int], int]:
        """Return the lengths of what is to be sent."""
        return {place: outgoing[place].numel() for place in senders}, 0


def sums(device: str) -> Iterator[Row]:
    """Sum ResNet-50's gradients over 8 ranks; yields a row a codec: milliseconds, launches, and waits for the GPU."""
    shapes = _shapes("resnet50" if device == "cuda" else "resnet10t")
    for spec in CODECS:
        step = _step(spec, shapes, torch.device(device))
        for _ in range(3):
            step()
        took, busy = zip(*(_timed(step, device) for _ in range(10)), strict=True)
        figures = f"{1e3 * median(took):.1f} ms, of which the host is busy {1e3 * median(busy):.1f}"
        yield Row(f"{spec}, 8 ranks, alone", "ok", figures + (_counts(step) if device == "cuda" else ""))


def _shapes(model: str) -> list[tuple[int, ...]]:
    import timm

    with torch.device("meta"):
        return [tuple(p.shape) for p in timm.create_model(model).parameters()]


def _step(spec: str, shapes: list[tuple[int, ...]], device: torch.device) -> Callable[[], None]:
    """Return what sums all buckets once."""
    codec = build(spec).for_run(0)
    codec = codec.at(10**6)
    sums_: list[tuple[Tensor, Callable[[Tensor], object]]] = []
    for number, pieces in enumerate(_buckets(shapes)):
        like = torch.randn(-(-pieces[-1].span[1] // _RANKS) * _RANKS, device=device)
        if codec.linear:
            whole = [FlatTensor(f"b{number}", (like.numel(),), (0, like.numel()))]
            linear = LinearAllReduce(codec, pieces if codec.shaped else whole, like, (0, _RANKS), 0)
            sums_.append((like, lambda flat, of=linear: of.sum_(flat, lambda message: 0, average=True)))
        else:
            coded = CompressedAllReduce(codec, Echo(None, Ring(range(_RANKS), 0)), like, f"b{number}", 0)  # type: ignore[arg-type]
            sums_.append((like, lambda flat, of=coded: of.sum_(flat, _RANKS)))
    scratch = [torch.empty_like(like) for like, _ in sums_]

    def step() -> None:
        """Sum them."""
        for (like, sum_), flat in zip(sums_, scratch, strict=True):
            sum_(flat.copy_(like))

    return step


def _buckets(shapes: list[tuple[int, ...]]) -> list[list[FlatTensor]]:
    buckets: list[list[FlatTensor]] = [[]]
    start = 0
    for i, shape in enumerate(reversed(shapes)):
        numel = torch.Size(shape).numel()
        if start and start + numel > _BUCKET:
            buckets.append([])
            start = 0
        buckets[-1].append(FlatTensor(f"p{i}", shape, (start, start + numel)))
        start += numel
    return buckets


def _timed(step: Callable[[], None], device: str) -> tuple[float, float]:
    """Return the seconds until the device is done, and those until the host is."""
    _wait(device)
    began = time.perf_counter()
    step()
    busy = time.perf_counter() - began
    _wait(device)
    return time.perf_counter() - began, busy


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _counts(step: Callable[[], None]) -> str:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
    calls = {event.key: event.count for event in seen.key_averages()}
    kinds = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset")
    launches = sum(n for key, n in calls.items() if key.startswith(kinds))
    waits = sum(n for key, n in calls.items() if key in ("cudaStreamSynchronize", "cudaEventSynchronize"))
    return f"; {launches} launches, {waits} waits"
