"""Copies a fifth of CIFAR-10 (1,000 training and 200 test images of each class) to data/cifar10-small: short epochs.

python examples/studies/cifar10/subset.py [data/cifar10]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

PER_CLASS = {"train": 1000, "test": 200}


def copy_subset(source: Path, target: Path) -> int:
    """Copy the first images of each class, by name; returns how many there are then."""
    copied = 0
    for part, count in PER_CLASS.items():
        for folder in sorted(p for p in (source / part).iterdir() if p.is_dir()):
            to = target / part / folder.name
            to.mkdir(parents=True, exist_ok=True)
            for file in sorted(folder.iterdir())[:count]:
                shutil.copyfile(file, to / file.name)
                copied += 1
    return copied


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "data/cifar10")
    print(f"{copy_subset(root, root.with_name('cifar10-small'))} images")
