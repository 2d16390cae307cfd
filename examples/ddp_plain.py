"""Plain DistributedDataParallel with compressed gradients: two lines of Echelon in a script of your own.

torchrun --nproc-per-node 2 examples/ddp_plain.py --compression "topk(density=0.01)"
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import echelon


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", default="powersgd(rank=2)")
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
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    hook = echelon.ddp_hook(args.compression)  # <- here
    hook.attach(ddp, optimizer)  # <- and here: a codec that wants momentum before its encoding takes it over

    for epoch in range(args.epochs):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))[rank::world_size]
        for batch in order.split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(images[1500:]).argmax(dim=1) == labels[1500:]).float().mean().item()
    if rank == 0:
        sent = hook.wire.total / hook.wire.steps
        dense = 2 * (world_size - 1) / world_size * 4 * sum(p.numel() for p in model.parameters())
        print(f"accuracy {accuracy:.3f}, {sent:.0f} bytes sent per step and rank (uncompressed: {dense:.0f})")
    # hook.state_dict() belongs into each rank's checkpoint: what the codec has not sent yet is in it.
    hook.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
