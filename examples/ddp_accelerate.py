"""Accelerate with compressed gradients: attach the hook to what `prepare` returns.

torchrun --nproc-per-node 2 examples/ddp_accelerate.py --compression "topk(density=0.01)"
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", default="powersgd(rank=2)")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    hook = echelon.ddp_hook(args.compression)
    hook.attach(model, optimizer)  # <- here

    for _ in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
    plain = accelerator.unwrap_model(model).cpu()
    with torch.no_grad():
        accuracy = (plain(images[1500:]).argmax(dim=1) == labels[1500:]).float().mean().item()
    accelerator.print(f"accuracy {accuracy:.3f}, {hook.wire.total / hook.wire.steps:.0f} bytes sent per step and rank")
    hook.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
