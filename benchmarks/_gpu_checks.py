"""What `benchmarks.gpu_all` compares in one process: codecs and the feed on the GPU beside the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from echelon.compression.base import Meta
from echelon.compression.registry import build

CODECS = (
    "fp16", "bf16", "int8", "qsgd", "ternary", "sign", "sign(vote=true)", "threshold(tau=2.5)",
    "threshold(density=0.01)", "topk(0.01)", "topk(0.01, momentum=0.9)", "randomk(0.01)", "powersgd(rank=2)",
    "qsgd+huffman",
)  # fmt: skip
EXACT = (
    "int8",
    "fp16",
    "bf16",
    "qsgd",
    "sign(vote=true)",
    "qsgd+huffman",
)  # whose bytes do not depend on the order of a sum
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


def _resident(device: str) -> Iterator[Row]:
    """Compare small images of two epochs: loaded in the first, cut from those that lie on the GPU in the second."""
    from benchmarks.gpu_data import Images
    from echelon.config import DataConfig
    from echelon.data import LoaderConfig, Shard, TrainLoader, from_datasets

    source = from_datasets(Images(1000, 32), Images(64, 32), [str(i) for i in range(1000)])
    data, made = DataConfig("images", batch_size=96, augment="flip_crop", loaders=0), {}
    for place in ("cpu", device):
        loader = TrainLoader(source, LoaderConfig(data, 0, torch.device(place)), Shard(0, 1))
        made[place] = [batch.inputs.cpu() for epoch in (0, 1) for batch in loader.epoch(epoch)]
        loader.close()
    same = all(torch.equal(a, b) for a, b in zip(made["cpu"], made[device], strict=True))
    verdict = ("skipped", ALONE) if device == "cpu" else ("ok" if same else "FAILS", "two epochs of 11 batches")
    yield Row("images that stay on the device, cropped and mirrored there", *verdict)


def _files() -> Iterator[Row]:
    """Compare JPEG files that the GPU decodes with those that the processor does."""
    from PIL import Image

    from echelon.config import DataConfig
    from echelon.data import LoaderConfig, Shard, TrainLoader, open_data

    with tempfile.TemporaryDirectory() as folder:
        for i in range(64):
            numbers = torch.randint(0, 256, (12, 16, 3), generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
            path = Path(folder) / f"c{i % 2}" / f"{i}.jpg"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(numbers.numpy()).resize((400, 300), Image.Resampling.BICUBIC).save(path, quality=90)
        made = {}
        for place, decode in (("cpu", "cpu"), ("cuda", "gpu")):
            data = DataConfig(folder, batch_size=20, image_size=224, augment="imagenet", loaders=0, decode=decode)  # type: ignore[arg-type]
            loader = TrainLoader(open_data(data, 0), LoaderConfig(data, 0, torch.device(place)), Shard(0, 1))
            made[place] = [batch.inputs.cpu() for batch in loader.epoch(0)]
            loader.close()
    apart = torch.cat([(a - b).abs().flatten() for a, b in zip(made["cpu"], made["cuda"], strict=True)])
    verdict = "ok" if apart.mean() < 0.02 else "FAILS"
    yield Row(
        "JPEG files decoded on the GPU", verdict, f"{apart.mean():.1e} apart on average, {apart.max():.1e} at most"
    )


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def feed(device: str) -> Iterator[Row]:
    """Compare the batches that the loader puts on the device with those of a CPU, bit by bit."""
    from benchmarks.gpu_data import Images
    from echelon.config import DataConfig
    from echelon.data import EvalLoader, LoaderConfig, Shard, from_datasets
    from echelon.tasks import nest

    sanitized = SANITIZED in os.environ  # the sanitizer wants a GPU in loading processes too, which have none
    try:
        yield from _resident(device)
    except SystemError as error:  # from within the sanitizer
        frames = traceback.extract_tb(error.__traceback__)
        yield Row("images that stay on the device", "skipped", f"torch's sanitizer: {error}, in {frames[-1].name}")
    if device == "cuda" and not sanitized:
        yield from _files()
    for loaders in (0,) if sanitized else (0, 2):
        source = from_datasets(Images(64, 32), Images(300, 32), [str(i) for i in range(1000)])  # loaded in a first pass
        data, batches = DataConfig("images", batch_size=64, loaders=loaders), {}
        for place in ("cpu", device):
            settings = LoaderConfig.of(data, 0, torch.device(place))
            loader = EvalLoader(source, settings, Shard(0, 1))
            batches[place] = [nest.map_leaves(lambda leaf: leaf.cpu().clone(), b.inputs) for b in loader]
            loader.close()
        pairs = zip(batches["cpu"], batches[device], strict=True)
        same = all(torch.equal(a, b) for x, y in pairs for a, b in zip(nest.leaves(x), nest.leaves(y), strict=True))
        how = f"{len(batches['cpu'])} batches" + (", under the sanitizer" if sanitized else "")
        verdict, how = ("skipped", ALONE) if device == "cpu" else ("ok" if same else "FAILS", how)
        yield Row(f"feed with {loaders} loaders", verdict, how)
