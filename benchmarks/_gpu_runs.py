"""Whole runs of `echelon train` on a GPU for `benchmarks.gpu_all`: alone, and two ranks that share one GPU.

Two ranks of one machine want two GPUs. Here they are started as a launcher starts one rank on each of two machines,
with a host id each for NCCL: so every layout, codec and collective runs as users run it, beside the same without a GPU.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks._gpu_checks import Row
from benchmarks._gpu_ranks import APART, AT_ONCE
from echelon.records.file import read_records
from echelon.records.kinds import Start, Steps

LIMIT_S = 120.0
_RAISED = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception|Lost|Failed)\b")
_NONE: Mapping[str, str] = {}
_VIT = ("--model", "timm/vit_small_patch16_224", "--image-size", "32", "--optimizer", "adamw", "--lr", "0.0003")
ALONE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("fp32", ()),
    ("bf16", ("--precision", "bf16")),
    ("fp16", ("--precision", "fp16")),
    ("bf16-params", ("--precision", "bf16-params")),
    ("fp8", ("--precision", "fp8", *_VIT)),
    ("fp8, a ragged last batch", ("--precision", "fp8", *_VIT, "--batch-size", "50")),
    ("compiled", ("--precision", "bf16", "--compile")),
    ("replayed as CUDA graphs", ("--precision", "bf16", "--compile", "--compile-mode", "reduce-overhead")),
    ("a server", ("--sync", "ps(mode=async)")),
    ("EMA, LARS", ("--ema", "0.99", "--optimizer", "lars", "--lr", "8.0", "--epochs", "6")),
    ("profiled", ("--profile", "3")),
)
TOGETHER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("replicas", ()),
    ("int8", ("--compression", "int8")),
    ("threshold", ("--compression", "threshold(density=0.05)")),
    ("topk", ("--compression", "topk(0.05)")),
    ("powersgd", ("--compression", "powersgd(rank=2)")),
    ("qsgd+huffman", ("--compression", "qsgd+huffman")),
    ("ring", ("--collective", "ring")),
    ("int8 along a ring", ("--collective", "ring", "--compression", "int8")),
    ("local", ("--sync", "local(period=4)")),
    ("DiLoCo, overlapped", ("--sync", "diloco(period=8)")),
    ("SyncBatchNorm and int8", ("--sync-batchnorm", "--compression", "int8", "--model", "small_cnn")),
    ("fsdp", ("--parallel", "fsdp=2", *_VIT)),
    ("zero1", ("--parallel", "dp=2,zero1")),
    ("tp", ("--parallel", "tp=2", *_VIT)),
    ("pp", ("--parallel", "pp=2,microbatches=2", *_VIT)),
    ("bf16, overlap of int8", ("--precision", "bf16", "--compression", "int8")),
    ("fp16", ("--precision", "fp16")),
    ("replicas of a tp pair", ("--parallel", "dp=2,tp=2", *_VIT)),
    ("replicas of an fsdp pair, int8", ("--parallel", "dp=2,fsdp=2", "--compression", "int8", *_VIT)),
)


@dataclass(frozen=True)
class Ended:
    """How a run's processes ended: the losses by step, seconds, and the last words of one that failed."""

    codes: tuple[int, ...]
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    words: str = ""

    @property
    def verdict(self) -> str:
        """`ok`, `skipped` for what was refused in words (torchrun has an exit code of its own), else `FAILS`."""
        if not any(self.codes):
            return "ok"
        return "skipped" if self.words.startswith("echelon: ") else "FAILS"


def runs(device: str, only: tuple[str, ...] = ()) -> Iterator[Row]:
    """Train digits in each precision, compiled, by a server; twice deterministically; stopped and resumed."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        at = Path(folder)
        named = [
            (name, pool.submit(_alone, at / f"run{i}", device, *arguments))
            for i, (name, arguments) in enumerate(ALONE)
            if name.startswith(only or ("",))
        ]
        repeats = [pool.submit(_alone, at / f"same{turn}", device, "--deterministic") for turn in range(2)]
        resumed = pool.submit(_resumed, at, device)
        for name, future in named:
            ended = future.result()
            verdict = ended.verdict if ended.verdict != "ok" or _learns(ended.losses) else "FAILS"
            yield Row(f"train digits, {name}", verdict, _figures(ended))
        pair = [future.result().losses for future in repeats]
        same = bool(pair[0]) and pair[0] == pair[1]
        yield Row("deterministic twice", "ok" if same else "FAILS", "the same losses" if same else "other losses")
        yield resumed.result()


def together(device: str, only: tuple[str, ...] = ()) -> Iterator[Row]:
    """Train digits by two ranks that share a GPU; yields a row a way, beside the same two without a GPU."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        at = Path(folder)
        pairs: list[tuple[str, list[Future[Ended]]]] = []
        for i, (name, arguments) in enumerate(TOGETHER if device == "cuda" else TOGETHER[:1]):
            if not name.startswith(only or ("",)):
                continue
            places = [(at / f"gpu{i}", device), (at / f"cpu{i}", "cpu")]
            ranks = 4 if name.startswith("replicas of") else 2
            pairs.append((name, [pool.submit(_ranks, run, on, arguments, ranks) for run, on in places]))
        killed = pool.submit(_killed, at, device)
        for name, futures in pairs:
            yield _compared(name, *(future.result() for future in futures))
        yield killed.result()


