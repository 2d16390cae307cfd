"""Data sets of the Hugging Face library `datasets`: `hf:NAME`, or a folder that `save_to_disk` wrote.

Splits are training, validation and test data; columns are chosen as those of tables (`--input`, `--target`). A column
of images with classes is image classification, anything else is a table. A name is looked for in the library's cache,
and on the hub only where it is not there; `hf:NAME:CONFIGURATION` names one of several configurations.

Needs: `pip install 'echelon[hf]'`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.config import DataConfig
from echelon.core.errors import UserError, nearest
from echelon.core.own import HUGGING_FACE
from echelon.data.base import DataOutline, DataRequest, Source
from echelon.data.class_folders import FolderLinks
from echelon.data.column_numbers import is_string
from echelon.data.columns import is_whole
from echelon.data.images import ImageCells
from echelon.data.parts import by_part, part_of
from echelon.data.sample_index import FixedSampleIndex
from echelon.data.sources.base import SourceKind, held_out, image_source
from echelon.data.sources.table import open_tables, outline_of_tables
from echelon.data.table_files import NO_SPLIT
from echelon.tasks.base import Encoding

if TYPE_CHECKING:
    from datasets import Dataset

_HASHED_FILES = 64
_HUB_S = 2.0  # in which the hub answers, or there is no network
_SAVED = (("dataset_dict.json",), ("dataset_info.json", "state.json"))


class HuggingFace(SourceKind):
    """The name of a data set, or the path of one that was saved."""

    form: ClassVar[str] = "hf:NAME"
    packages: ClassVar[tuple[str, ...]] = ("torchvision",)
    reads: ClassVar[tuple[str, ...]] = ("input", "target", "columns", "split", "follow_links")

    def takes(self, name: str) -> bool:
        """Whether the name begins with `hf:`, or a saved data set lies there."""
        return name.startswith(HUGGING_FACE) or _is_saved(Path(name).expanduser())

    def check(self, name: str) -> None:
        """Refuse data where the library is not installed, and an empty name.

        Raises:
            UserError: says what to install.
        """
        if name == HUGGING_FACE:
            raise UserError("data hf: needs the name of a data set, such as hf:imdb")
        if importlib.util.find_spec("datasets") is None:
            raise UserError(f"data {name} needs the package datasets: pip install 'echelon[hf]'")

    def outline(self, request: DataRequest) -> DataOutline | None:
        """Return what a table's target column is for; of images only opening tells."""
        self.check(request.config.source)
        found = _Splits.of(request)
        return None if found.images else outline_of_tables(found.request, found.tables)

    def open(self, request: DataRequest) -> Source:
        """Open the splits; without one for validation, samples are held out by the seed."""
        self.check(request.config.source)
        found = _Splits.of(request)
        source = _image_source(found) if found.images else open_tables(found.request, found.tables)
        return replace(source, notes=(*found.notes, *source.notes))


SOURCE = HuggingFace


def _is_saved(path: Path) -> bool:
    return path.is_dir() and any(all((path / name).is_file() for name in names) for names in _SAVED)


@dataclass(frozen=True)
class _Splits:
    """The splits of a data set, with the columns that are used.

    Attributes:
        request: with the columns that the data itself tells.
        tables: by part, `train`, `val` and `test`; class numbers are the names of classes, except beside images.
        images: the column that holds images; empty: none that is used does.
        classes: names by number of the target column; empty: it has none.
        notes: what is left out.
    """

    request: DataRequest
    tables: Mapping[str, pa.Table]
    images: str
    classes: tuple[str, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, request: DataRequest) -> _Splits:
        """Open a data set, and choose columns: as described, else those that its features tell.

        Raises:
            UserError: it is not there or cannot be read, lacks a column, or links lead out of its folder.
        """
        links = _links(request.config)
        splits = _loaded(request.config.source)
        parts, others = _parts(request.config.source, splits)
        features = parts["train"].features
        images = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
        classes = [name for name, feature in features.items() if hasattr(feature, "names")]
        config = request.config
        target = config.target or (classes[0] if len(classes) == 1 else "")
        given = config.input or (images[0] if len(images) == 1 else "")
        used = given if given in images else ""
        if used and not target:
            raise UserError(f"data {config.source}: name the column of classes with --target: {', '.join(features)}")
        if used and config.split not in ("", NO_SPLIT):
            raise UserError(f"data {config.source}: --split {config.split} is for tables, and not for images")
        if not used and images and not config.input:
            raise UserError(f"data {config.source}: several columns hold images ({', '.join(images)}): use --input")
        request = replace(request, config=replace(config, input=given, target=target))
        notes = [f"the split {', '.join(others)} is not used"] if others else []
        names = tuple(features[target].names) if target in classes else ()
        tables = {part: _table(data, keep=used) for part, data in parts.items()}
        if used and links is not None:
            links.count(path for table in tables.values() for path in _outer_files(Path(config.source), table[used]))
            links.check()
        notes += links.notes if links is not None else ()
        if "test" in tables and target in classes and _is_unlabelled(tables["test"], target):
            del tables["test"]
            notes.append(f"the test split has no {target}: it is not used")
        return cls(request, tables, used, names, tuple(notes))


