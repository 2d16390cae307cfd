"""Accelerate with a strategy of Echelon: wrap what `prepare` returns.

torchrun --nproc-per-node 2 examples/wrap_accelerate.py --sync "easgd(10)"
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
    parser.add_argument("--sync", default="local(8)")
    parser.add_argument("--compression", default="none")
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
    replica = echelon.wrap(model, optimizer, args.sync, args.compression)  # <- here

    for _ in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(replica.model(x), y))
            optimizer.step()
    with replica.agreed(), torch.no_grad():  # <- and here: what the replicas agree on
        plain = accelerator.unwrap_model(model)
        inputs, targets = images[1500:].to(accelerator.device), labels[1500:].to(accelerator.device)
        accuracy = (plain(inputs).argmax(dim=1) == targets).float().mean().item()
    sent = replica.bytes_sent / replica.steps
    accelerator.print(f"accuracy {accuracy:.3f}, {sent:.0f} bytes sent per step and rank")
    replica.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
