"""What every kind of data obeys; a new file of `data/sources/` is tested by giving its example here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import EvalLoader, LoaderConfig, Shard, TrainLoader, check_source, open_data, sources
from echelon.data.sources import SOURCES, kind_of
from echelon.data.sources.base import SourceKind
from echelon.tasks import nest
from echelon.trainer.unused import unread_notes
from tests.laws.extras import NEEDS_DATASETS
from tests.unit.data.images import make_folder, make_shards
from tests.unit.data.shapes import make_shapes
from tests.unit.data.test_parallel_text import make_parallel
from tests.unit.data.test_sounds import make_sounds
from tests.unit.data.test_texts import make_texts
from tests.unit.data.test_transcripts import make_transcribed

KINDS = [SOURCES.settings_class(name)() for name in SOURCES.names()]


def _mnist(folder: Path) -> str:
    """Write MNIST in the files' own format, as this needs no network."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for part, count in (("train", 30), ("t10k", 10)):
        images = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
            (raw / name).write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())
    return "mnist"


def _long_text(folder: Path) -> str:
    """Write a text of 20 windows."""
    (folder / "long.txt").write_text("and so it goes on, " * 140)
    return str(folder / "long.txt")


def _table(folder: Path) -> str:
    """Write numbers, a category and a target of numbers."""
    rows = [f"{i},{i * i % 7},{'abc'[i % 3]},{i * 0.5}" for i in range(30)]
    (folder / "table.csv").write_text("\n".join(["a,b,c,y", *rows]))
    return str(folder / "table.csv")


def _saved(folder: Path) -> str:
    """Write images with classes as the library `datasets` does."""
    import datasets

    pixels = np.random.default_rng(0).integers(0, 256, (20, 12, 12, 3), dtype=np.uint8)
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["zebra", "ape"])})
    rows = {"picture": [Image.fromarray(each) for each in pixels], "kind": [i % 2 for i in range(20)]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder / "saved")
    return str(folder / "saved")


EXAMPLES: dict[str, Callable[[Path], str]] = {
    "digits": lambda folder: "digits",
    "folder": lambda folder: str(make_folder(folder, per_class=5, side=40)),
    "function": lambda folder: "tests.laws.test_sources:own_data",
    "masks": lambda folder: str(make_shapes(folder / "shapes")),
    "hugging_face": _saved,
    "shards": lambda folder: str(make_shards(make_folder(folder / "files", per_class=5), folder / "shards")),
    "parallel_text": lambda folder: str(make_parallel(folder / "pairs")),
    "sounds": lambda folder: str(make_sounds(folder / "sounds")),
    "text_file": _long_text,
    "texts": lambda folder: str(make_texts(folder / "texts")),
    "table": _table,
    "torchvision": _mnist,
    "transcripts": lambda folder: str(make_transcribed(folder / "spoken")),
}
"""For each kind, what makes its data in a folder and returns its name."""
TARGETS = {"table": "y", "parallel_text": "de"}
INPUTS = {"parallel_text": "en"}
NEEDS = {"hugging_face": NEEDS_DATASETS}


def own_data() -> tuple[torch.utils.data.Dataset, torch.utils.data.Dataset]:
    data = torch.utils.data.TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12) % 3)
    return data, torch.utils.data.Subset(data, range(5))


@pytest.fixture(params=[pytest.param(name, marks=NEEDS.get(name, ())) for name in EXAMPLES])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> DataConfig:
    name = EXAMPLES[request.param](tmp_path)
    assert type(kind_of(name)) is SOURCES.settings_class(request.param)
    columns = {"input": INPUTS.get(request.param, ""), "target": TARGETS.get(request.param, "")}
    return DataConfig(source=name, root=str(tmp_path), batch_size=8, **columns)


def test_every_kind_has_an_example() -> None:
    assert set(SOURCES.names()) == set(EXAMPLES), "give the example of a new kind of data in EXAMPLES"


def test_no_name_is_of_two_kinds() -> None:
    counts = Counter(name for kind in KINDS for name in kind.names)
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_a_kind_takes_its_own_names_or_says_the_form_of_others(kind: SourceKind) -> None:
    assert kind.names or kind.form
    assert all(kind.takes(name) and type(kind_of(name)) is type(kind) for name in kind.names)


