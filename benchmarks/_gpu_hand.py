"""A training loop as one writes it by hand for one GPU: autocast, channels_last, torch.compile, images per second."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    """Train and print one line of JSON: images per second after the warm-up, and the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("model", "resnet50"), ("precision", "bf16"), ("device", "cuda"), ("folder", "")):
        parser.add_argument(f"--{name}", default=default)
    for name, number in (("batch", 256), ("steps", 60), ("warm-up", 20), ("image", 224), ("loaders", 8)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--fused", action="store_true", help="a fused optimizer, and convolutions chosen by trial")
    parser.add_argument("--resident", action="store_true", help="one batch that lies on the device, again and again")
    parser.add_argument(
        "--kept", type=int, default=0, help="so many images lie on the device, cropped and flipped there"
    )
    parser.add_argument("--mode", default="default", help="torch.compile's: reduce-overhead replays CUDA graphs")
    print(json.dumps(train(parser.parse_args())))


def train(args: argparse.Namespace) -> dict[str, object]:
    """Run the loop; the clock runs from the end of the warm-up to the end of the last step."""
    torch.manual_seed(0)
    device = torch.device(args.device)
    model = timm.create_model(args.model, num_classes=1000, img_size=args.image) if "vit" in args.model else (
        timm.create_model(args.model, num_classes=1000)
    )  # fmt: skip
    net: nn.Module = model.to(device, memory_format=torch.channels_last).train()
    torch.backends.cudnn.benchmark = args.fused
    optimizer = torch.optim.SGD(
        net.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=args.fused or None
    )
    step_net = net if args.no_compile else torch.compile(net, mode=args.mode)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    dtype = AUTOCAST[args.precision]
    losses, began = [], 0.0
    for step, (inputs, targets) in zip(range(args.steps), batches(args, device), strict=False):
        if step == args.warm_up:
            began = _now(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype) if dtype else nullcontext():
            loss = nn.functional.cross_entropy(step_net(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    seconds = _now(device) - began
    rate = (args.steps - args.warm_up) * args.batch / seconds
    return {"images_per_s": rate, "losses": [round(float(loss), 4) for loss in losses]}


def batches(args: argparse.Namespace, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one batch that lies on the device again and again, or batches of synthetic images or of a folder's."""
    if args.kept:
        yield from kept_batches(args, device)
    if args.resident:
        generator = torch.Generator().manual_seed(0)
        shape = (args.batch, 3, args.image, args.image)
        inputs = torch.randn(shape, generator=generator).to(device, memory_format=torch.channels_last)
        targets = torch.randint(0, 1000, (args.batch,), generator=generator).to(device)
        while True:
            yield inputs, targets
    from torch.utils.data import DataLoader

    if not args.folder:
        from benchmarks.gpu_data import Images

        loader = DataLoader(
            Images(args.steps * args.batch, args.image), args.batch, shuffle=True, num_workers=args.loaders,
            pin_memory=device.type == "cuda",
        )  # fmt: skip
        mean, std = torch.tensor([0.5], device=device).mul_(255), torch.tensor([0.5], device=device).mul_(255)
        for pictures, labels in loader:
            on_device = pictures.to(device, non_blocking=True).to(memory_format=torch.channels_last)
            yield on_device.float().sub_(mean).div_(std), labels.to(device, non_blocking=True)
        return
    from torchvision import datasets
    from torchvision.transforms import v2

    change = v2.Compose(
        [
            v2.RandomResizedCrop(args.image),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    images = datasets.ImageFolder(str(Path(args.folder) / "train"), change)
    loader = DataLoader(
        images, args.batch, shuffle=True, num_workers=args.loaders, pin_memory=device.type == "cuda", drop_last=True,
        persistent_workers=True,
    )  # fmt: skip
    while True:
        for pictures, labels in loader:
            on_device = pictures.to(device, non_blocking=True, memory_format=torch.channels_last)
            yield on_device, labels.to(device, non_blocking=True)


def kept_batches(args: argparse.Namespace, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield shuffled batches of images that lie on the device, shifted by up to four pixels, half of them mirrored."""
    generator = torch.Generator(device).manual_seed(0)
    pictures = torch.randint(0, 256, (args.kept, 3, args.image, args.image), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 1000, (args.kept,), device=device)
    padded = nn.functional.pad(pictures, (4, 4, 4, 4))
    line = torch.arange(args.image, device=device)
    while True:
        order = torch.randperm(args.kept, device=device, generator=generator)
        for chosen in order.split(args.batch)[: args.kept // args.batch]:
            top, left = torch.randint(0, 9, (2, args.batch, 1), device=device, generator=generator)
            mirrored = torch.rand(args.batch, 1, device=device, generator=generator) < 0.5
            columns = left + torch.where(mirrored, line.flip(0), line)
            rows = (top + line)[:, None, :, None]
            inputs = padded[
                chosen[:, None, None, None], torch.arange(3, device=device)[:, None, None], rows, columns[:, None, None]
            ]
            inputs = inputs.to(memory_format=torch.channels_last).float().sub_(127.5).div_(127.5)
            yield inputs, labels[chosen]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
