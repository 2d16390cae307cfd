"""Memory of four ranks of models and ways drawn by a seed, beside the forecast: of a dry run, and from two ranks' runs.

    python -m benchmarks.memory_drawn --seed 1              the dry run's
    python -m benchmarks.memory_drawn --seed 1 --learnt     with what two ranks of the same model took beyond it

What is measured, and how, is said in `benchmarks/memory.py`.
"""

from __future__ import annotations

import argparse
import os
import random

from benchmarks._common import (
    append_result,
    command_line,
    environment_line,
    markdown_table,
    read_results,
    update_section,
)
from benchmarks._memory_rank import Case, build_case, config_of, info
from benchmarks.memory import MMAP, measure_peaks, peaks_of, read_case, row_of, worst_of

DRAWN, DRAWN_TITLE = "memory_drawn", "Memory of cases drawn by a seed"
DRAWN_MODELS = (
    *("timm/resnet18", "timm/mobilenetv3_large_100", "timm/efficientnet_b0", "timm/convnext_pico", "timm/regnetx_008"),
    *("timm/densenet121", "timm/repvgg_a0", "timm/ghostnet_100", "timm/vit_tiny_patch16_224", "timm/edgenext_small"),
    *("torchvision/mobilenet_v2", "torchvision/shufflenet_v2_x1_0"),
)
DRAWN_WAYS = (
    *(f"{way}:none:allreduce:none" for way in ("dp=4:momentum", "dp=4:adamw", "dp=4,zero1:adamw", "fsdp=4:adamw")),
    *(f"dp=4:momentum:none:allreduce:{codec}" for codec in ("bf16", "int8", "sign", "topk(0.01)", "powersgd(2)")),
    *(f"dp=4:momentum:none:{sync}:none" for sync in ("local(2)", "local(4, overlap=2)", "diloco(2)")),
    *(f"dp=4:momentum:none:{way}" for way in ("local(2):int8", "diloco(2):int8", "local(4, overlap=2):sign")),
)
DRAWN_BATCH = 64
LEARNT, LEARNT_TITLE = "memory_learnt", "Memory of cases drawn by a seed, from runs of two ranks"


def drawn(seed: int, count: int) -> list[str]:
    """Return cases of four ranks: a model and a way each."""
    draw = random.Random(f"memory {seed}")
    return [f"{draw.choice(DRAWN_MODELS)}:{draw.choice(DRAWN_WAYS)}:{DRAWN_BATCH}" for _ in range(count)]


def measure_learnt(cases: list[str]) -> None:
    """Measure each case, predicted from what two ranks of its model took with the same optimizer, and append it."""
    os.environ.update(MMAP)
    of_two: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for text in cases:
        case = read_case(text)
        key = case.model, case.optimizer
        if key not in of_two:
            batches = (DRAWN_BATCH, DRAWN_BATCH // 2)
            of_two[key] = [(b, max(peaks_of(Case(case.model, "dp=2", case.optimizer, batch=b))[0])) for b in batches]
        measured = max(peaks_of(case)[0])
        alone, learnt = (_learnt(case, known) for known in ([], of_two[key]))
        print(
            f"{text}: measured {measured}, predicted {alone}, learnt {learnt}, {learnt / measured - 1:+.1%}", flush=True
        )
        result = {"case": text, "measured": measured, "predicted": alone, "learnt": learnt, "of_two": of_two[key]}
        append_result(LEARNT, {**result, "command": command_line("benchmarks.memory_drawn")})


def _learnt(case: Case, known: list[tuple[int, int]]) -> int:
    """Predict the fullest rank from batches of two ranks, and the bytes that these took."""
    import torch

    from echelon.planning.calibration import MeasuredMemory
    from echelon.planning.layouts import DescribedModel

    with torch.device("meta"):
        model = build_case(case.model)
    described = DescribedModel(config_of(case), info(), model)
    of_two = {"strategy.parallel": "dp=2", "strategy.sync": "allreduce", "strategy.compression": "none"}
    described.learn([MeasuredMemory(of_two, 2, batch, taken) for batch, taken in known])
    settings = {"sync": case.sync, "compression": case.compression, "parallel": case.parallel}
    return described.memory({f"strategy.{name}": text for name, text in settings.items()}, case.ranks, case.batch)


def render_drawn() -> str:
    """Write the results of drawn cases, the worst last."""
    newest = {r["case"]: r for r in read_results(DRAWN)}
    off = {text: worst_of(result) for text, result in newest.items()}
    rows = [row_of(read_case(text), False, newest[text]) for text in sorted(newest, key=lambda text: abs(off[text]))]
    header = ("model", "layout", "optimizer", "recompute", "sync", "compression", "mmap from", "predicted MB",
              "measured MB", "off by")  # fmt: skip
    middle = sorted(map(abs, off.values()))[len(off) // 2]
    last = next(reversed(newest.values()))
    said = (
        f"As above, four ranks, batch {last['batch']} of 32x32 images: median error {middle:.1%}, worst "
        f"{max(map(abs, off.values())):.1%}; {sum(abs(each) <= 0.05 for each in off.values())} of {len(off)} within 5%."
    )
    where = environment_line(last["command"], last["environment"])
    return "\n\n".join([where, said, markdown_table(header, rows)])


def render_learnt() -> str:
    """Write the results of cases predicted from two ranks, the worst last."""
    newest = {r["case"]: r for r in read_results(LEARNT)}
    off = {text: r["learnt"] / r["measured"] - 1 for text, r in newest.items()}
    alone = sorted(abs(r["predicted"] / r["measured"] - 1) for r in newest.values())
    rows = []
    for text in sorted(newest, key=lambda text: abs(off[text])):
        case, result = read_case(text), newest[text]
        sizes = (f"{result[name] / 1e6:.0f}" for name in ("predicted", "learnt", "measured"))
        rows.append(
            (case.model, case.parallel, case.optimizer, case.sync, case.compression, *sizes, f"{off[text]:+.1%}")
        )
    header = (
        "model",
        "layout",
        "optimizer",
        "sync",
        "compression",
        "dry run MB",
        "predicted MB",
        "measured MB",
        "off by",
    )
    middle, last = sorted(map(abs, off.values()))[len(off) // 2], next(reversed(newest.values()))
    said = (
        f"Four ranks, batch {DRAWN_BATCH} of 32x32 images, predicted by the dry run and what two ranks of the same "
        f"model took beyond it with batches of {DRAWN_BATCH} and {DRAWN_BATCH // 2}: median error {middle:.1%}, worst "
        f"{max(map(abs, off.values())):.1%}, {sum(abs(e) <= 0.05 for e in off.values())} of {len(off)} within 5%. "
        f"By the dry run alone: median {alone[len(alone) // 2]:.1%}, worst {alone[-1]:.1%}."
    )
    where = environment_line(last["command"], last["environment"])
    return "\n\n".join([where, said, markdown_table(header, rows)])


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="so many cases")
    parser.add_argument("--learnt", action="store_true", help="predict from two ranks of the same model")
    options = parser.parse_args()
    if options.learnt:
        measure_learnt(drawn(options.seed, options.count))
        update_section(LEARNT_TITLE, render_learnt())
    else:
        measure_peaks(drawn(options.seed, options.count), False, DRAWN)
        update_section(DRAWN_TITLE, render_drawn())


if __name__ == "__main__":
    main()