def _links(config: DataConfig) -> FolderLinks | None:
    """Return the links in the folder of a saved data set, and the names there that lead to files; None: it has none.

    Raises:
        UserError: some lead out of the folder, and are not to be followed.
    """
    if config.source.startswith(HUGGING_FACE):
        return None
    folder = Path(config.source).expanduser()
    links = FolderLinks(folder, config.follow_links)
    named = [Path(top) / name for top, folders, files in os.walk(folder) for name in (*folders, *files)]
    with _refused(config.source):
        for file in [path for path in named if path.name == "dataset_dict.json"]:
            named += [file.parent / split for split in json.loads(file.read_bytes())["splits"]]
        for file in [path for path in named if path.name == "state.json"]:
            named += [file.parent / each["filename"] for each in json.loads(file.read_bytes())["_data_files"]]
    links.count(named)
    links.check()
    return links


def _outer_files(folder: Path, cells: pa.ChunkedArray) -> list[Path]:
    """Return the files of a column of images that are not in the column itself, as seen from the data's folder."""
    paths = pc.filter(pc.struct_field(cells, "path"), pc.is_null(pc.struct_field(cells, "bytes")))
    top = folder.expanduser()
    return [top / os.path.relpath(path, top) for path in pc.drop_null(paths).to_pylist()]


def _loaded(source: str) -> Mapping[str, Dataset]:
    """Return the splits by name.

    Raises:
        UserError: it is not there, or cannot be read.
    """
    import datasets

    with _refused(source), _quiet(datasets):
        if source.startswith(HUGGING_FACE):
            found = _from_cache_or_hub(datasets, source)
        else:
            found = datasets.load_from_disk(str(Path(source).expanduser()))
    return found if isinstance(found, dict) else {"train": found}


def _from_cache_or_hub(datasets: Any, source: str) -> Any:
    """Return what the library's cache has of a name; else what the hub has, where it answers at all.

    The library itself asks the hub first, and tries for half a minute where there is no network.

    Raises:
        UserError: it is not in the cache, and the hub cannot be reached.
    """
    name, _, configuration = source.removeprefix(HUGGING_FACE).partition(":")
    wanted = name, configuration or None
    always_offline = datasets.config.HF_HUB_OFFLINE
    try:
        datasets.config.HF_HUB_OFFLINE = True
        return datasets.load_dataset(*wanted)
    except FileNotFoundError:  # a path, which no hub has
        raise
    except Exception as error:  # the library raises errors of many kinds, also for another configuration in the cache
        hub = datasets.config.HF_ENDPOINT
        reason = "the library is set to work offline" if always_offline else _unreachable(hub)
        if reason:
            raise UserError(f"data {source}: it is not in the cache of datasets, and {reason}") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = always_offline
    return datasets.load_dataset(*wanted)


def _unreachable(hub: str) -> str:
    """Return why a hub does not answer within seconds; empty: it does, whatever it says."""
    from huggingface_hub import get_session

    answers: Queue[str] = Queue()

    def ask() -> None:
        """Ask once; a name that is looked up in vain may take longer than any time limit of the connection."""
        try:
            get_session().head(hub, timeout=_HUB_S)
            answers.put("")
        except Exception as error:  # noqa: BLE001 (those of the library's transport, which it has changed before)
            answers.put(f"{hub} cannot be reached ({str(error) or type(error).__name__})")

    Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=_HUB_S)
    except Empty:
        return f"{hub} has not answered in {_HUB_S:g} s"


@contextmanager
def _refused(source: str) -> Iterator[None]:
    """Say in one line why a data set cannot be loaded: the library raises errors of its own and of many others."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise UserError(f"data {source}: datasets cannot load it ({type(error).__name__}: {reason})") from error


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Let each process of a run show no progress bars of its own."""
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _parts(source: str, splits: Mapping[str, Dataset]) -> tuple[dict[str, Dataset], list[str]]:
    """Return the splits by part, and the names of those that are of none; a single split is `train`."""
    if len(splits) == 1:
        return {"train": next(iter(splits.values()))}, []
    parts = {part: splits[name] for part, name in by_part(source, splits).items()}
    if "train" not in parts:
        raise UserError(f"data {source}: it has no split train, but {', '.join(splits)}")
    return parts, [name for name in splits if not part_of(name)]


