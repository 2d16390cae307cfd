"""Images/s of Echelon's input against torchvision's ImageFolder + DataLoader, with as many loader processes.

200 real ImageNet JPEGs (repeated by links, so that epochs are not all start and end): RandomResizedCrop 224, flip,
normalise, float32 batches in the trainer's process. All contenders are alive at once; windows of one epoch take turns,
so that all see the same machine. Then: the share of `data` in a small training run, by the phases' clock and by
torch.profiler.

    python -m benchmarks.input [--loaders 2] [--windows 7] [--repeat 5] [--batch-size 50] [--steps 4]
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._common import command_line, environment_line, markdown_table, median, paired_ratio, update_section
from benchmarks.fetch_data import fetch
from echelon.config import DataConfig
from echelon.data import LoaderConfig, Shard, TrainLoader, open_data
from echelon.observe.phases import PHASES, HostClock, Phase

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Settings:
    """What all contenders have in common."""

    folder: Path
    loaders: int
    batch_size: int


@dataclass(frozen=True)
class Contender:
    """An input: `epoch(i)` gives the batches of one epoch, `close` ends its processes."""

    epoch: Callable[[int], Iterator[Any]]
    close: Callable[[], None]


def links(source: Path, target: Path, repeat: int) -> Path:
    """Make an image folder of `repeat` links to each image, for training and (one each) for evaluation."""
    for image in sorted(source.rglob("*.JPEG")):
        for part, count in (("train", repeat), ("val", 1)):
            folder = target / part / image.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                (folder / f"{i}-{image.name}").symlink_to(image)
    return target


def ours(settings: Settings) -> Contender:
    """Build Echelon's loader."""
    config = DataConfig(
        source=str(settings.folder), batch_size=settings.batch_size, loaders=settings.loaders, follow_links=True
    )
    loader_config = LoaderConfig.of(config, 0, torch.device("cpu"))
    loader = TrainLoader(open_data(config, 0), loader_config, Shard(0, 1))
    return Contender(lambda epoch: ((b.inputs, b.targets) for b in loader.epoch(epoch)), loader.close)


def _torchvision(settings: Settings, transform: Any, read: Callable[[str], Any] | None) -> Contender:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    train = str(settings.folder / "train")
    data = ImageFolder(train, transform, loader=read) if read else ImageFolder(train, transform)
    loader = DataLoader(
        data,
        settings.batch_size,
        shuffle=True,
        num_workers=settings.loaders,
        persistent_workers=settings.loaders > 0,
    )
    return Contender(lambda epoch: iter(loader), lambda: None)


def torchvision_pillow(settings: Settings) -> Contender:
    """Build what torchvision's reference training script does by default."""
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    return _torchvision(settings, v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), _normalise()]), None)


def torchvision_tensor(settings: Settings) -> Contender:
    """Build the faster of torchvision's ways: its own JPEG decoder, transforms on uint8 tensors."""
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    transform = v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), _normalise()])
    return _torchvision(settings, transform, lambda path: decode_image(path, mode=ImageReadMode.RGB))


def _crop(path: str) -> Any:
    """Decode with simplejpeg (libjpeg-turbo, its fast transform), draw a crop, and resize it: uint8 [224, 224, 3].

    Pillow resizes without a copy of the crop. It is the least that has to be done for an image.
    """
    import numpy as np
    import simplejpeg  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from PIL import Image
    from torchvision.transforms import v2

    image = Image.fromarray(simplejpeg.decode_jpeg(Path(path).read_bytes(), fastdct=True, fastupsample=True))
    crop = v2.RandomResizedCrop(224).make_params([torch.empty(3, image.height, image.width)])
    box = (crop["left"], crop["top"], crop["left"] + crop["width"], crop["top"] + crop["height"])
    return np.array(image.resize((224, 224), Image.Resampling.BILINEAR, box))


def _count(paths: list[str]) -> int:
    """Make crops of files, and forget them; returns how many."""
    torch.set_num_threads(1)
    return sum(_crop(path).shape[0] == 224 for path in paths)


def simplejpeg_loop(settings: Settings) -> Contender:
    """Build a loop in as many processes: no image leaves them, and none is flipped, normalised or put in a batch."""
    pool = multiprocessing.get_context("spawn").Pool(settings.loaders)
    files = [str(path) for path in sorted((settings.folder / "train").rglob("*.JPEG"))]
    pieces = [files[i : i + settings.batch_size] for i in range(0, len(files), settings.batch_size)]

    def epoch(number: int) -> Iterator[Any]:
        """Give what stands for batches: of each piece, as many labels as it has images."""
        return ((None, range(count)) for count in pool.imap_unordered(_count, pieces))

    return Contender(epoch, pool.terminate)


