"""Memory of each layout: measured peaks beside the dry run's forecast, and a model that fits no single process.

    python -m benchmarks.memory peaks [--cases vit:fsdp=2:adamw ...]   # about ten minutes on two cores
    python -m benchmarks.memory limit [--layouts dp=1 fsdp=2 ...]       # about five minutes
    python -m benchmarks.memory render

Peaks: each case in fresh processes, which take three steps of a ViT of 30 M parameters (or a convolutional network,
or a stack of linear layers). Measured is by how much the resident set's peak exceeds what was resident after a small
training, which loads libraries. glibc keeps what is freed below a size that it raises by itself, so that a heap is
larger than what is in it: the variable below stops this (`--heap` measures without it).

Limit: `echelon train` on a ViT of 59 M parameters under a limit of each process's data segment (RLIMIT_DATA): what a
training of a small model takes, and a part of the training state more. It holds for every process of the run.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks._common import (
    REPOSITORY,
    append_result,
    command_line,
    environment_line,
    markdown_table,
    read_results,
    update_section,
)
from benchmarks._memory_rank import Case, build_case, config_of, info, measure_rank

NAME, TITLE = "memory", "Memory: predicted and measured"
MMAP = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # glibc's own at the start, held there
CASES = (
    *(f"vit:{layout}:adamw" for layout in ("dp=1", "dp=2", "dp=2,zero1", "fsdp=2", "tp=2", "pp=2,microbatches=4")),
    *(f"vit:{layout}:momentum" for layout in ("dp=2", "fsdp=2", "tp=2", "pp=2,microbatches=4")),
    *(f"vit:{layout}:adamw:blocks" for layout in ("dp=2", "fsdp=2", "tp=2")),
    "resnet:dp=2:momentum",
    "resnet:fsdp=2:momentum",
    "mlp:fsdp=2:adamw",
    *(f"vit:{layout}:adamw" for layout in ("tp=2,sequence", "fsdp=2,tp=2", "dp=2,fsdp=2", "dp=2,tp=2")),
    "vit:dp=2:adamw:selective",
    *(f"vit:dp=2:adamw:none:{way}" for way in ("local(2)", "diloco(2)", "diloco(2):int8", "allreduce:int8")),
    "vit:dp=2:momentum:none:allreduce:topk(0.01)",
)
WAIT_S = 300
SHARE = 0.9  # of the training state of one process that the limit leaves


def read_case(text: str) -> Case:
    """Read MODEL:LAYOUT:OPTIMIZER[:RECOMPUTE[:SYNC[:COMPRESSION[:BATCH]]]]."""
    words = text.split(":")
    names = ("model", "parallel", "optimizer", "recompute", "sync", "compression")
    settings: dict[str, Any] = dict(zip(names, words, strict=False))
    return Case(**settings, batch=int(words[6]) if len(words) > 6 else Case.batch)


def peaks_of(case: Case) -> tuple[list[int], tuple[str, ...]]:
    """Run a case; returns each rank's peak in bytes, and where a pipeline was cut."""
    import torch.distributed as dist

    one = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", 0, case.ranks, True, one, wait_for_workers=False)
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for rank in range(case.ranks):
        ours, theirs = context.Pipe()
        arguments = (case, rank, ("127.0.0.1", store.port), theirs)
        processes.append(context.Process(target=measure_rank, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        found = []
        for pipe in pipes:
            if not pipe.poll(WAIT_S):
                raise TimeoutError(f"{case} did not finish in {WAIT_S} s")
            found.append(pipe.recv())
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
    return [peak for peak, _ in found], found[0][1]


def predicted(case: Case, cuts: tuple[str, ...]) -> list[int]:
    """Return what the dry run says, for each rank; a pipeline cut as the measured one was."""
    from dataclasses import replace

    import torch

    from echelon.forecast.memory import forecast
    from echelon.run.resolve import resolve

    run = replace(resolve(config_of(case)), cuts=tuple(cuts))
    with torch.device("meta"):
        model = build_case(case.model)
    memory = forecast(run, info(), case.ranks, model).memory
    return [each.peak for each in memory] if len(memory) == case.ranks else [memory[0].peak] * case.ranks


def measure_peaks(cases: list[str], heap: bool, name: str = NAME) -> None:
    """Measure each case, and append its raw result."""
    if not heap:
        os.environ.update(MMAP)
    for text in cases:
        case = read_case(text)
        measured, cuts = peaks_of(case)
        forecast = predicted(case, cuts)
        off = max((abs(f / m - 1), f / m - 1) for f, m in zip(forecast, measured, strict=True))[1]
        print(f"{text}: measured {measured}, predicted {forecast}, {off:+.1%}", flush=True)
        result = {"case": text, "heap": heap, "measured": measured, "predicted": forecast, "batch": case.batch}
        append_result(name, {**result, "command": command_line("benchmarks.memory")})


def _limited(megabytes: int) -> Any:
    def limit() -> None:
        if megabytes:
            resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))

    return limit


