"""Recommendation with tables of embeddings: two models and two data sets of one's own, given to Echelon by their names.

python examples/recommender.py --rows 10000000       # writes a log of clicks, by a seed, into the folder clicks/
cd examples
echelon train recommender:clicks --model recommender:dlrm --sparse-tables --optimizer sparse_adam --lr 0.001 \\
  --weight-decay 0 --batch-size 2048 --epochs 1 --workers 4 --parallel dp=4,table=4
echelon train recommender:movielens --model recommender:two_tower --sparse-tables --optimizer sparse_adam --lr 0.003 \\
  --weight-decay 0 --workers 2 --sync "ps(mode=async)"

Only the rows of tables that a batch looks up are updated and sent. Without `--parallel` each worker has whole tables.
A sample of both data sets is (user, item, features of the item, numbers) and what came of it: a click or a rating.
CLICKS=FOLDER and MOVIELENS=FILE.zip (ml-latest-small of grouplens.org) say where they are.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

FEATURES = 1000  # ids of features; 0 is none
WIDTH = 16


class DLRM(nn.Module):
    """Products of all pairs of the vectors of a sample, and an MLP (Naumov et al. 2019, arXiv:1906.00091)."""

    def __init__(self, users: int, items: int, numbers: int, outputs: int) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, WIDTH), nn.Embedding(items, WIDTH)
        self.features = nn.EmbeddingBag(FEATURES, WIDTH, mode="sum", padding_idx=0)
        self.numbers = nn.Sequential(nn.Linear(numbers, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.top = nn.Sequential(nn.Linear(4 * WIDTH + 6, 64), nn.ReLU(), nn.Linear(64, outputs))
        draw_tables(self)

    def forward(self, user: Tensor, item: Tensor, features: Tensor, numbers: Tensor) -> Tensor:
        vectors = torch.stack([self.user(user), self.item(item), self.features(features), self.numbers(numbers)], 1)
        first, second = torch.triu_indices(4, 4, 1, device=vectors.device)
        products = (vectors @ vectors.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([vectors.flatten(1), products], 1))


class TwoTower(nn.Module):
    """The product of what a user's tower says and what an item's does."""

    def __init__(self, users: int, items: int, numbers: int, outputs: int) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, WIDTH), nn.Embedding(items, WIDTH)
        self.features = nn.EmbeddingBag(FEATURES, WIDTH, mode="mean", padding_idx=0)
        self.user_tower = nn.Linear(WIDTH + numbers, 32)
        self.item_tower = nn.Linear(2 * WIDTH, 32)
        self.out = nn.Linear(1, outputs)
        draw_tables(self)

    def forward(self, user: Tensor, item: Tensor, features: Tensor, numbers: Tensor) -> Tensor:
        one = self.user_tower(torch.cat([self.user(user), numbers], 1))
        other = self.item_tower(torch.cat([self.item(item), self.features(features)], 1))
        return self.out((one * other).sum(1, keepdim=True))


def draw_tables(model: nn.Module) -> None:
    for table in model.modules():
        if isinstance(table, (nn.Embedding, nn.EmbeddingBag)):
            nn.init.normal_(table.weight, std=WIDTH**-0.5)


def dlrm(data: Any) -> nn.Module:
    user, item, _, numbers = data.several  # of each input what it is; of ids, in memory, how many there are
    return DLRM(user.count, item.count, numbers.shape[0], data.classes)


def two_tower(data: Any) -> nn.Module:
    user, item, _, numbers = data.several
    return TwoTower(user.count, item.count, numbers.shape[0], data.classes)


def clicks() -> tuple[TensorDataset, TensorDataset]:
    """Return the log, which stays on the disk, but for what is read of it; its last hundredth is held out."""
    folder = Path(os.environ.get("CLICKS", "clicks"))
    if not folder.is_dir():
        raise FileNotFoundError(f"no log of clicks in {folder}: python examples/recommender.py --rows 10000000")
    columns = [torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c")) for name in COLUMNS]
    return split(columns, len(columns[0]) // 100)


COLUMNS = {"user": "int32", "item": "int32", "features": "int32", "numbers": "float32", "click": "int64"}


def write_clicks(folder: Path, rows: int, seed: int) -> None:
    """Write a log: few users and items are in it often and most seldom; tastes, and the numbers, decide on a click."""
    draw = np.random.default_rng(seed)
    users, items, kinds = max(10, rows // 10), max(10, rows // 50), 8
    taste, charm = draw.normal(size=(users, kinds)), draw.normal(size=(items, kinds))
    about = draw.integers(1, FEATURES, (items, 3))
    folder.mkdir(parents=True)
    widths = {"features": (3,), "numbers": (4,)}
    files = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", kind, (rows, *widths.get(name, ())))
        for name, kind in COLUMNS.items()
    }
    for start in range(0, rows, 500_000):
        count = min(500_000, rows - start)
        user, item = ((draw.random(count) ** 2 * most).astype(np.int64) for most in (users, items))
        numbers = draw.normal(size=(count, 4))
        score = (taste[user] * charm[item]).sum(1) / kinds**0.5 + numbers[:, 0] - 1
        click = draw.random(count) < 1 / (1 + np.exp(-score))
        made = (user, item, about[item], numbers, click)
        for file, values in zip(files.values(), made, strict=True):
            file[start : start + count] = values


def movielens() -> tuple[TensorDataset, TensorDataset]:
    """Return the ratings, the genres of each film as its features, and when it was rated; a tenth is held out."""
    with zipfile.ZipFile(os.environ.get("MOVIELENS", "movielens-small.zip")) as archive:
        ratings, films = (table(archive, name) for name in ("ratings.csv", "movies.csv"))
    genres = sorted({genre for film in films for genre in film["genres"].split("|")})
    numbers_of = {genre: number for number, genre in enumerate(genres, 1)}
    features = {f["movieId"]: ([numbers_of[g] for g in f["genres"].split("|")] + [0] * 10)[:10] for f in films}
    items = {film["movieId"]: number for number, film in enumerate(films)}
    when = torch.tensor([float(rating["timestamp"]) for rating in ratings])
    columns = [
        torch.tensor([int(rating["userId"]) for rating in ratings]),
        torch.tensor([items[rating["movieId"]] for rating in ratings]),
        torch.tensor([features[rating["movieId"]] for rating in ratings]),
        ((when - when.mean()) / when.std())[:, None],
        torch.tensor([[float(rating["rating"])] for rating in ratings]),
    ]
    order = torch.randperm(len(ratings), generator=torch.Generator().manual_seed(0))
    return split([column[order] for column in columns], len(ratings) // 10)


def table(archive: zipfile.ZipFile, name: str) -> list[dict[str, str]]:
    with archive.open(f"ml-latest-small/{name}") as file:
        return list(csv.DictReader(io.TextIOWrapper(file, "utf-8")))


def split(columns: list[Tensor], held_out: int) -> tuple[TensorDataset, TensorDataset]:
    parts = ([c[:-held_out] for c in columns], [c[-held_out:] for c in columns])
    return TensorDataset(*parts[0]), TensorDataset(*parts[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("clicks"))
    given = parser.parse_args()
    write_clicks(given.folder, given.rows, given.seed)