def _compared(name: str, there: Ended, beside: Ended) -> Row:
    if there.verdict != "ok" or beside.verdict != "ok":
        worse = there if there.verdict != "ok" else beside
        return Row(f"ranks, {name}", worse.verdict, _figures(worse))
    count = min(len(there.losses), len(beside.losses), 10)
    apart = max((abs(a - b) / b for a, b in zip(there.losses[:count], beside.losses[:count], strict=True)), default=9.0)
    good = count == 10 and apart < 0.02
    figures = f"{_figures(there)}; the first {count} losses differ from the CPU's by at most {apart:.1e}"
    return Row(f"ranks, {name}", "ok" if good else "FAILS", figures)


def _figures(ended: Ended) -> str:
    if any(ended.codes):
        return f"exit {', '.join(map(str, ended.codes))}: {ended.words}"
    return f"loss {ended.losses[0]:.3f} to {ended.losses[-1]:.3f}, {ended.seconds:.0f} s"


def _learns(losses: Sequence[float]) -> bool:
    return len(losses) > 5 and all(map(math.isfinite, losses)) and sum(losses[-3:]) < 0.7 * sum(losses[:3])


def _alone(run: Path, device: str, *arguments: str) -> Ended:
    return _ended(run, [_start(run, device, ["--workers", "1", *arguments])])


def _ranks(run: Path, device: str, arguments: Sequence[str], count: int = 2) -> Ended:
    return _ended(run, _start_ranks(run, device, ["--timeout", "60s", "--epochs", "1", *arguments], count))


def _start_ranks(run: Path, device: str, arguments: Sequence[str], count: int = 2) -> list[subprocess.Popen[str]]:
    port, apart = _free_port(), APART if device == "cuda" else {}
    launcher = [
        "torch.distributed.run",
        "--nnodes",
        str(count),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
    ]
    return [
        _start(run, device, arguments, [*launcher, "--node-rank", rank, "-m"], {**apart, "NCCL_HOSTID": rank})
        for rank in map(str, range(count))
    ]


def _start(
    run: Path, device: str, arguments: Sequence[str], launcher: Sequence[str] = (), more: Mapping[str, str] = _NONE
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *launcher, "echelon", "train", "digits", "--device", device, "--epochs", "3"]
    settings = run.with_suffix(".yaml")
    settings.write_text(f"run: {run}\n")  # not as --run, which torchrun takes for its own
    with (run.parent / f"{run.name}-{more.get('NCCL_HOSTID', '0')}.log").open("w") as log:
        return subprocess.Popen(
            [*command, *arguments, "--config", str(settings)], stdout=log, stderr=log, text=True,
            env={**os.environ, **more, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip


def _ended(run: Path, started: list[subprocess.Popen[str]]) -> Ended:
    """Wait for a run's processes, and end those that do not end; returns what came of it."""
    began = time.monotonic()
    try:
        for process in started:
            process.wait(max(0.1, began + LIMIT_S - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # told by the exit code of a signal
    finally:
        _end(started)
    codes = tuple(process.returncode for process in started)
    seconds = time.monotonic() - began
    if any(codes):
        logs = sorted(run.parent.glob(f"{run.name}-*.log"))
        failed = next(log for log, code in zip(logs, codes, strict=True) if code)
        return Ended(codes, seconds=seconds, words=_last_words(failed))
    return Ended(codes, [loss for window in read_records(run, Steps) for loss in window.losses], seconds)


def _end(started: Sequence[subprocess.Popen[str]]) -> None:
    for process in started:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _last_words(log: Path) -> str:
    """Return the refusal that a log holds, else its last lines."""
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    refusals = [line for line in lines if line.startswith("echelon: ")]
    raised = [line[-400:] for line in lines if _RAISED.match(line) and "ChildFailedError" not in line]
    return (refusals or raised or [" ".join(lines[-3:])[-300:]])[0] if lines else "no word"


def _resumed(at: Path, device: str) -> Row:
    """Train 20 steps, resume to the end, and train as many at once: the same losses are wanted."""
    settings = ("--deterministic", "--checkpoint-every", "20", "--schedule", "constant", "--threads", "1")
    straight = _alone(at / "straight", device, *settings)
    parts = _alone(at / "parts", device, *settings, "--max-steps", "20")
    command = [sys.executable, "-m", "echelon", "resume", str(at / "parts"), "--max-steps", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode or any(straight.codes + parts.codes):
        words = (done.stderr.strip().splitlines() or [parts.words or straight.words])[-1]
        return Row("stopped and resumed", "FAILS", words[-200:])
    losses = [loss for window in read_records(at / "parts", Steps) for loss in window.losses]
    differing = [i for i, (x, y) in enumerate(zip(losses, straight.losses, strict=False), 1) if x != y]
    same = losses == straight.losses
    figures = f"{len(losses)} losses are the same" if same else f"of {len(losses)} losses differ {differing[:5]}"
    return Row("stopped and resumed", "ok" if same else "FAILS", figures)


def _killed(at: Path, device: str) -> Row:
    """Kill one of two ranks in the midst of training: the other tells so, and ends by itself."""
    run = at / "killed"
    started = _start_ranks(run, device, ["--timeout", "20s", "--epochs", "100000", "--eval-every", "0"])
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and not any(w.step > 20 for w in _steps(run)):
            time.sleep(0.2)
        starts = list(read_records(run, Start))
        if not starts:
            return Row("one rank of two killed", "FAILS", f"none had begun: {_last_words(at / 'killed-0.log')}")
        os.kill(starts[-1].pids[1], signal.SIGKILL)
        began = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            started[0].wait(60)
        seconds, code = time.monotonic() - began, started[0].poll()
    finally:
        _end(started)
    words = _last_words(at / "killed-0.log")
    return Row("one rank of two killed", "ok" if code not in (None, 0) else "FAILS", f"{seconds:.0f} s: {words}")


def _steps(run: Path) -> list[Steps]:
    return list(read_records(run, Steps)) if (run / "record.jsonl").exists() else []


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