def simplejpeg_loader(settings: Settings) -> Contender:
    """Build torch's DataLoader around simplejpeg: flipped, and normalised as a batch."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    mean, std = (255 * torch.tensor(numbers).view(1, 3, 1, 1) for numbers in (MEAN, STD))

    def together(samples: list[tuple[Any, int]]) -> tuple[Tensor, Tensor]:
        """Return a normalised batch [N, 3, 224, 224], and its labels [N]."""
        images = torch.stack([torch.from_numpy(image) for image, _ in samples]).permute(0, 3, 1, 2)
        flips = torch.rand(len(samples), 1, 1, 1) < 0.5
        images = torch.where(flips, images.flip(3), images).float()
        return images.sub_(mean).div_(std), torch.tensor([label for _, label in samples])

    workers = settings.loaders
    loader = DataLoader(
        ImageFolder(str(settings.folder / "train"), loader=_crop), settings.batch_size, True, num_workers=workers,
        persistent_workers=workers > 0, collate_fn=together,
    )  # fmt: skip
    return Contender(lambda epoch: iter(loader), lambda: None)


def _normalise() -> Any:
    from torchvision.transforms import v2

    return v2.Normalize(MEAN, STD)


CONTENDERS = {
    "Echelon": ours,
    "torchvision (Pillow)": torchvision_pillow,
    "torchvision (tensor)": torchvision_tensor,
    "simplejpeg in a DataLoader": simplejpeg_loader,
    "simplejpeg in a loop": simplejpeg_loop,
}


def measure(settings: Settings, windows: int) -> dict[str, list[float]]:
    """Return images/s of each window, by contender; the first window is warm-up."""
    alive = {name: build(settings) for name, build in CONTENDERS.items()}
    rates: dict[str, list[float]] = {name: [] for name in alive}
    for window in range(windows + 1):
        for name in list(alive) if window % 2 else list(alive)[::-1]:
            began = time.perf_counter()
            images = sum(len(targets) for _, targets in alive[name].epoch(window))
            if window:
                rates[name].append(images / (time.perf_counter() - began))
    for contender in alive.values():
        contender.close()
    return rates


def data_share(settings: Settings, steps: int) -> tuple[float, float]:
    """Return the share of waiting for data in a small training run: (by the phases' clock, by torch.profiler)."""
    from torch.profiler import ProfilerActivity, profile, record_function
    from torchvision.models import resnet18

    model = resnet18(num_classes=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = ours(settings)
    batches = (batch for epoch in range(10**6) for batch in loader.epoch(epoch))
    clock = HostClock()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        clock.drain()
        for _ in range(steps):
            clock.enter(Phase.DATA)
            with record_function("phase: data"):
                inputs, targets = next(batches)
            clock.enter(Phase.FORWARD)
            with record_function("phase: compute"):
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        seconds = dict(zip(PHASES, clock.drain(), strict=True))
    loader.close()
    profiled = {event.key: event.cpu_time_total for event in profiler.key_averages()}
    data, compute = profiled["phase: data"], profiled["phase: compute"]
    return seconds[Phase.DATA] / sum(seconds.values()), data / (data + compute)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("loaders", 2), ("windows", 7), ("repeat", 5), ("batch-size", 50), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        images = links(fetch("imagenet-sample"), Path(folder), options.repeat)
        settings = Settings(images, options.loaders, options.batch_size)
        rates = measure(settings, options.windows)
        base = rates["Echelon"]
        rows = [
            (name, f"{median(windows):.0f}", f"{paired_ratio(base, windows):.2f}") for name, windows in rates.items()
        ]
        table = markdown_table(("input", "images/s (median)", "Echelon / this (median of paired windows)"), rows)
        print(table)
        clock, profiler = data_share(replace(settings, loaders=0), options.steps)
    share = f"Share of `data` without loaders: {clock:.1%} by the clock, {profiler:.1%} by torch.profiler."
    where = environment_line(command_line("benchmarks.input"))
    about = (
        f"200 ImageNet JPEGs, RandomResizedCrop 224, flip, normalise; {options.loaders} loader processes, "
        f"{options.windows} windows of one epoch in turn."
    )
    print(share)
    update_section("Input", f"{where}\n\n{about}\n\n{table}\n\n{share}")


if __name__ == "__main__":
    main()
