from __future__ import annotations

import re
import shutil
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import Source, check_source, from_datasets, open_data, source_of
from echelon.data.images import ImageArray, ImageFiles
from echelon.data.labelled_files import FileNames
from echelon.data.normalise import IMAGENET_MEAN
from echelon.records.file import Recorder
from echelon.records.kinds import Start
from echelon.tasks.base import TaskSettings
from echelon.tasks.image_classification import ImageClassification
from tests.unit.data.images import SHARED, make_folder, make_image


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    source = open_data(DataConfig(), seed=5)
    assert isinstance(source.train, ImageArray)
    assert isinstance(source.evaluation, ImageArray)
    assert (source.info.channels, source.info.image_size, len(source.info.classes)) == (1, 8, 10)
    assert source.info.train_size + source.info.eval_size == 1797
    assert source.info.eval_size == 359
    pixels, labels = load_digits(return_X_y=True)
    ours = np.concatenate([source.train.pixels, source.evaluation.pixels]).reshape(-1, 64)
    assert sorted(map(bytes, ours)) == sorted(map(bytes, np.rint(pixels * (255 / 16)).astype(np.uint8)))
    assert sum(source.info.class_counts) == source.info.train_size
    assert (
        np.bincount(source.evaluation.labels).tolist()
        == (np.bincount(labels) - np.array(source.info.class_counts)).tolist()
    )
    assert np.array_equal(open_data(DataConfig(), seed=6).evaluation.labels, source.evaluation.labels)  # type: ignore[attr-defined]


def test_a_folder_with_train_and_test(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", per_class=3)
    make_folder(tmp_path / "test", per_class=2)
    make_image(tmp_path / "train" / "cat" / "more" / "x.png")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".cache").mkdir()
    source = open_data(DataConfig(source=str(tmp_path)), 0)
    info = source.info
    assert (info.train_size, info.eval_size, len(source.test)) == (6, 1, 4)  # type: ignore[arg-type]
    assert source.notes == (
        "1 of 7 training images are held out to choose the best checkpoint by: never by the test set",
    )
    assert (info.classes, info.channels, info.image_size) == (("cat", "dog"), 3, 40)


def test_a_folder_with_three_parts(tmp_path: Path) -> None:
    for part, count in (("train", 5), ("val", 3), ("test", 2)):
        make_folder(tmp_path / part, per_class=count)
    source = open_data(DataConfig(source=str(tmp_path)), 0)
    assert (len(source.train), len(source.evaluation), len(source.test)) == (10, 6, 4)  # type: ignore[arg-type]
    shutil.rmtree(tmp_path / "test" / "dog")
    source = open_data(DataConfig(source=str(tmp_path)), 0)
    assert source.test is None and source.notes[0].startswith("test/ is not used: ")


