"""Unpacks the test images beside the checkout (../shared/data) into the ignored folder data/.

python -m benchmarks.fetch_data
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHIVES = {"cifar10": "cifar10-imagefolder.tar.gz", "imagenet-sample": "imagenet-sample.tar"}


def fetch(name: str, target: Path = ROOT / "data") -> Path:
    """Unpack one of `ARCHIVES` where it is not there yet; returns its folder.

    Raises:
        FileNotFoundError: there is no such archive.
    """
    folder = target / name
    if folder.is_dir():
        return folder
    archive = ROOT.parent / "shared" / "data" / ARCHIVES[name]
    if not archive.exists():
        raise FileNotFoundError(f"{archive} is not there: put it there, or an unpacked image folder at {folder}")
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as part:  # so that a folder that is there is whole
        shutil.unpack_archive(archive, part, filter="data")
        (Path(part) / name).rename(folder)
    return folder


if __name__ == "__main__":
    for each in ARCHIVES:
        print(fetch(each))
