"""Images per second on one GPU: Echelon beside a hand-written loop and timm's own training script.

    python -m benchmarks.gpu                                          # ResNet-50 and ViT-B/16, synthetic images
    python -m benchmarks.gpu --folder IMAGES                          # and from an image folder (train/CLASS/*.JPEG)
    python -m benchmarks.gpu --timm-train pytorch-image-models/train.py
    python -m benchmarks.gpu --precisions                             # fp32, bf16, fp16 and fp8 with their losses
    python -m benchmarks.gpu --small                                  # small images: kept on the GPU, CUDA graphs

Contenders take turns, each a process of its own; a figure is the median over the rounds. The share of the device's
matrix rate is images/s x operations of forward and backward over what a bf16 product of 8192 x 8192 reaches here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._common import (
    append_result,
    command_line,
    environment_line,
    interleave,
    markdown_table,
    median,
    paired_ratio,
    update_section,
)
from benchmarks._gpu_small import small
from echelon.records.file import read_records
from echelon.records.kinds import Steps

NAME = "gpu"
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
LIMIT_S = 540.0
_HAND = {
    "hand-written": [],
    "hand-written, fused, cuDNN by trial": ["--fused"],
    "the same, one batch on the device": ["--fused", "--resident"],
}
ON_GPU = "echelon, JPEG files decoded on the GPU"


def main() -> None:
    """Measure, and write the tables."""
    args = _options()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: no CUDA device here; --device cpu with a small model only tries the script")
    peak = matrix_rate(args.device)
    if args.small:
        sections = [small(args)]
    else:
        sections = [precisions(args)] if args.precisions else [rates(model, args, peak) for model in args.models]
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    head = f"{environment_line(command_line('benchmarks.gpu'))}\n\nDevice: {device}, {peak / 1e12:.0f} TFLOP/s in bf16."
    title = "GPU: precisions and losses" if args.precisions else "GPU: images per second"
    title = "GPU: small images" if args.small else title
    text = "\n\n".join([head, *sections])
    print(text) if args.print else update_section(title, text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet50", "vit_base_patch16_224"])
    parser.add_argument("--folder", default="", help="image folder: measured beside the synthetic images")
    parser.add_argument("--timm-train", default="", help="timm's train.py; without it that contender is left out")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    for name, default in (("batch", 256), ("steps", 60), ("warm-up", 20), ("image", 224), ("loaders", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", default=[], help="of the contenders those with these names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--precisions", action="store_true", help="one run in each precision, with its losses")
    parser.add_argument("--small", action="store_true", help="small images and short layers, eager, compiled, replayed")
    parser.add_argument("--print", action="store_true", help="to the terminal, not into RESULTS.md")
    return parser.parse_args()


def matrix_rate(device: str) -> float:
    """Return the operations per second of a large bf16 product: the median of several."""
    side = 8192 if device == "cuda" else 256
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    import time

    found = []
    for _ in range(12):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(2 * side**3 / (time.perf_counter() - began))
    return median(found[2:])


def operations_per_image(model: str, image: int) -> int:
    """Count the floating-point operations of forward and backward for one image."""
    import timm
    from torch.utils.flop_counter import FlopCounterMode

    net = timm.create_model(model, num_classes=1000).eval()
    counter = FlopCounterMode(display=False)
    with counter:
        net(torch.randn(1, 3, image, image)).sum().backward()
    return int(counter.get_total_flops())


def rates(model: str, args: argparse.Namespace, peak: float) -> str:
    """Measure one model: a table of images per second by contender, for synthetic images and for the folder."""
    operations = operations_per_image(model, args.image)
    rows = []
    for source in ["synthetic", *([args.folder] if args.folder else [])]:
        folder = "" if source == "synthetic" else source
        contenders = [c for c in _contenders(args, bool(folder)) if not args.only or c in args.only]
        found: dict[str, list[float]] = {contender: [] for contender in contenders}
        for _, contender in interleave(contenders, args.rounds):
            result = _run(contender, model, folder, args.precision, args)
            found[contender].append(result["images_per_s"])
            print(f"{model}, {source}, {contender}: {result['images_per_s']:.0f} images/s", file=sys.stderr, flush=True)
            append_result(NAME, {"model": model, "source": source, "contender": contender, **result})
        for contender, values in found.items():
            ratio = paired_ratio(found["echelon"], values) if "echelon" in found else math.nan
            share = median(values) * operations / peak
            rows.append(
                [contender, "folder" if folder else source, f"{median(values):.0f}", f"{ratio:.3f}", f"{share:.1%}"]
            )
    header = ["contender", "images", "images/s", "Echelon / this", "share of the matrix rate"]
    terms = f"{model}, {args.image}x{args.image}, batch {args.batch}, {args.precision}, channels_last"
    return f"**{terms}{'' if args.no_compile else ', compiled'}**\n\n{markdown_table(header, rows)}"


def _contenders(args: argparse.Namespace, files: bool) -> list[str]:
    hand = [name for name, settings in _HAND.items() if not (files and "--resident" in settings)]
    return ["echelon", *([ON_GPU] if files else []), *hand, *(["timm"] if args.timm_train else [])]


def precisions(args: argparse.Namespace) -> str:
    """Run each precision from the same parameters on the same batches: images per second, first and last loss."""
    parts = []
    for model in args.models:
        rows = []
        for precision in PRECISIONS:
            result = _run("echelon", model, "", precision, args)
            append_result(NAME, {"model": model, "precision": precision, **result})
            losses = result["losses"]
            said = result.get("refused") or f"{losses[0]:.4f}, {losses[len(losses) // 2]:.4f}, {losses[-1]:.4f}"
            rows.append([precision, f"{result['images_per_s']:.0f}", said])
        parts.append(f"**{model}**\n\n" + markdown_table(["precision", "images/s", "loss: first, middle, last"], rows))
    return "\n\n".join(parts)


def _run(contender: str, model: str, folder: str, precision: str, args: argparse.Namespace) -> dict[str, Any]:
    if contender.startswith("echelon"):
        return _echelon(model, folder, precision, args, ["--decode", "gpu"] if contender == ON_GPU else [])
    if contender == "timm":
        return _timm(model, folder, precision, args)
    command = [sys.executable, "-m", "benchmarks._gpu_hand", "--model", model, "--precision", precision]
    command += ["--device", args.device, "--folder", folder, "--batch", str(args.batch), "--steps", str(args.steps)]
    command += ["--warm-up", str(args.warm_up), "--image", str(args.image), "--loaders", str(args.loaders)]
    command += _HAND.get(contender, [])
    answer: dict[str, Any] = json.loads(_output(command + ["--no-compile"] * args.no_compile).splitlines()[-1])
    return answer


def _echelon(
    model: str, folder: str, precision: str, args: argparse.Namespace, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Run `echelon train` and read its record; the steps before the warm-up's end do not count."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        command = [sys.executable, "-m", "echelon", "train", folder or "benchmarks.gpu_data:synthetic", "--model"]
        command += [f"timm/{model}", "--precision", precision, "--channels-last", "on", "--workers", "1", "--run"]
        command += [str(run), "--device", args.device, "--batch-size", str(args.batch), "--max-steps", str(args.steps)]
        command += ["--eval-every", "0", "--schedule", "constant", "--epochs", "1000", "--image-size", str(args.image)]
        command += ["--checkpoint-every", "100000"]
        command += [
            *more,
            *([] if more else ["--loaders", str(args.loaders)]),
            "--augment",
            "imagenet" if folder else "none",
            *([] if args.no_compile else ["--compile"]),
        ]
        try:
            _output(
                command, ECHELON_BENCH_IMAGES=str(max(200, args.steps) * args.batch), ECHELON_BENCH_SIDE=str(args.image)
            )
        except subprocess.CalledProcessError as error:
            if error.returncode != 2:  # 2: refused in words, such as fp8 on a device without it
                raise
            return {"images_per_s": 0.0, "losses": [], "refused": error.stderr.strip().splitlines()[-1]}
        windows = read_records(run, Steps)
    counted = [w for w in windows if w.step - w.count >= args.warm_up] or windows[-1:]
    rate = sum(w.samples for w in counted) / sum(w.seconds for w in counted)
    return {"images_per_s": rate, "losses": [loss for w in windows for loss in w.losses]}


def _timm(model: str, folder: str, precision: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run timm's script and take the mean rate of its last line of progress."""
    command = [sys.executable, args.timm_train, "--model", model, "-b", str(args.batch), "--num-classes", "1000"]
    command += ["--channels-last", "--opt", "sgd", "--lr", "0.1", "--workers", str(args.loaders), "--epochs", "1"]
    command += ["--log-interval", "10", "--device", args.device, *([] if args.no_compile else ["--torchcompile"])]
    command += ["--amp", "--amp-dtype", {"bf16": "bfloat16", "fp16": "float16"}[precision]]
    command += ["--data-dir", folder] if folder else ["--synthetic-data", "--data-dir", "."]
    found = re.findall(r"([\d,.]+)/s\)", _output(command))
    return {"images_per_s": float(found[-1].replace(",", "")), "losses": []}


def _output(command: list[str], **variables: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**os.environ, **variables}
    )
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    done.check_returncode()
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
