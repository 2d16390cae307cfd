"""Weighted draws, mixed batches, own transforms: functions of (seed, epoch, place), whatever the ranks and loaders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, Shard, Source, TrainLoader, from_datasets
from echelon.data.order import uniforms
from echelon.data.transforms import Transforms
from echelon.data.weights import weighted_batches
from echelon.tasks.classification import CrossEntropy

CPU = torch.device("cpu")
N, CLASSES = 53, 4


def images() -> Source:
    pixels = torch.arange(N * 3 * 8 * 8).remainder(251).view(N, 3, 8, 8).to(torch.uint8)
    data = TensorDataset(pixels, torch.arange(N) ** 2 % CLASSES)
    return from_datasets(data, data, [str(i) for i in range(CLASSES)])


def epoch_of(
    source: Source, ranks: int, transforms: Transforms | None = None, **data: Any
) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets of each global batch of epoch 2, put together from all ranks' parts."""
    config = LoaderConfig(DataConfig(batch_size=16, **data), 3, CPU, transforms=transforms or Transforms())
    loaders = [TrainLoader(source, config, Shard(rank, ranks)) for rank in range(ranks)]
    parts = zip(*(list(loader.epoch(2)) for loader in loaders), strict=True)
    whole = [(torch.cat([b.inputs for b in batch]), torch.cat([b.targets for b in batch])) for batch in parts]
    for loader in loaders:
        loader.close()
    return whole


def assert_same(first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> None:
    for (inputs, targets), (others, wanted) in zip(first, second, strict=True):
        assert torch.equal(inputs, others) and torch.equal(targets, wanted)


@pytest.mark.parametrize("size", [7, 64])
def test_an_epoch_is_n_draws_by_weight_and_a_repeated_draw_has_numbers_of_its_own(size: int) -> None:
    weights = np.array([0.0, 1.0, 3.0, 0.0] * 500)
    batches = weighted_batches(weights, size, seed=5, epoch=1)
    draws = np.concatenate(batches)
    samples = draws % len(weights)
    assert len(draws) == len(weights) == len(set(draws.tolist())) and all(len(b) == size for b in batches[:-1])
    assert set(np.unique(samples % 4)) == {1, 2} and abs(np.mean(samples % 4 == 2) - 0.75) < 0.03
    assert len(np.unique(uniforms(5, 1, draws, 1))) == len(draws)
    assert np.array_equal(draws, np.concatenate(weighted_batches(weights, size, 5, 1)))
    assert not np.array_equal(draws, np.concatenate(weighted_batches(weights, size, 5, 2)))


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize(
    "data",
    [
        {"sample_weights": "inverse-class", "augment": "flip_crop"},
        {"mixup": 0.4},
        {"cutmix": 1.0},
        {"mixup": 0.4, "cutmix": 1.0, "sample_weights": "inverse-class", "loaders": 2},
    ],
    ids=["weights", "mixup", "cutmix", "all"],
)
def test_batches_are_the_same_for_any_number_of_ranks(data: dict[str, Any], ranks: int) -> None:
    source = images()
    assert_same(epoch_of(source, 1, **data), epoch_of(source, ranks, **data))


def test_mixed_targets_are_shares_of_a_pairs_classes_and_inputs_are_blended_by_them() -> None:
    plain, mixed = epoch_of(images(), 1), epoch_of(images(), 1, mixup=1.0)
    for (inputs, classes), (blended, shares) in zip(plain, mixed, strict=True):
        assert torch.allclose(shares.sum(1), torch.ones(len(shares)))
        paired = len(inputs) // 2 * 2
        for i in range(paired):
            other, share = i ^ 1, shares[i, classes[i]]
            if classes[i] != classes[other]:
                assert torch.allclose(blended[i], share * inputs[i] + (1 - share) * inputs[other], atol=1e-5)
        assert torch.equal(blended[paired:], inputs[paired:])


def test_inverse_class_weights_draw_every_class_alike() -> None:
    targets = torch.cat([targets for _, targets in epoch_of(images(), 1, sample_weights="inverse-class")])
    assert len(targets) == N and len(set(np.bincount(images().train.labels).tolist())) > 1  # type: ignore[attr-defined]


def shifted(image: Tensor) -> Tensor:
    return image + torch.randint(1, 100, ()).to(torch.uint8)


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_transform_of_ones_own_gets_uint8_images_and_its_random_numbers_are_of_the_draw(loaders: int) -> None:
    source, own = images(), Transforms(training=shifted)
    before = torch.get_rng_state()
    changed = epoch_of(source, 1, own)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(changed, epoch_of(source, 3, own, loaders=loaders))
    assert not torch.equal(changed[0][0], epoch_of(source, 1)[0][0])


@pytest.mark.parametrize("function", [lambda image: image.float(), lambda image: image[:, :4], lambda image: None])
def test_a_transform_that_returns_something_else_is_refused(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UserError, match=r"--transform returned .* for uint8 \(3, 8, 8\): it must return"):
        epoch_of(images(), 1, Transforms(training=function))


@pytest.mark.parametrize(
    ("content", "reason"),
    [("1\n2\n", r"shape \(2,\).*53 training samples"), ("x\n", "cannot be read"), ("-1\n" * N, "not negative")],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "weights.txt"
    file.write_text(content)
    with pytest.raises(UserError, match=reason):
        epoch_of(images(), 1, sample_weights=str(file))


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 2.0, 1.0, 0.0])])
def test_the_loss_of_shares_is_that_of_their_classes_by_share(weights: Tensor | None) -> None:
    logits, loss = torch.randn(3, CLASSES, dtype=torch.float64), CrossEntropy(0.1, weights)
    first, second, share = torch.tensor([0, 1, 2]), torch.tensor([3, 1, 0]), 0.3
    shares = share * torch.eye(CLASSES)[first] + (1 - share) * torch.eye(CLASSES)[second]
    expected = share * loss(logits, first) + (1 - share) * loss(logits, second)
    torch.testing.assert_close(loss(logits, shares.double()), expected)