def test_a_run_that_chose_by_the_test_set_goes_on_so(tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    make_folder(data / "train", per_class=10)
    make_folder(data / "test", per_class=2)
    run.mkdir()
    for recorded, held in ((20, 4), (18, 2)):
        with closing(Recorder(run)) as record:
            record.write(Start(train_size=recorded))
        source = open_data(DataConfig(source=str(data)), 0, folder=run)
        assert (source.info.train_size, source.info.eval_size) == (recorded, held)


@pytest.mark.parametrize("inner", ["", "train"])
def test_one_folder_is_split_by_seed(tmp_path: Path, inner: str) -> None:
    make_folder(tmp_path / inner, per_class=10)

    def opened(seed: int) -> tuple[ImageFiles, ImageFiles]:
        source = open_data(DataConfig(source=str(tmp_path), holdout=0.3), seed)
        assert isinstance(source.train, ImageFiles) and isinstance(source.evaluation, ImageFiles)
        return source.train, source.evaluation

    train, held = opened(0)
    assert (len(train), len(held)) == (14, 6)
    paths = [part.path(i) for part in (train, held) for i in range(len(part))]
    assert len(set(paths)) == 20
    assert all(Path(p).exists() for p in paths)
    again, other = (opened(seed)[1] for seed in (0, 1))
    assert [again.path(i) for i in range(6)] == [held.path(i) for i in range(6)]
    assert [other.path(i) for i in range(6)] != [held.path(i) for i in range(6)]


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda root: shutil.rmtree(root), "no such folder"),
        (lambda root: (shutil.rmtree(root), root.mkdir()), "is empty"),
        (lambda root: (root / "train" / "emu").mkdir(), "train/emu: the class folder holds no images"),
        (lambda root: make_image(root / "train" / "emu" / "1.jpg"), "train/ and val/ must have the same class.*emu"),
        (lambda root: shutil.rmtree(root / "train"), "there is val/ but no train/"),
        (lambda root: (shutil.rmtree(root), make_image(root / "1.jpg")), "one folder per class"),
        (lambda root: (shutil.rmtree(root), make_image(root / "a" / "1.jpg")), "only class folder"),
        (lambda root: (shutil.rmtree(root), root.touch()), "it is a file"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path: Path, break_it: object, words: str) -> None:
    root = tmp_path / "images"
    make_folder(root / "train")
    make_folder(root / "val")
    break_it(root)  # type: ignore[operator]
    with pytest.raises(UserError, match=words) as raised:
        open_data(DataConfig(source=str(root)), 0)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cifar11", "did you mean cifar10"),
        ("digit", "did you mean digits"),
        ("./cifar10", "no such folder"),
        ("nowhere/", "data nowhere/: no such folder"),
        ("CIFAR-10O", "did you mean cifar10"),
        ("json:loads", "called without arguments, but needs s"),
        ("no_module_here:f", "no module 'no_module_here'"),
        ("json:lod", "json has no 'lod'; did you mean load"),
        ("json:decoder", "is a module: name a function that returns the data"),
        ("json:JSONDecoder", r"must return \(train, evaluation\)"),
    ],
)
def test_unknown_names(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        open_data(DataConfig(source=name), 0)
    if name not in ("json:loads", "json:decoder", "json:JSONDecoder"):  # what only a call, or a look at it, tells
        with pytest.raises(UserError, match=words):
            check_source(name)


def test_data_that_is_there_is_not_opened_to_check_it(tmp_path: Path) -> None:
    for name in ("digits", "cifar10", str(tmp_path), "tests.unit.data.images:make_folder"):
        check_source(name)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="it is a file, not a folder"):
        check_source(str(tmp_path / "file"))


def test_no_network_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvision.datasets.FashionMNIST.mirrors", ["http://127.0.0.1:9/"])
    with pytest.raises(UserError, match=r"fashion_mnist: not in .* and the download failed") as raised:
        open_data(DataConfig(source="fashion_mnist", root=str(tmp_path)), 0)
    assert len(str(raised.value).splitlines()) == 1


