"""What `benchmarks.gpu_all` compares in one process: codecs and the feed on the GPU beside the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.compression.base import Meta
from echelon.compression.registry import build

CODECS = (
    "fp16", "bf16", "int8", "qsgd", "ternary", "sign", "sign(vote=true)", "threshold(tau=2.5)",
    "threshold(density=0.01)", "topk(0.01)", "topk(0.01, momentum=0.9)", "randomk(0.01)", "powersgd(rank=2)",
    "qsgd+huffman",
)  # fmt: skip
EXACT = ("int8", "fp16", "bf16")  # whose bytes do not depend on the order of a sum
SANITIZED = "TORCH_CUDA_SANITIZER"
_SIDE = 1024
ALONE = "no CUDA device here: tried on the CPU alone, with nothing to compare"


@dataclass(frozen=True)
class Row:
    """One line of the table: what was looked at, whether it holds (`ok`, `FAILS`, `skipped`), and figures in words."""

    what: str
    verdict: str
    figures: str

    def tell(self) -> None:
        """Print it for the parent, at once."""
        print(json.dumps([self.what, self.verdict, self.figures]), flush=True)


def versions(device: str) -> Iterator[Row]:
    """Tell what is installed and what the driver allows."""
    yield Row("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    if device != "cuda":
        yield Row("device", "skipped", "no CUDA device here")
        return
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        yield Row(f"GPU {i}", "ok", f"{p.name}, {p.total_memory / 2**30:.0f} GiB, {p.major}.{p.minor}, {p.uuid}")
    yield Row("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    asked = "driver_version,compute_mode,mig.mode.current,power.limit"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=15, check=False,
    )  # fmt: skip
    yield Row("driver, compute mode, MIG, power", "ok", " / ".join(done.stdout.split("\n")).strip(" /"))
    buffer = torch.empty(1 << 20, dtype=torch.uint8)
    code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
    yield Row("memory of the host can be locked", "ok" if code == 0 else "FAILS", f"cudaHostRegister: {code}")
    if code == 0:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def codecs(device: str) -> Iterator[Row]:
    """Compare every codec on the device with the CPU, in both memory orders; count what makes the host wait."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(64, _SIDE // 64, _SIDE // 8, 8, generator=generator)
    for order in (torch.contiguous_format, torch.channels_last):
        tensor = plain.contiguous(memory_format=order)
        for spec in CODECS:
            what = f"{spec}, {str(order).removeprefix('torch.')}"
            try:
                yield _codec(what, spec, tensor, device)
            except Exception as error:  # noqa: BLE001 - the other rows are wanted all the same
                yield Row(what, "FAILS", f"{type(error).__name__}: {error}")


def _codec(what: str, spec: str, tensor: Tensor, device: str) -> Row:
    bodies, decoded, seconds, waits = {}, {}, {}, 0
    for place in ("cpu", device):
        codec, there = build(spec), tensor.to(place)
        state = codec.init_state("w", there)
        for turn in range(3):
            _wait(place)
            began = time.perf_counter()
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                if place == "cuda" and turn == 2:
                    torch.cuda.set_sync_debug_mode("warn")
                body = codec.to_bytes(codec.compress(there, state))
                out = codec.extract(codec.from_bytes(body, Meta.of(there)))
                if place == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            _wait(place)
            seconds[place] = time.perf_counter() - began
            waits = sum("synchroniz" in str(w.message) for w in seen)
        bodies[place], decoded[place] = body.cpu(), out.cpu()
    if device == "cpu":
        return Row(what, "skipped", ALONE)
    same = torch.equal(bodies["cpu"], bodies[device])
    far = (decoded["cpu"] - decoded[device]).abs() > 1e-4 * tensor.abs().max()
    share = float(far.float().mean())
    good = same if spec in EXACT else share <= 1e-3
    pace = seconds["cpu"] / seconds[device]
    figures = f"bytes {'equal' if same else 'differ'}, values {share:.1e} apart, {waits} waits, {pace:.1f} x the CPU"
    return Row(what, "ok" if good else "FAILS", figures)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def feed(device: str) -> Iterator[Row]:
    """Compare the batches that the loader puts on the device with those of a CPU, bit by bit."""
    from echelon.config import build as build_config
    from echelon.data import EvalLoader, LoaderConfig, Shard
    from echelon.run.resolve import resolve
    from echelon.tasks import nest

    sanitized = SANITIZED in os.environ  # the sanitizer wants a GPU in loading processes too, which have none
    for loaders in (0,) if sanitized else (0, 2):
        config = build_config(None, {"data.source": "digits", "data.loaders": loaders, "run": "unused"}).config
        run = resolve(config)
        source, batches = run.source.open(), {}
        for place in ("cpu", device):
            settings = LoaderConfig.of(config.data, 0, torch.device(place))
            loader = EvalLoader(source, settings, Shard(0, 1))
            batches[place] = [nest.map_leaves(lambda leaf: leaf.cpu().clone(), b.inputs) for b in loader]
            loader.close()
        pairs = zip(batches["cpu"], batches[device], strict=True)
        same = all(torch.equal(a, b) for x, y in pairs for a, b in zip(nest.leaves(x), nest.leaves(y), strict=True))
        how = f"{len(batches['cpu'])} batches" + (", under the sanitizer" if sanitized else "")
        verdict, how = ("skipped", ALONE) if device == "cpu" else ("ok" if same else "FAILS", how)
        yield Row(f"feed with {loaders} loaders", verdict, how)
