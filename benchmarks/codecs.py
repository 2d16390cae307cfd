"""Encode and decode speed of every codec on one thread, against a memcpy of the same tensor in the same run.

    OMP_NUM_THREADS=1 python benchmarks/codecs.py                 # 25 M float32
    OMP_NUM_THREADS=1 python benchmarks/codecs.py --numel 1000000 --codecs "int8,topk(0.01)"

Rounds are interleaved: each one times the memcpy and then every codec once, and medians are shown. `times memcpy` is
encode + decode over the memcpy's time; on a CPU it is CPU time, so that a busy machine disturbs less. Decoding is into
a buffer that exists, as in the compressed all-reduce, and so is the memcpy. The codec itself is timed; `with feedback`
is one step with its error feedback on top, encode + decode. On a CPU each codec is timed with its compiled loops and
with numpy's, which `loops` tells.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from echelon.compression.base import Codec, State
from echelon.compression.native import switched_off, why_numpy
from echelon.compression.registry import build
from echelon.compression.transforms import Transformed
from echelon.core.spec import split_top_level

CODECS = (
    "fp16,bf16,int8,qsgd,qsgd(levels=1),ternary,sign,sign(vote=true),threshold(tau=2.5),threshold(density=0.01),"
    "topk(0.01),randomk(0.01),powersgd(rank=2)"
)


@dataclass
class Row:
    """What was measured of one codec; speeds in GB/s of the uncompressed tensor."""

    codec: str
    loops: str
    encode_gb_per_s: float
    decode_gb_per_s: float
    times_memcpy: float
    encode_times_memcpy: float
    feedback_encode_times_memcpy: float
    feedback_times_memcpy: float
    relative_error: float
    bits_per_element: float


@dataclass
class Candidate:
    """A codec with its states and its times."""

    spec: str
    loops: str
    codec: Codec
    wrapped: Codec
    state: State
    wrapped_state: State
    encode_s: list[float]
    decode_s: list[float]
    feedback_s: list[float]


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time one call: CPU seconds of this thread, or wall seconds with the device's work included."""
    if device.type != "cuda":
        start = time.thread_time()
        work()
        return time.thread_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def loops_of(device: torch.device) -> list[str]:
    """Return what computes on a device: on a CPU compiled loops, where they can be, and numpy's."""
    if device.type != "cpu":
        return ["torch"]
    if reason := why_numpy():
        print(f"no compiled loops: {reason}")
    return ["numpy"] if reason else ["C", "numpy"]


def candidate(spec: str, loops: str, tensor: Tensor) -> Candidate:
    """Build a codec without and with its error feedback."""
    wrapped = build(spec)
    codec = wrapped.inner if isinstance(wrapped, Transformed) else wrapped
    state, wrapped_state = codec.init_state("gradient", tensor), wrapped.init_state("gradient", tensor)
    return Candidate(spec, loops, codec, wrapped, state, wrapped_state, [], [], [])


def computing(loops: str) -> AbstractContextManager[None]:
    """Let these loops compute in the context."""
    return switched_off() if loops == "numpy" else nullcontext()


def measure(one: Candidate, tensor: Tensor, out: Tensor, feedback: bool) -> None:
    """Time one encode, one decode, and perhaps one encode with error feedback."""
    kept = []
    one.encode_s.append(seconds(lambda: kept.append(one.codec.compress(tensor, one.state)), tensor.device))
    one.decode_s.append(seconds(lambda: one.codec.extract(kept[0], out), tensor.device))
    if feedback and one.wrapped is not one.codec:
        one.feedback_s.append(seconds(lambda: one.wrapped.compress(tensor, one.wrapped_state), tensor.device))


def row(one: Candidate, tensor: Tensor, out: Tensor, memcpy_s: float) -> Row:
    """Turn times into a row; error and bits are those of one more message."""
    payload = one.codec.compress(tensor, one.state)
    error = float((one.codec.extract(payload, out) - tensor).norm() / tensor.norm())
    encode, decode = statistics.median(one.encode_s), statistics.median(one.decode_s)
    feedback = statistics.median(one.feedback_s) if one.feedback_s else float("nan")
    return Row(
        codec=one.spec,
        loops=one.loops,
        encode_gb_per_s=tensor.nbytes / encode / 1e9,
        decode_gb_per_s=tensor.nbytes / decode / 1e9,
        times_memcpy=(encode + decode) / memcpy_s,
        encode_times_memcpy=encode / memcpy_s,
        feedback_encode_times_memcpy=feedback / memcpy_s,
        feedback_times_memcpy=(feedback + decode) / memcpy_s,
        relative_error=error,
        bits_per_element=8 * payload.n_bytes / tensor.numel(),
    )


def show(rows: list[Row], memcpy_s: float, numel: int) -> None:
    """Print a table in Markdown."""
    print(f"{numel:,} float32, one thread; memcpy {memcpy_s * 1e3:.1f} ms")
    print("| codec | loops | encode GB/s | decode GB/s | times memcpy | with feedback | error | bits |")
    print("|---|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r.codec} | {r.loops} | {r.encode_gb_per_s:.2f} | {r.decode_gb_per_s:.2f} | {r.times_memcpy:.2f} "
            f"| {r.feedback_times_memcpy:.2f} | {r.relative_error:.3f} | {r.bits_per_element:.3f} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codecs", default=CODECS, help="comma-separated specs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # A square-ish matrix, so that powersgd has one to factor; the other codecs see its elements in order.
    side = max(int(options.numel**0.5), 1)
    tensor = torch.randn(side, options.numel // side, device=options.device)
    out = torch.empty_like(tensor)
    specs, loops = split_top_level(options.codecs, ","), loops_of(tensor.device)
    candidates = [candidate(spec.strip(), way, tensor) for spec in specs for way in loops]
    memcpy: list[float] = []
    for index in range(options.rounds + 1):
        copying = seconds(lambda: out.copy_(tensor), tensor.device)
        if index:
            memcpy.append(copying)
        for one in candidates:
            with computing(one.loops):
                measure(one, tensor, out, feedback=True)
            if not index:
                one.encode_s.clear(), one.decode_s.clear(), one.feedback_s.clear()
    memcpy_s = statistics.median(memcpy)
    rows = [row(one, tensor, out, memcpy_s) for one in candidates]
    show(rows, memcpy_s, tensor.numel())
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
