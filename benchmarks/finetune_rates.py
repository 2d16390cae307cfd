"""Which learning rate keeps what given weights are worth: the reason of the default with `--weights`.

python -m benchmarks.finetune_rates FOLDER [--base FILE] [--seeds 3] [--cases all@0.01 ...]

FOLDER has train/CLASS and test/CLASS of CIFAR-10. A ResNet-20 at 16 pixels learns eight classes (700 images of each, 7
epochs), and is tuned to the other two with 50 images of each for 20 epochs (100 steps of 20), by SGD as the product
sets it; `scratch` begins with new values. Models, weights and what is trained are the product's; the loop is a plain
one in one process, so that a case takes seconds.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from benchmarks._common import command_line, environment_line, markdown_table, update_section
from echelon.config.schema import ModelConfig
from echelon.models import ModelInput, build_model, load_state
from echelon.models.tuning.plan import tuning_plan
from echelon.optim.own import weight_decay_groups

SIDE, BATCH, EPOCHS = 16, 20, 20
SCRATCH = "scratch"
CASES = (
    *("scratch@0.1", "scratch@0.03", "all@0.1", "all@0.03", "all@0.01", "layer_decay(0.75)@0.1"),
    *("layer_decay(0.75)@0.01", "lora@0.1", "lora@0.01", "head@0.1", "head@0.01"),
)


def images(part: Path, classes: Sequence[str], each: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return normalised images `(N, 3, SIDE, SIDE)` of some classes, drawn by a seed, and their numbers."""
    pixels, numbers = [], []
    for number, name in enumerate(classes):
        files = sorted((part / name).iterdir())
        random.Random(f"{seed}{name}").shuffle(files)
        for file in files[:each]:
            pixels.append(np.asarray(Image.open(file).convert("RGB").resize((SIDE, SIDE))))
            numbers.append(number)
    stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float()
    return (stacked - stacked.mean((0, 2, 3), keepdim=True)) / 64, torch.tensor(numbers)


def fit(
    model: nn.Module, data: tuple[Tensor, Tensor], epochs: int, batch: int, lr: float, seed: int,
    rates: Mapping[str, float],
) -> None:  # fmt: skip
    """Train by SGD with the product's defaults: Nesterov's momentum, a cosine, no decay of biases; flips."""
    inputs, targets = data
    draws = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(weight_decay_groups(model, 5e-4, rates), lr=lr, momentum=0.9, nesterov=True)
    steps = math.ceil(len(inputs) / batch) * epochs
    step = 0
    for _ in range(epochs):
        model.train()
        for chosen in torch.randperm(len(inputs), generator=draws).split(batch):
            for group in optimizer.param_groups:
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps)) * group.get("lr_scale", 1.0)
            own = inputs[chosen].flip(3) if torch.rand(1, generator=draws) < 0.5 else inputs[chosen]
            optimizer.zero_grad()
            F.cross_entropy(model(own), targets[chosen]).backward()
            optimizer.step()
            step += 1


@torch.no_grad()
def top1(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Return the share of images that are told right."""
    model.eval()
    return float((model(data[0]).argmax(1) == data[1]).double().mean())


def network(classes: int, seed: int) -> nn.Module:
    """Return a ResNet-20 with new values."""
    torch.manual_seed(seed)
    return build_model(ModelConfig(name="resnet20"), ModelInput(classes, 3, SIDE))


def base_of(folder: Path, classes: Sequence[str], file: Path) -> Mapping[str, Tensor]:
    """Return the weights that have learnt eight classes; they are trained where the file is not there."""
    if not file.exists():
        model = network(len(classes), 0)
        fit(model, images(folder / "train", classes, 700), 7, 64, 0.1, 0, {})
        print(f"base: top-1 {top1(model, images(folder / 'test', classes, 125)):.4f}", flush=True)
        torch.save(model.state_dict(), file)
    weights: Mapping[str, Tensor] = torch.load(file, weights_only=True)
    return weights


def measure(folder: Path, base: Path, cases: Sequence[str], seeds: int) -> str:
    """Return the table of accuracies on the two classes."""
    classes = sorted(path.name for path in (folder / "train").iterdir())
    weights = base_of(folder, classes[:8], base)
    test = images(folder / "test", classes[8:], 500)
    rows = []
    for case in cases:
        tune, _, rate = case.rpartition("@")
        found, began = [], time.perf_counter()
        for seed in range(seeds):
            model, rates = network(2, seed), {}
            if tune != SCRATCH:
                load_state(model, weights, "base")
                rates = dict(tuning_plan(tune, "eval").apply(model).rates)
            fit(model, images(folder / "train", classes[8:], 50, seed), EPOCHS, BATCH, float(rate), seed, rates)
            found.append(top1(model, test))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        each = " ".join(f"{value:.3f}" for value in found)
        seconds = (time.perf_counter() - began) / seeds
        rows.append([tune, rate, f"{trained:,}", f"{statistics.fmean(found):.4f}", each, f"{seconds:.1f} s"])
        print(*rows[-1], sep=" | ", flush=True)
    header = ["from", "rate", "trained parameters", "top-1 on two classes", "by seed", "time of a seed"]
    return markdown_table(header, rows)


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", type=Path, default=Path("finetune-base.pt"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--print", action="store_true", help="leave RESULTS.md as it is")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = measure(options.folder, options.base, options.cases, options.seeds)
    print(table)
    if not options.print:
        update_section(
            "Fine-tuning: its rate", f"{table}\n\n{environment_line(command_line('benchmarks.finetune_rates'))}"
        )


if __name__ == "__main__":
    main()