def test_a_torchvision_set_that_is_there(tmp_path: Path) -> None:
    """Written in the files' own format, as this needs no network."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, n in (("train", 30), ("t10k", 10)):
        images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(_idx(images))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(_idx((np.arange(n) % 10).astype(np.uint8)))
    source = open_data(DataConfig(source="mnist", root=str(tmp_path)), 0)
    assert isinstance(source.train, ImageArray)
    assert source.train.pixels.shape == (27, 1, 28, 28)
    assert (source.info.eval_size, len(source.test)) == (3, 10)  # type: ignore[arg-type]
    assert source.info.image_size == 28
    assert source.info.classes[3] == "3 - three"
    assert source.info.mean[0] == pytest.approx(source.train.pixels.mean() / 255, abs=1e-5)


def _idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.tobytes()


def test_module_and_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_data.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def load():\n    data = TensorDataset(torch.zeros(6, 4), torch.arange(6) % 3)\n    return data, data\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    info = open_data(DataConfig(source="my_own_data:load"), 0).info
    assert (info.classes, info.channels, info.class_counts) == (("0", "1", "2"), 4, (2, 2, 2))
    assert (info.shape, info.dtype) == ((4,), "float32")


def test_own_data_sets() -> None:
    images = TensorDataset(torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8), torch.arange(8) % 2)
    source = from_datasets(Subset(images, [0, 1, 2]), images, classes=("no", "yes"))
    assert isinstance(source, Source)
    assert (source.info.image_size, source.info.class_counts, source.info.eval_size) == (16, (2, 1), 8)
    assert len(source.info.mean) == 3
    floats = TensorDataset(torch.zeros(4, 7, 9), torch.tensor([0, 1, 2, 1]))
    assert from_datasets(floats, floats).info.mean == ()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (TensorDataset(torch.zeros(0, 3), torch.zeros(0)), "length above 0"),
        ([1, 2], r"items must be \(tensor, label\), not int"),
        (torch.zeros(4, 3), r"a dict with a target; arrays of inputs and labels are one by TensorDataset"),
        ([(torch.zeros(2), "cat")] * 2, "not of str: number strings, such as by {name: i for i, name in"),
        ([{"x": torch.zeros(2), "name": "g3", "label": 1}] * 2, "numbers, and their 'name' is of str"),
        (pandas.DataFrame({"a": [1, 2]}), "DataFrame: a data frame's items are its columns: write it to a table"),
        (TensorDataset(torch.zeros(2, 3), torch.tensor([0, -1])), "labels must be .*, and these reach from -1 to 0;"),
        (TensorDataset(torch.zeros(2, 3), torch.tensor([0.5, 1.5])), "targets are .* of float32"),
        (TensorDataset(torch.zeros(2, 3), torch.tensor([[0], [1]])), "targets are .* of int64"),
        (TensorDataset(torch.zeros(2, 3, 4, 5, dtype=torch.uint8), torch.tensor([0, 1])), "must be square"),
    ],
)
def test_own_data_sets_that_do_not_fit(data: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        info = from_datasets(data, data).info  # type: ignore[arg-type]
        ImageClassification().fitted(info, TaskSettings())


def test_a_label_that_is_none_of_the_classes_is_named() -> None:
    good, bad = (TensorDataset(torch.zeros(3, 3), torch.tensor(labels)) for labels in ([0, 1, 1], [0, 1, 7]))
    with pytest.raises(UserError, match=r"0 to 1, for the 2 classes; sample 2 of the evaluation data has 7$"):
        from_datasets(good, bad, ["cat", "dog"])


def test_file_names_of_any_bytes() -> None:
    names = ["a.jpg", "ä/ö.png", "", "\udcff.jpg"]
    packed = FileNames(names)
    assert [packed[i] for i in range(len(packed))] == names


@pytest.mark.skipif(not (SHARED / "imagenet-sample.tar").exists(), reason="the ImageNet sample is not there")
def test_imagenet_images_are_used_as_imagenet(tmp_path: Path) -> None:
    shutil.unpack_archive(SHARED / "imagenet-sample.tar", tmp_path, filter="data")
    began = time.perf_counter()
    info = open_data(DataConfig(source=str(tmp_path / "imagenet-sample"), holdout=0.1), 0).info
    assert time.perf_counter() - began < 20
    assert (info.image_size, info.train_size, info.eval_size, len(info.classes)) == (224, 180, 20, 200)
    assert info.mean == IMAGENET_MEAN


def test_all_bad_images_name_the_first(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_text("text")
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/")):
        open_data(DataConfig(source=str(tmp_path)), 0)


def _leave(tmp_path: Path) -> None:
    make_folder(tmp_path / "elsewhere", classes=("owl",))
    (tmp_path / "data" / "cat" / "9.jpg").symlink_to(tmp_path / "elsewhere" / "owl" / "0.jpg")
    (tmp_path / "data" / "owl").symlink_to("../elsewhere/owl")


def test_links_out_of_the_folder_are_refused_unless_they_are_meant(tmp_path: Path) -> None:
    make_folder(tmp_path / "data")
    _leave(tmp_path)
    with pytest.raises(UserError, match=r"2 links lead out of the folder, the first one .* -> .*--follow-links"):
        open_data(DataConfig(source=str(tmp_path / "data")), 0)
    source = open_data(DataConfig(source=str(tmp_path / "data"), follow_links=True), 0)
    assert source.info.classes == ("cat", "dog", "owl") and source.info.train_size + source.info.eval_size == 10
    (note,) = source.notes
    assert "2 links lead out of the folder" in note and note.endswith("followed")


def test_links_within_the_folder_and_a_folder_that_is_a_link_are_used(tmp_path: Path) -> None:
    make_folder(tmp_path / "real")
    (tmp_path / "real" / "cat" / "9.jpg").symlink_to("../dog/0.jpg")
    (tmp_path / "real" / "pup").symlink_to("dog")
    (tmp_path / "data").symlink_to("real")
    source = open_data(DataConfig(source=str(tmp_path / "data")), 0)
    assert source.info.classes == ("cat", "dog", "pup") and not source.notes


def _circle(cat: Path) -> None:
    (cat / "a").symlink_to("b")
    (cat / "b").symlink_to("a")


def _doubling(cat: Path) -> None:
    for i in range(40):
        (cat / f"d{i}").mkdir()
        for way in "ab":
            (cat / f"d{i}" / way).symlink_to(f"../d{i + 1}")


LOOPS = {
    "to the class": lambda cat: (cat / "again").symlink_to("."),
    "to the top": lambda cat: (cat / "again").symlink_to("../.."),
    "of images": lambda cat: (cat / "again.jpg").symlink_to("again.jpg"),
    "in a circle": _circle,
    "that double": _doubling,
}


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("follow", [False, True])
def test_loops_of_links_are_one_line(kind: str, follow: bool, tmp_path: Path) -> None:
    make_folder(tmp_path / "data" / "train")
    make_folder(tmp_path / "data" / "val")
    LOOPS[kind](tmp_path / "data" / "train" / "cat")
    began = time.process_time()
    with pytest.raises(UserError, match=r"link|levels of symbolic") as refusal:
        open_data(DataConfig(source=str(tmp_path / "data"), follow_links=follow), 0)
    assert "\n" not in str(refusal.value) and time.process_time() - began < 2


def test_a_part_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    make_folder(tmp_path / "elsewhere")
    make_folder(tmp_path / "data" / "val")
    (tmp_path / "data" / "train").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="1 link leads out of the folder, the first one train -> "):
        open_data(DataConfig(source=str(tmp_path / "data")), 0)
    source = open_data(DataConfig(source=str(tmp_path / "data"), follow_links=True), 0)
    assert source.info.train_size == 6 and len(source.notes) == 1


def test_data_of_one_s_own_is_one_set_two_or_three() -> None:
    data = TensorDataset(torch.rand(40, 3), torch.arange(40) % 2)
    parts = [Subset(data, range(start, start + 10)) for start in (0, 10, 20)]
    one = source_of(data, 0.2, seed=1)
    assert (one.info.name, one.info.train_size, one.info.eval_size, one.test) == ("TensorDataset", 32, 8, None)
    assert one.notes == ("8 of the 40 samples are held out for evaluation (--holdout 0.2)",)
    three = source_of((parts[0], parts[1], parts[2]), 0.2, seed=1)
    assert three.test is not None and len(three.test) == 10  # type: ignore[arg-type]
    assert source_of(three, 0.2, seed=1) is three
    for wrong, reason in (
        ((data,), "1 data sets: give one"),
        (Subset(data, []), "needs a length above 0 and items by index"),
    ):
        with pytest.raises(UserError, match=reason):
            source_of(wrong, 0.2, seed=1)  # type: ignore[arg-type]
