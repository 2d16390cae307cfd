"""A loop of one's own with a strategy of Echelon: here replicas step by themselves and average every 8 steps.

torchrun --nproc-per-node 2 examples/wrap_plain.py --sync "diloco(20)" --compression int8
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import echelon


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sync", default="local(8)")
    parser.add_argument("--compression", default="none")
    parser.add_argument("--collective", default="backend")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    )
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).flatten(1) / 16
    labels = torch.tensor(digits.target, device=device)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = echelon.wrap(model, optimizer, args.sync, args.compression, args.collective)  # <- here

    for epoch in range(args.epochs):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))[rank::world_size]
        for batch in order.split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(replica.model(images[batch]), labels[batch]).backward()  # <- here
            optimizer.step()  # does what the strategy does at a step
    with replica.agreed(), torch.no_grad():  # <- and here: what the replicas agree on is evaluated, and saved
        accuracy = (model(images[1500:]).argmax(dim=1) == labels[1500:]).float().mean().item()
    if rank == 0:
        dense = 2 * (world_size - 1) / world_size * 4 * sum(p.numel() for p in model.parameters())
        sent = replica.bytes_sent / replica.steps
        print(f"accuracy {accuracy:.3f}, {sent:.0f} bytes sent per step and rank (uncompressed: {dense:.0f})")
    # replica.state_dict() belongs into each rank's checkpoint, beside the states of model and optimizer.
    replica.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