def test_one_kind_takes_a_name_and_finds_it_there(data: DataConfig) -> None:
    takers = [kind for kind in KINDS if kind.takes(data.source)]
    assert sum(not kind.takes_whatever_is_there for kind in takers) <= 1 and takers
    assert sum(kind.takes_whatever_is_there for kind in KINDS) == 1
    check_source(data.source)


def test_what_is_said_of_data_is_so(data: DataConfig) -> None:
    source = open_data(data, seed=1)
    info = source.info
    assert (info.name, info.train_size) == (source.info.name, len(source.train))  # type: ignore[arg-type]
    assert info.eval_size == len(source.evaluation)  # type: ignore[arg-type]
    assert len(info.class_counts) == len(info.classes)
    if not any(spec.shape for spec in nest.leaves(info.targets)):  # of masks, pixels are counted
        assert sum(info.class_counts) == (info.train_size if info.classes else 0)
    assert len(info.mean) == len(info.std)
    loader = TrainLoader(source, LoaderConfig(data, 1, torch.device("cpu")), Shard(0, 1))
    try:
        batch = next(iter(loader.epoch(0)))
    finally:
        loader.close()
    pairs = ((batch.inputs, info.inputs), (batch.targets, info.targets))
    for tensor, spec in ((t, s) for a, b in pairs for t, s in zip(nest.leaves(a), nest.leaves(b), strict=True)):
        blank = spec.zeros(8)[:, : tensor.shape[1]] if spec.ragged else spec.zeros(8)
        assert (tensor.shape, tensor.dtype) == (blank.shape, blank.dtype)


def test_opened_twice_it_is_the_same(data: DataConfig) -> None:
    first, second = (open_data(data, seed=1) for _ in range(2))
    assert first.info == second.info
    loaders = [EvalLoader(each, LoaderConfig(data, 1, torch.device("cpu")), Shard(0, 1)) for each in (first, second)]
    for a, b in zip(*loaders, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(nest.leaves(a.inputs), nest.leaves(b.inputs), strict=True))
        assert all(torch.equal(x, y) for x, y in zip(nest.leaves(a.targets), nest.leaves(b.targets), strict=True))
    for loader in loaders:
        loader.close()


COLUMNS = '''"""Numbers of a text file: the last one of a line is the class."""

from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from echelon.core.errors import UserError
from echelon.data.own import from_datasets
from echelon.data.sources.base import SourceKind


class Columns(SourceKind):
    form = "columns=FILE"

    def takes(self, name):
        return name.startswith("columns=") and name.endswith(".txt")

    def check(self, name):
        if not Path(name.removeprefix("columns=")).is_file():
            raise UserError(f"data {name}: no such file")

    def open(self, request):
        lines = Path(request.config.source.removeprefix("columns=")).read_text().splitlines()
        rows = torch.tensor([[float(x) for x in line.split()] for line in lines])
        data = TensorDataset(rows[:, :-1], rows[:, -1].long())
        return from_datasets(data, data)


SOURCE = Columns
'''


def test_a_new_file_is_a_kind_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "columns.py").write_text(COLUMNS)
    (tmp_path / "table.txt").write_text("1 2 0\n3 4 1\n5 6 0\n")
    monkeypatch.setattr(sources, "__path__", [str(tmp_path), *sources.__path__])
    name = f"columns={tmp_path / 'table.txt'}"
    check_source(name)
    assert open_data(DataConfig(source=name), 0).info.class_counts == (2, 1)
    with pytest.raises(UserError, match="no such file"):
        check_source("columns=nowhere.txt")
    with pytest.raises(UserError, match=r"columns=FILE, a folder, module:function, .*a text \(.txt\)"):
        check_source("nothing")


@pytest.mark.parametrize(
    "setting, values",
    [
        *((name, ("nonsense",)) for name in ("input", "target", "split", "time")),
        *(("columns", ("nonsense=number",)), ("negatives", (3,)), ("context", (7,))),
        ("tokeniser", ("characters", "bpe(300)")),  # one may be what is taken by itself
    ],
)
def test_a_setting_acts_or_is_refused_or_told(data: DataConfig, setting: str, values: tuple[str | int, ...]) -> None:
    acts, plain = False, open_data(data, seed=0)
    for value in values:
        changed = replace(data, **{setting: value})
        try:
            source = open_data(changed, seed=0)
        except UserError as error:
            assert str(value).split("=")[0] in str(error)
            return
        acts |= source.info != plain.info
    assert bool(unread_notes(changed, source)) is not acts
