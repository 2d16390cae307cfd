"""One fine-tuning of a small vision transformer, by the product or by hand: seconds of a step, and peak memory.

python -m benchmarks._finetune_hand echelon|hand head|all|lora STEPS
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from itertools import islice, repeat
from pathlib import Path

import timm
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, SIDE, CLASSES, RATE, RANK = 32, 64, 10, 1e-3, 8
TUNES = {"head": "head", "all": "all", "lora": f"lora(r={RANK}, targets=qkv)"}


def model() -> nn.Module:
    """Return the model, whose values stand for somebody's weights."""
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=SIDE, num_classes=CLASSES)


def data(samples: int) -> TensorDataset:
    """Return images of noise: what they show does not change what a step costs."""
    numbers = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, 3, SIDE, SIDE, generator=numbers), torch.arange(samples) % CLASSES)


def by_hand(kind: str, steps: int) -> float:
    """Train as a script of peft and torch would; returns the mean seconds of a step, the first quarter left out."""
    network = model()
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        network = get_peft_model(
            network, LoraConfig(r=RANK, lora_alpha=16, target_modules=["qkv"], modules_to_save=["head"])
        )
    elif kind == "head":
        network.requires_grad_(False)
        network.head.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], RATE, weight_decay=0.0)
    loader = DataLoader(data(BATCH * 8), BATCH, shuffle=True, drop_last=True)
    batches = islice((batch for every in repeat(loader) for batch in every), steps)
    network.train()
    times, last = [], time.perf_counter()
    for images, classes in batches:
        loss = nn.functional.cross_entropy(network(images), classes)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in network.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        float(loss)
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return _mean_of_late(times)


def by_echelon(kind: str, steps: int) -> float:
    """Train with the product; returns the same seconds."""
    import echelon

    samples = data(BATCH * 8)
    with tempfile.TemporaryDirectory() as folder:
        outcome = echelon.train(
            model(), (samples, TensorDataset(*samples[:BATCH])), Path(folder) / "run",
            optimizer="adamw", lr=RATE, weight_decay=0.0, clip_norm=1.0, schedule="constant", batch_size=BATCH,
            epochs=-(-steps // 8), max_steps=steps, eval_every=10**6, workers=1, device="cpu", tune=TUNES[kind],
            threads=torch.get_num_threads(),
        )  # fmt: skip
        return BATCH / float(outcome.summary["samples_per_s"])


def _mean_of_late(times: list[float]) -> float:
    late = times[len(times) // 4 :]
    return sum(late) / len(late)


def main() -> None:
    """Train once, and print seconds of a step and the peak of resident memory in bytes."""
    who, kind, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    seconds = (by_hand if who == "hand" else by_echelon)(kind, steps)
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))


if __name__ == "__main__":
    main()
