"""Ranks over NCCL for `benchmarks.gpu_all`: a few steps through the gradient hook, beside the same ranks over gloo.

    python -m benchmarks._gpu_ranks '{"compression": "int8", ...}' RANK      # is one rank; prints a line of JSON

NCCL wants a GPU for each rank. Where there are fewer, each rank gets a host id of its own, and NCCL's ways between
processes of one host are off: then it takes the ranks for those of other machines, and sends through the loopback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._gpu_checks import Row

PROBE_S = 20.0
AT_ONCE = max(2, min(8, (os.cpu_count() or 4) // 2))
APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Case:
    """Ranks that take `steps` steps together.

    Attributes:
        batchnorm: the model has a SyncBatchNorm, whose sums travel beside the hook's.
    """

    compression: str
    collective: str = "backend"
    ranks: int = 2
    batchnorm: bool = False
    steps: int = 3

    def __str__(self) -> str:
        """Name it as the table does."""
        along = "" if self.collective == "backend" else f" along {self.collective}"
        return f"{self.compression}{along}{', SyncBatchNorm' * self.batchnorm}, {self.ranks} ranks"


CASES = (
    *(Case(c) for c in ("none", "int8", "qsgd", "sign", "threshold(density=0.01)", "topk(0.01)", "powersgd(rank=2)")),
    *(Case("none", path) for path in ("ring", "halving_doubling")),
    *(Case(c, batchnorm=True) for c in ("none", "int8", "topk(0.01)")),
    *(Case(c, ranks=3) for c in ("none", "int8", "topk(0.01)", "powersgd(rank=2)")),
    *(Case(c, ranks=8) for c in ("none", "int8", "topk(0.01)", "powersgd(rank=2)")),
    Case("none", "ring", ranks=3),
)


def nccl(device: str) -> Iterator[Row]:
    """Let ranks train through the hook over NCCL; yields a row a case, beside the same over gloo on the CPU."""
    if device != "cuda":
        yield Row("two ranks over NCCL", "skipped", "no CUDA device here")
        backends, cases = ("gloo", "gloo"), CASES[:1]  # tries the command
        apart: dict[str, str] | None = {}
    else:
        apart, row = how_to_share()
        yield row
        backends, cases = ("nccl", "gloo"), CASES
    if apart is None:
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pairs = [(case, [pool.submit(_ranks, case, b, 60.0, apart) for b in backends]) for case in cases]
        for case, (there, beside) in pairs:
            yield _compared(case, there.result(), beside.result(), device)


def how_to_share() -> tuple[dict[str, str] | None, Row]:
    """Try whether two ranks can meet over NCCL here; returns the variables that they need, None where they cannot."""
    attempts: list[tuple[str, dict[str, str]]] = [("a GPU each", {})]
    if torch.cuda.device_count() < 2:
        attempts = [("several ranks on a GPU", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}), ("host ids of their own", APART)]
    words = []
    for how, variables in attempts:
        said = _ranks(Case("none"), "nccl", PROBE_S, variables)
        words.append(f"{how}: {'yes' if said.get('same') else said.get('why', 'other weights')}")
        if said.get("same"):
            return variables, Row("two ranks over NCCL", "ok", "; ".join(words))
    return None, Row("two ranks over NCCL", "skipped", "; ".join(words))


def _compared(case: Case, there: dict[str, Any], beside: dict[str, Any], device: str) -> Row:
    sums = [float(said.get("sum", "nan")) for said in (there, beside)]
    near = abs(sums[0] - sums[1]) < 1e-3 * abs(sums[1])
    good = there.get("same") and beside.get("same") and near
    why = " ".join(said["why"] for said in (there, beside) if "why" in said)
    figures = f"sum of weights {sums[0]}, over gloo {sums[1]} {why}".strip()
    name = "NCCL" if device == "cuda" else "gloo twice, no CUDA device here"
    return Row(f"{case}, {name}", "ok" if good else "FAILS", figures)


def _ranks(case: Case, backend: str, limit_s: float, more: dict[str, str]) -> dict[str, Any]:
    """Start the processes of a case; returns what rank 0 said, or `why` it said nothing."""
    with tempfile.TemporaryDirectory() as folder:
        asked = json.dumps({**asdict(case), "backend": backend, "folder": folder})
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks._gpu_ranks", asked, str(rank)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, **more, **({"NCCL_HOSTID": f"apart{rank}"} if more is APART else {})},
            )
            for rank in range(case.ranks)
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
    errors = [text.strip().splitlines()[-1][:200] for _, text in said if text.strip()]
    if any(process.returncode for process in started):
        return {"why": (errors or [f"exit code {started[0].returncode}"])[0]}
    answer: dict[str, Any] = json.loads(said[0][0].splitlines()[-1])
    return answer


def rank_main(case: Case, backend: str, folder: str, rank: int) -> None:
    """Be one rank of a case: a few steps of a small network through the hook."""
    from echelon.collectives import registry as paths
    from echelon.collectives.hook import GradientHook
    from echelon.compression import read
    from echelon.parallel.sync_batchnorm import convert_sync_batchnorm

    torch.set_num_threads(1)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    store = dist.FileStore(f"{folder}/store", case.ranks)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=case.ranks, timeout=timedelta(seconds=30),
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    torch.manual_seed(0)
    norm = [nn.BatchNorm2d(16)] if case.batchnorm else []
    model: nn.Module = nn.Sequential(
        nn.Conv2d(1, 16, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 64), nn.Linear(64, 10)
    )
    if case.batchnorm:
        model = convert_sync_batchnorm(model, dist.distributed_c10d._get_default_group())
    ddp = DistributedDataParallel(model.to(device), device_ids=[device] if device.type == "cuda" else None)
    hook = GradientHook(None, read(case.compression), paths.build(case.collective), average=True)
    hook.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(case.steps):
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


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    where = (told.pop("backend"), told.pop("folder"), int(sys.argv[2]))
    rank_main(Case(**told), *where)
