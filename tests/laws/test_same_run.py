"""Law 2, same run: with a fixed seed the loss of each step does not depend on the number of workers.

The models are float64. Worlds add up the same numbers in different orders; in float32 that is an error of 1e-7 of the
gradient in each step, which now and then changes the sign of a ReLU's input or the place of a maximum: from there
losses part visibly although nothing is wrong.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest

from tests.ranks import own_parts
from tests.ranks.run_many import REPOSITORY, run_many
from tests.ranks.runs import losses_of

ARCHIVE = REPOSITORY.parent / "shared" / "data" / "cifar10-imagefolder.tar.gz"
UNPACKED = REPOSITORY / "data" / "cifar10-train-val"
PER_CLASS = {"train": 100, "test": 10}
EXTRA = "cifar10/train/truck/0100.jpg", "cifar10/train/truck/0101.jpg"  # 1,002 images: the last batch of 40 has two
STEPS = 104
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (UNPACKED.exists() or ARCHIVE.exists()), reason=f"{ARCHIVE.name} is not in {ARCHIVE.parent}"
    ),
]
TOLERANCE = 1e-9
# float64 takes four times as long; a quarter of the pixels makes up for it.
RESNET = ("--model", "own_parts:resnet20_64", "--sync-batchnorm", "--image-size", "16")
DEADLINE_S = 850.0  # for a busy machine


@pytest.fixture(scope="module")
def cifar() -> Path:
    """A part of CIFAR-10 as folders of JPEGs, unpacked once into the ignored data folder."""
    if UNPACKED.exists():
        return UNPACKED
    partial = UNPACKED.with_name(f".{UNPACKED.name}")
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            if member.isfile() and _wanted(member.name):
                archive.extract(member, partial, filter="data")
    (partial / "cifar10" / "test").replace(partial / "cifar10" / "val")  # so that nothing is held out of train
    (partial / "cifar10").replace(UNPACKED)
    partial.rmdir()
    return UNPACKED


def _wanted(name: str) -> bool:
    part, _, file = name.split("/")[1:]
    return int(file.partition(".")[0]) < PER_CLASS[part] or name in EXTRA


def _losses(folder: Path, cifar: Path, settings: list[str], variants: list[list[str]]) -> list[dict[int, float]]:
    """Train once for each variant; returns the loss of every step."""
    common = ["--batch-size", "40", "--lr", "0.003", "--threads", "1", "--device", "cpu", "--eval-every", "0"]
    commands = [
        ["train", cifar, *common, *settings, *variant, "--run", folder / str(i)] for i, variant in enumerate(variants)
    ]
    shutil.copy(own_parts.__file__, folder)
    results = run_many(folder, commands, DEADLINE_S)
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
    _check(_losses(tmp_path, cifar, ["--model", "own_parts:bench_cnn64", "--epochs", "4"], variants), STEPS)


@pytest.mark.slow
def test_with_synchronised_batchnorm_they_agree_too(tmp_path: Path, cifar: Path) -> None:
    settings = [*RESNET, "--epochs", "1"]
    _check(_losses(tmp_path, cifar, settings, _worlds(1, 2, 4)), 26)


@pytest.mark.slow
def test_with_synchronised_batchnorm_they_agree_for_100_steps(tmp_path: Path, cifar: Path) -> None:
    settings = [*RESNET, "--epochs", "4"]
    _check(_losses(tmp_path, cifar, settings, _worlds(1, 2, 4)), STEPS)
