"""The groups of `benchmarks.gpu_all`: each runs in a process of its own and prints a row as soon as it has one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from echelon.collectives import registry as paths
from echelon.collectives.hook import GradientHook
from echelon.compression import read
from echelon.compression.base import Meta
from echelon.compression.registry import build

CODECS = (
    "fp16", "bf16", "int8", "qsgd", "ternary", "sign", "sign(vote=true)", "threshold(tau=2.5)",
    "threshold(density=0.01)", "topk(0.01)", "topk(0.01, momentum=0.9)", "randomk(0.01)", "powersgd(rank=2)",
    "qsgd+huffman",
)  # fmt: skip
EXACT = ("int8", "fp16", "bf16")  # whose bytes do not depend on the order of a sum
OVER_NCCL = (
    ("none", "backend"), ("none", "ring"), ("int8", "backend"), ("threshold(density=0.01)", "backend"),
    ("topk(0.01)", "backend"), ("powersgd(rank=2)", "backend"),
)  # fmt: skip
RUNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("fp32", ()),
    ("bf16", ("--precision", "bf16")),
    ("fp16", ("--precision", "fp16")),
    ("bf16-params", ("--precision", "bf16-params")),
    ("fp8", ("--precision", "fp8", "--model", "timm/vit_tiny_patch16_224", "--image-size", "32")),
    ("compiled", ("--precision", "bf16", "--compile")),
    ("a server", ("--sync", "ps(mode=async)")),
)
PROBE_S = 20.0
_SIDE = 1024
_ALONE = "no CUDA device here: tried on the CPU alone, with nothing to compare"


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
        return Row(what, "skipped", _ALONE)
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

    for loaders in (0, 2):
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
        how = f"{len(batches['cpu'])} batches" + (", under the sanitizer" if _SANITIZED in os.environ else "")
        verdict, how = ("skipped", _ALONE) if device == "cpu" else ("ok" if same else "FAILS", how)
        yield Row(f"feed with {loaders} loaders", verdict, how)


_SANITIZED = "TORCH_CUDA_SANITIZER"


def nccl(device: str) -> Iterator[Row]:
    """Let two ranks train through the hook, on two GPUs or, where the driver allows it, on one."""
    if device != "cuda":
        yield Row("two ranks over NCCL", "skipped", "no CUDA device here")
        return
    attempts: list[tuple[str, dict[str, str]]] = [("a GPU each", {})]
    if torch.cuda.device_count() < 2:
        apart = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
        attempts = [("several ranks on a GPU", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}), ("host ids of their own", apart)]
    for how, variables in attempts:
        said = _two_ranks("none", "backend", "nccl", PROBE_S, variables)
        yield Row(f"two ranks over NCCL, {how}", "ok" if said.get("same") else "skipped", said.get("why", ""))
        if said.get("same"):
            break
    else:
        return
    for compression, collective in OVER_NCCL:
        said = _two_ranks(compression, collective, "nccl", 60.0, variables)
        beside = _two_ranks(compression, collective, "gloo", 60.0, {})
        near = abs(said.get("sum", float("nan")) - beside.get("sum", 0.0)) < 1e-2 * abs(beside.get("sum", 0.0)) + 1e-3
        verdict = "ok" if said.get("same") and near else "FAILS"
        figures = f"sum of weights {said.get('sum')}, over gloo {beside.get('sum')} {said.get('why', '')}"
        yield Row(f"{compression} along {collective}, NCCL", verdict, figures)


def _two_ranks(compression: str, collective: str, backend: str, limit_s: float, more: dict[str, str]) -> dict[str, Any]:
    """Start two processes of `rank_main`; returns what rank 0 said, or `why` it said nothing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks._gpu_groups", compression, collective, backend, folder]
        apart = "NCCL_SHM_DISABLE" in more
        started = [
            subprocess.Popen(
                [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, **more, **({"NCCL_HOSTID": f"apart{rank}"} if apart else {})},
            )
            for rank in range(2)
        ]  # fmt: skip
        ends, said = time.monotonic() + limit_s, []
        try:
            said = [process.communicate(timeout=max(0.1, ends - time.monotonic())) for process in started]
        except subprocess.TimeoutExpired:
            return {"why": f"no answer in {limit_s:g} s"}
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
    if any(process.returncode for process in started):
        return {"why": (said[0][1].strip().splitlines() or [f"exit code {started[0].returncode}"])[-1][:200]}
    answer: dict[str, Any] = json.loads(said[0][0].splitlines()[-1])
    return answer