def _table(data: Dataset, keep: str) -> pa.Table:
    """Return a split's rows; numbers of classes become their names, unless a column `keep` of images is used."""
    data = data.flatten_indices() if data._indices is not None else data
    table = data.data.table.replace_schema_metadata()
    for name, feature in data.features.items():
        if hasattr(feature, "names") and not keep:
            numbers = table[name]
            known = pc.if_else(pc.less(numbers, 0), None, numbers)  # -1: no class is known
            column = pc.take(pa.array(feature.names, pa.string()), known)
            table = table.set_column(table.column_names.index(name), name, column)
    return table


def _is_unlabelled(table: pa.Table, target: str) -> bool:
    values = table[target]
    if is_whole(values):
        return bool(pc.all(pc.less(values, 0)).as_py())
    return bool(values.null_count == len(values))


def _image_source(splits: _Splits) -> Source:
    """Return images with a class each.

    Raises:
        UserError: a column is not there, the task is for others, or the target holds no classes.
    """
    request, source = splits.request, splits.request.config.source
    if request.encoding not in (Encoding.AUTO, Encoding.CLASSES):
        raise UserError(f"data {source} is images with classes, which --task {request.task} does not take")
    target = request.config.target
    for part, table in splits.tables.items():
        if target not in table.column_names:
            hint = nearest(target, table.column_names)
            raise UserError(
                f"data {source}, {part}: no column {target!r}: {hint}it has {', '.join(table.column_names)}"
            )
    names = splits.classes or _names(source, target, splits.tables["train"])
    parts = {part: _images(splits, part, table, names) for part, table in splits.tables.items()}
    train, validation, test = parts["train"], parts.get("val"), parts.get("test")
    notes: tuple[str, ...] = ()
    sample_index = FixedSampleIndex.of(request.folder, source, len(train), _digest(train, names))
    if validation is None:
        divided = held_out(request, len(train), test is not None, "image")
        train, validation, notes = train.subset(divided.train), train.subset(divided.evaluation), divided.notes
    images = image_source(request.config, train, validation, tuple(map(str, names)))
    return replace(images, test=test, notes=notes, sample_index=sample_index)


def _digest(images: ImageCells, names: tuple[Any, ...]) -> str:
    """Return a hash of labels, of the length of each image's file in the column, and of some of these files.

    Of files that lie elsewhere it has the names.
    """
    hashed = hashlib.sha256(repr(names).encode() + images.labels.tobytes())
    lengths = pc.fill_null(pc.binary_length(images.files), -1).to_numpy().astype(np.int64)
    hashed.update(lengths.tobytes())
    for i in np.unique(np.linspace(0, len(images) - 1, _HASHED_FILES).astype(int)).tolist():
        hashed.update(images.files[i].as_py() or b"")
    for i in np.flatnonzero(lengths < 0).tolist():
        hashed.update(f"{os.path.basename(images.paths[i].as_py() or '')}\0".encode())  # noqa: PTH119 - many files
    return hashed.hexdigest()


def _names(source: str, target: str, table: pa.Table) -> tuple[Any, ...]:
    """Return the classes of the training part: its values, sorted."""
    values = table[target]
    if not (is_string(values) or is_whole(values)):
        raise UserError(f"data {source}: column {target} holds {values.type}, and no classes: name them with --target")
    names = tuple(pc.drop_null(pc.unique(values)).sort().to_pylist())
    if len(names) < 2 or 2 * len(names) > len(values) + 2:
        raise UserError(f"data {source}: {len(values)} images have {len(names)} different {target}: are these classes?")
    return names


def _images(splits: _Splits, part: str, table: pa.Table, names: tuple[Any, ...]) -> ImageCells:
    source, target = splits.request.config.source, splits.request.config.target
    cells, values = table[splits.images], table[target]
    places = values if splits.classes else pc.index_in(values, value_set=pa.array(names, values.type))
    unknown = pc.fill_null(pc.invert(pc.and_(pc.greater_equal(places, 0), pc.less(places, len(names)))), True)
    if pc.any(unknown).as_py():
        row = pc.index(unknown, True).as_py()
        raise UserError(f"data {source}, {part}: row {row + 1} has no class that is known: {target} is {values[row]}")
    labels = places.to_numpy().astype(np.int64)
    contents, paths = pc.struct_field(cells, "bytes"), pc.struct_field(cells, "path")
    return ImageCells(f"{source}, {part}", contents, paths, np.arange(len(labels)), labels)
