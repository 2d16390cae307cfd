"""Law 2, same run: with a fixed seed the loss of each step does not depend on the number of workers.

The tolerance: worlds add up the same float32 numbers in different orders, an error of about 1e-7 of the gradient in
each step, which training then amplifies (max-pooling and ReLU switch): with a learning rate as small as here less than
a thousandfold in 100 steps.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.ranks.run_many import REPOSITORY, run_many
from tests.ranks.runs import losses_of

ARCHIVE = REPOSITORY.parent / "shared" / "data" / "cifar10-imagefolder.tar.gz"
PER_CLASS = {"train": 100, "test": 10}
EXTRA = "cifar10/train/truck/0100.jpg", "cifar10/train/truck/0101.jpg"  # 1,002 images: the last batch of 40 has two
STEPS = 104
pytestmark = pytest.mark.timeout(400)
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def cifar() -> Path:
    """A part of CIFAR-10 as folders of JPEGs, unpacked once into the ignored data folder."""
    folder = REPOSITORY / "data" / "cifar10-part"
    if folder.exists():
        return folder
    if not ARCHIVE.exists():
        pytest.skip(f"{ARCHIVE.name} is not in ../shared/data")
    partial = folder.with_name(f".{folder.name}")
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            if member.isfile() and _wanted(member.name):
                archive.extract(member, partial, filter="data")
    (partial / "cifar10").replace(folder)
    partial.rmdir()
    return folder


def _wanted(name: str) -> bool:
    part, _, file = name.split("/")[1:]
    return int(file.partition(".")[0]) < PER_CLASS[part] or name in EXTRA


def _losses(folder: Path, cifar: Path, settings: list[str], variants: list[list[str]]) -> list[dict[int, float]]:
    """Train once for each variant; returns the loss of every step."""
    common = ["--batch-size", "40", "--lr", "0.003", "--threads", "1", "--device", "cpu", "--eval-every", "0"]
    commands = [
        ["train", cifar, *common, *settings, *variant, "--run", folder / str(i)] for i, variant in enumerate(variants)
    ]
    results = run_many(folder, commands)
    assert [r.code for r in results] == [0] * len(variants), results
    return [losses_of(folder / str(i)) for i in range(len(variants))]


def _worlds(*sizes: int) -> list[list[str]]:
    return [["--workers", str(size)] for size in sizes]


def _check(runs: list[dict[int, float]], steps: int) -> None:
    for losses in runs:
        assert list(losses) == list(range(1, steps + 1))
        assert losses == pytest.approx(runs[0], rel=TOLERANCE)
    assert min(runs[0].values()) < runs[0][1] - 0.05  # it learnt


@pytest.mark.slow
def test_losses_of_1_2_and_4_workers_agree_for_100_steps(tmp_path: Path, cifar: Path) -> None:
    variants = [*_worlds(1, 2, 4), ["--workers", "2", "--accumulate", "3"]]
    _check(_losses(tmp_path, cifar, ["--model", "bench_cnn", "--epochs", "4"], variants), STEPS)


@pytest.mark.slow
def test_with_synchronised_batchnorm_they_agree_too(tmp_path: Path, cifar: Path) -> None:
    settings = ["--model", "resnet20", "--sync-batchnorm", "--epochs", "1"]
    _check(_losses(tmp_path, cifar, settings, _worlds(1, 2, 4)), 26)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_synchronised_batchnorm_they_agree_for_100_steps(tmp_path: Path, cifar: Path) -> None:
    settings = ["--model", "resnet20", "--sync-batchnorm", "--epochs", "4"]
    _check(_losses(tmp_path, cifar, settings, _worlds(1, 2, 4)), STEPS)