def _train(layout: str, small: bool, megabytes: int) -> tuple[int, int, str]:
    """Run `echelon train` under a limit; returns its exit code, the largest data segment in MB, and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        name = "_memory_model:small" if small else "_memory_model:large"
        command = [sys.executable, "-m", "echelon", "train", "digits", "--model", name, "--parallel", layout]
        command += ["--workers", "1" if layout == "dp=1" else "2", "--batch-size", "16", "--max-steps", "3"]
        command += ["--optimizer", "adamw", "--lr", "1e-4", "--run", f"{folder}/run", "--max-restarts", "0"]
        environment = {**os.environ, **MMAP, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY / 'benchmarks'}"}
        environment |= {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        with (Path(folder) / "said").open("w+") as said:
            process = subprocess.Popen(
                command, env=environment, preexec_fn=_limited(megabytes), cwd=folder, stdout=said, stderr=said
            )
            try:
                most = _watch(process)
            finally:
                process.terminate()  # the launcher ends its ranks
                process.wait(60)
            said.seek(0)
            return process.returncode, most, said.read()


def _watch(process: subprocess.Popen[bytes]) -> int:
    """Wait until a command ends; returns the largest data segment of its processes in MB."""
    most, ends = 0, time.monotonic() + WAIT_S
    while process.poll() is None:
        if time.monotonic() > ends:
            raise TimeoutError(f"a training did not end in {WAIT_S} s")
        most = max([most, *map(_data_megabytes, _descendants(process.pid))])
        with suppress(subprocess.TimeoutExpired):  # look again
            process.wait(0.1)
    return most


def _descendants(pid: int) -> list[int]:
    import psutil

    with suppress(psutil.Error):  # it ended just now
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [pid]


def _data_megabytes(pid: int) -> int:
    with suppress(OSError):  # it ended just now: it has none
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) >> 10
    return 0


def state_megabytes() -> int:
    """Return what a training with AdamW has of the large model beside activations: four numbers a parameter."""
    import torch

    from benchmarks._memory_model import large
    from echelon.models import ModelInput

    with torch.device("meta"):
        return sum(p.nbytes for p in large(ModelInput(10, 1, 8)).parameters()) * 4 >> 20


def measure_limit(layouts: list[str]) -> None:
    """Find the limit, and train under it in each layout."""
    code, base, said = _train("fsdp=2", True, 0)
    if code:
        raise RuntimeError(f"the small training failed: {said[-2000:]}")
    state = state_megabytes()
    limit = base + round(SHARE * state)
    for layout in layouts:
        code, most, said = _train(layout, False, limit)
        words = _last_words(said) if code else ""
        print(f"{layout} under {limit} MB: exit code {code}, at most {most} MB. {words}", flush=True)
        result = {"layout": layout, "limit": limit, "base": base, "state": state, "most": most, "code": code}
        append_result("memory_limit", {**result, "words": words, "command": command_line("benchmarks.memory")})


def _last_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if "memory" in line.lower()] or said.strip().splitlines()[-1:]
    return lines[0][:450] if lines else ""


def render() -> str:
    """Write the newest results."""
    newest = {(r["case"], r["heap"]): r for r in read_results(NAME)}
    rows = [row_of(read_case(text), heap, result) for (text, heap), result in newest.items()]
    header = ("model", "layout", "optimizer", "recompute", "sync", "compression", "mmap from", "predicted MB",
              "measured MB", "off by")  # fmt: skip
    last = next(reversed(newest.values()))
    parts = [
        environment_line(last["command"], last["environment"]),
        f"Peak of each rank's resident set beyond that of a small training, batch {last['batch']}; ViT of 30 M, "
        "ResNet-50 of 24 M and a stack of linear layers of 57 M parameters. `mmap from`: size from which glibc "
        "gives freed memory back (`MALLOC_MMAP_THRESHOLD_`); as it is, freed tensors stay in a heap with holes.",
        markdown_table(header, rows),
        *_render_limit(),
    ]
    return "\n\n".join(parts)


def worst_of(result: dict[str, Any]) -> float:
    ratios = [p / m - 1 for p, m in zip(result["predicted"], result["measured"], strict=True)]
    return float(max(ratios, key=abs))


def row_of(case: Case, heap: bool, result: dict[str, Any]) -> tuple[str, ...]:
    pairs = list(zip(result["predicted"], result["measured"], strict=True))
    return (
        case.model, case.parallel, case.optimizer, case.recompute, case.sync, case.compression,
        "as it is" if heap else "128 KiB",
        " / ".join(f"{predicted / 1e6:.0f}" for predicted in sorted({p for p, _ in pairs}, reverse=True)),
        " / ".join(f"{measured / 1e6:.0f}" for _, measured in pairs),
        f"{worst_of(result):+.1%}",
    )  # fmt: skip


def _render_limit() -> list[str]:
    newest = {r["layout"]: r for r in read_results("memory_limit") if "layout" in r}
    if not newest:
        return []
    last = next(reversed(newest.values()))
    rows = [
        (each["layout"], each["limit"], each["most"], "trains" if not each["code"] else "fails", each["words"])
        for each in newest.values()
    ]
    return [
        f"`echelon train` of a ViT of 59 M parameters, AdamW (training state {last['state']} MB and activations), "
        f"with a limit on each process's data segment: that of a small training ({last['base']} MB) and {SHARE:.0%} "
        f"of the training state.\n\n{environment_line('python -m benchmarks.memory limit', last['environment'])}",
        markdown_table(("layout", "limit MB", "most MB", "outcome", "what it says"), rows),
    ]


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("peaks", "limit", "render"))
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), help="MODEL:LAYOUT:OPTIMIZER[:RECOMPUTE[:SYNC[:CODEC]]]"
    )
    parser.add_argument("--layouts", nargs="+", default=["dp=1", "fsdp=2", "tp=2", "pp=2"], help="of `limit`")
    parser.add_argument("--heap", action="store_true", help="leave glibc's heap as it is")
    options = parser.parse_args()
    if options.what == "peaks":
        measure_peaks(options.cases, options.heap)
    elif options.what == "limit":
        measure_limit(options.layouts)
    if read_results(NAME):
        update_section(TITLE, render())


if __name__ == "__main__":
    main()