def rank_main(compression: str, collective: str, backend: str, folder: str, rank: int) -> None:
    """Be one of two ranks: three steps of a small network through the hook."""
    device = torch.device("cuda", rank % torch.cuda.device_count()) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 64), nn.Linear(64, 10))
    ddp = DistributedDataParallel(model.to(device), device_ids=[device] if device.type == "cuda" else None)
    hook = GradientHook(None, read(compression), paths.build(collective), average=True)
    hook.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        ddp(torch.randn(8, 1, 8, 8).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    other = flat.clone()
    dist.broadcast(other, 0)
    same = torch.tensor(float(torch.equal(flat, other)), device=device)
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    hook.close()
    print(json.dumps({"same": bool(same), "sum": round(float(flat.double().abs().sum()), 4)}), flush=True)
    dist.destroy_process_group()


def runs(device: str) -> Iterator[Row]:
    """Train digits in each precision, compiled, by a server; twice deterministically; stopped and resumed."""
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in RUNS:
            said, seconds = _train(Path(folder) / name.replace(" ", "-"), device, *arguments)
            good = said.get("status") == "completed"
            skipped = "skipped" if said.get("refused") else "FAILS"
            figures = f"top1 {said.get('top1')}, {seconds:.0f} s {said.get('why', '')}".strip()
            yield Row(f"train digits, {name}", "ok" if good else skipped, figures)
        weights = []
        for turn in range(2):
            run = Path(folder) / f"same{turn}"
            _train(run, device, "--deterministic")
            weights.append(_best_weights(run))
        same = all(w is not None for w in weights) and weights[0] == weights[1]
        yield Row("deterministic twice", "ok" if same else "FAILS", "the same bits" if same else "other bits")


def _train(run: Path, device: str, *arguments: str) -> tuple[dict[str, Any], float]:
    command = [sys.executable, "-m", "echelon", "train", "digits", "--device", device, "--workers", "1"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--epochs", "3", *arguments, "--run", str(run)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - began
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1][:200]
        return {"why": last, "refused": done.returncode == 2}, seconds
    summary = json.loads((run / "summary.json").read_text())
    return {"status": "completed", "top1": summary["metrics"].get("top1")}, seconds


def _best_weights(run: Path) -> dict[str, list[Any]] | None:
    from echelon.trainer.start_weights import best_weights

    if not (run / "summary.json").exists():
        return None
    return {name: value.flatten().tolist() for name, value in best_weights(run, "newest").items()}


def timings(device: str) -> Iterator[Row]:
    """Let `benchmarks.gpu` time ResNet-50, alone on the device."""
    if device != "cuda":
        yield Row("images per second", "skipped", "no CUDA device here")
        return
    command = [sys.executable, "-m", "benchmarks.gpu", "--print", "--rounds", "1", "--models", "resnet50"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) > 1:
            yield Row(f"ResNet-50: {cells[0]}", "ok", " / ".join(cells[1:]))
    if done.returncode:
        yield Row("ResNet-50", "FAILS", (done.stderr.strip().splitlines() or ["no word"])[-1][:200])


@dataclass(frozen=True)
class Group:
    """Rows that are found together, the seconds that they may take, and variables of their process."""

    rows: Callable[[str], Iterator[Row]]
    limit_s: float
    variables: tuple[tuple[str, str], ...] = ()


GROUPS: dict[str, Group] = {
    "versions": Group(versions, 90.0),
    "codecs": Group(codecs, 90.0),
    "feed": Group(feed, 45.0),
    "nccl": Group(nccl, 120.0),
    "runs": Group(runs, 210.0),
    "timings": Group(timings, 130.0),
}
GROUPS["feed-sanitized"] = replace(GROUPS["feed"], variables=((_SANITIZED, "1"),))

if __name__ == "__main__":
    rank_main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
